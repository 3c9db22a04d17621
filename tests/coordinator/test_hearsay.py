"""What nodes say of themselves: whatever it is, it comes out bounded, finite and of a closed alphabet."""

import math
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.events import Capability, Presence
from coordinator.hearsay import (
    MAX_METRICS,
    MAX_RATE,
    canary_of,
    capability_in,
    capability_of,
    metrics_of,
    presence_of,
    printable,
)
from protocol.ids import PeerId
from protocol.record import Record
from protocol.v1 import common_pb2, control_pb2

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=64)
TEXT = st.text(max_size=200)
PLAIN = re.compile(r"[A-Za-z0-9 ._()/+:,-]{0,64}")
ENDPOINT = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+|")

hellos = st.builds(
    control_pb2.Hello,
    program=TEXT,
    endpoint=TEXT | st.sampled_from(["host:1", "[::1]:65535", "host:0", "host:65536", "a b:1"]),
    trainer_endpoint=TEXT,
    name=TEXT | st.sampled_from(["fox", "Fox", "<script>", "a" * 33, "fox\n"]),
    capability=st.none()
    | st.builds(
        common_pb2.Capability,
        decode_tokens_per_s=FLOAT,
        train_tokens_per_s=FLOAT,
        memory_bytes=INT64,
        device=TEXT,
        link_mbit_per_s=FLOAT,
        rtt_ms=FLOAT,
        reachable=st.booleans(),
    ),
)
heartbeats = st.builds(
    control_pb2.Heartbeat,
    version=INT64,
    root=TEXT,
    versions_held=st.lists(INT64, max_size=40),
    activity=TEXT,
    tokens_per_s=FLOAT,
    trainer_endpoint=TEXT,
    engine=TEXT,
)


def check_presence(presence: Presence) -> None:
    assert re.fullmatch(r"[a-z0-9-]{0,32}", presence.name)
    assert PLAIN.fullmatch(presence.activity)
    assert PLAIN.fullmatch(presence.engine)
    assert ENDPOINT.fullmatch(presence.endpoint)
    assert ENDPOINT.fullmatch(presence.trainer_endpoint)
    assert 0 <= presence.tokens_per_s <= MAX_RATE
    assert len(presence.root) <= 64
    assert len(presence.versions_held) <= 16


def check_capability(capability: Capability) -> None:
    rates = (capability.decode_tokens_per_s, capability.train_tokens_per_s)
    for rate in (*rates, capability.link_mbit_per_s, capability.rtt_ms):
        assert 0 <= rate <= MAX_RATE
    assert capability.memory_bytes >= 0
    assert PLAIN.fullmatch(capability.device)


@given(hello=hellos, heartbeat=heartbeats)
def test_whatever_nodes_say_is_made_harmless(hello: control_pb2.Hello, heartbeat: control_pb2.Heartbeat) -> None:
    first = presence_of(hello, None)
    check_presence(first)
    later = presence_of(heartbeat, first)
    check_presence(later)
    assert (later.name, later.endpoint) == (first.name, first.endpoint)
    capability = capability_of(hello)
    assert (capability is None) == (not hello.HasField("capability"))
    if capability is not None:
        check_capability(capability)


def test_honest_words_come_through() -> None:
    able = common_pb2.Capability(decode_tokens_per_s=9.5, memory_bytes=7, device="NVIDIA H200 (141 GB)", reachable=True)
    hello = control_pb2.Hello(endpoint="host.example:7", name="fox-7", capability=able)
    first = presence_of(hello, None)
    assert (first.endpoint, first.name, first.version, first.activity) == ("host.example:7", "fox-7", -1, "joining")
    assert capability_of(hello) == Capability(9.5, 0.0, 7, "NVIDIA H200 (141 GB)", 0.0, 0.0, True)
    beat = control_pb2.Heartbeat(version=3, root="ab", versions_held=[2, 3], activity="generating: 4 of 8, v3")
    later = presence_of(beat, first)
    assert (later.version, later.versions_held, later.activity) == (3, (2, 3), "generating: 4 of 8, v3")


@given(st.dictionaries(TEXT | st.from_regex(r"[a-z_/.-]{1,70}", fullmatch=True), FLOAT, max_size=100))
def test_metrics_have_plain_names_and_finite_values(said: dict[str, float]) -> None:
    kept = metrics_of(said)
    assert len(kept) <= MAX_METRICS
    for name, value in kept.items():
        assert re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", name)
        assert math.isfinite(value)
        assert said[name] == value


@given(st.text())
def test_text_for_people_is_one_line_of_printable_characters(text: str) -> None:
    line = printable(text, 50)
    assert len(line) <= 50
    assert line.isprintable()


def test_printable_keeps_words_and_drops_what_moves_the_cursor() -> None:
    assert printable("größe: 3 von 4", 50) == "größe: 3 von 4"
    assert printable("a\x1b[2Jb\r\nc\0d\u202ee\u2028f", 50) == "a[2Jbcdef"


def a_record(**changes: Any) -> Record:
    known: dict[str, Any] = {
        "peer_id": PeerId("peer"),
        "role": "idle",
        "device": "cpu",
        "decode_tokens_per_s": 0.0,
        "train_tokens_per_s": 0.0,
        "memory_bytes": 0,
        "link_mbit_per_s": 0.0,
        "rtt_ms": 0.0,
        "endpoint": "",
        "trainer_endpoint": "",
        "versions": (),
        "issued_ms": 0,
        "expires_ms": 1,
        "stamp": b"",
    }
    return Record(**{**known, **changes})


def test_record_of_a_node_that_has_not_measured_itself_says_nothing_of_its_rates() -> None:
    """Else roles would be given out before anybody knows who is fast."""
    assert capability_in(a_record()) is None
    measured = capability_in(a_record(train_tokens_per_s=5.0, endpoint="192.0.2.1:7"))
    assert measured is not None
    assert (measured.train_tokens_per_s, measured.reachable) == (5.0, True)
    assert capability_in(a_record(decode_tokens_per_s=5.0)) == Capability(5.0, 0.0, 0, "cpu", reachable=False)


@given(st.lists(FLOAT, max_size=40) | st.lists(st.floats(-20, 0), min_size=28, max_size=28))
def test_a_canary_is_one_logprob_for_each_token_or_nothing(said: list[float]) -> None:
    canary = canary_of(said)
    is_sound = len(said) == 28 and all(math.isfinite(value) and value <= 0 for value in said)
    assert canary == (tuple(said) if is_sound else ())
