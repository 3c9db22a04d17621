"""What nodes say of themselves, made harmless: bounded, finite, and of a closed alphabet. Pure.

Nothing here is believed; it is shown to people and used to share work out, and a wrong figure costs its owner most.
"""

import math
import re
from collections.abc import Mapping, Sequence

from coordinator.core.events import ANY_ROLE, Capability, Presence
from protocol.canary import NUM_SCORED_TOKENS
from protocol.endpoint import parse_endpoint
from protocol.ids import Digest, Version
from protocol.record import Record
from protocol.v1 import control_pb2

MAX_VERSIONS_HELD = 16
MAX_METRICS = 64
MAX_RATE = 1e12
MAX_TEXT = 64
_METRIC = re.compile(r"[A-Za-z0-9_./-]{1,64}")
_NAME = re.compile(r"[a-z0-9-]{1,32}")
_TEXT = re.compile(r"[^A-Za-z0-9 ._()/+:,-]")


def presence_of(message: control_pb2.Hello | control_pb2.Heartbeat, before: Presence | None) -> Presence:
    """The node as its latest message leaves it; a heartbeat keeps what only the hello says."""
    if isinstance(message, control_pb2.Hello):
        said = message.allowed_roles
        return Presence(
            version=Version(-1),
            root=Digest(""),
            versions_held=(),
            endpoint=_endpoint(message.endpoint),
            trainer_endpoint=_endpoint(message.trainer_endpoint),
            activity="joining",
            tokens_per_s=0.0,
            engine="",
            name=message.name if _NAME.fullmatch(message.name) else "",
            unwilling=_text(message.unwilling),
            allowed_roles=tuple(role for role in ANY_ROLE if not said or role in said),
        )
    assert before is not None
    return Presence(
        version=Version(message.version),
        root=Digest(message.root[:64]),
        versions_held=tuple(Version(version) for version in message.versions_held[:MAX_VERSIONS_HELD]),
        endpoint=before.endpoint,
        trainer_endpoint=_endpoint(message.trainer_endpoint),
        activity=_text(message.activity),
        tokens_per_s=_number(message.tokens_per_s),
        engine=_text(message.engine),
        name=before.name,
        unwilling=_text(message.unwilling),
        allowed_roles=before.allowed_roles,
    )


def capability_of(hello: control_pb2.Hello) -> Capability | None:
    """What a hello says that the node can do, if it says so."""
    if not hello.HasField("capability"):
        return None
    said = hello.capability
    return Capability(
        decode_tokens_per_s=_number(said.decode_tokens_per_s),
        train_tokens_per_s=_number(said.train_tokens_per_s),
        memory_bytes=max(0, said.memory_bytes),
        device=_text(said.device),
        link_mbit_per_s=_number(said.link_mbit_per_s),
        rtt_ms=_number(said.rtt_ms),
        reachable=said.reachable,
    )


def capability_in(record: Record) -> Capability | None:
    """What a record of the directory says that its node can do, once it has measured itself; one with an endpoint
    counts as reachable."""
    if record.decode_tokens_per_s <= 0 and record.train_tokens_per_s <= 0:
        return None
    return Capability(
        decode_tokens_per_s=record.decode_tokens_per_s,
        train_tokens_per_s=record.train_tokens_per_s,
        memory_bytes=record.memory_bytes,
        device=record.device,
        link_mbit_per_s=record.link_mbit_per_s,
        rtt_ms=record.rtt_ms,
        reachable=bool(record.endpoint),
    )


def metrics_of(said: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an update that have a plain name and a finite value, by name; the others are left out."""
    kept = [name for name in said if _METRIC.fullmatch(name) and math.isfinite(said[name])]
    return {name: said[name] for name in sorted(kept)[:MAX_METRICS]}


def canary_of(said: Sequence[float]) -> tuple[float, ...]:
    """What a trainer says of the probe; nothing where it is not one log-probability for each token of it."""
    is_sound = len(said) == NUM_SCORED_TOKENS and all(math.isfinite(value) and value <= 0 for value in said)
    return tuple(said) if is_sound else ()


def printable(text: str, limit: int) -> str:
    """One line for people and logs: at most `limit` characters, none of which moves a cursor or turns the text."""
    return "".join(character for character in text[:limit] if character.isprintable())


def _number(value: float) -> float:
    return min(max(value, 0.0), MAX_RATE) if math.isfinite(value) else 0.0


def _text(value: str) -> str:
    return _TEXT.sub("", value[:MAX_TEXT])


def _endpoint(value: str) -> str:
    try:
        return str(parse_endpoint(value)) if value else ""
    except ValueError:
        return ""
