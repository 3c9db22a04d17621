"""How a round becomes a version: the trainers' words, their agreement, the commit. Pure.

Invariants: a version is committed once, by the same body from every member of the open round, on top of the head;
gate 3 runs once more before it; nothing else ends a round well. If the bodies differ nobody's is taken.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.core.effects import AnnounceVersion
from coordinator.core.events import BaseRegistered, RoundFailed, VersionAttested
from coordinator.core.facts import VersionCommitted
from coordinator.core.metrics import batch_metrics
from coordinator.core.returns import cancel_stale
from coordinator.core.rounds import abort
from coordinator.core.shares import num_live_tokens
from coordinator.core.soft import Attestation
from coordinator.core.state import Batch, Round
from coordinator.core.turn import Turn
from protocol.canary import TOLERANCES, max_difference
from protocol.errors import ManifestRefusedError, NotEnrolledError, RoundStaleError
from protocol.ids import PeerId, RoundId, Version
from protocol.manifest import Body

MAX_METRICS = 64
MAX_DETAIL = 200


def register_base(turn: Turn, event: BaseRegistered) -> None:
    """Commits version 0. Raises `ManifestRefusedError` if the run has another base, or this is none."""
    body, run_id = event.body, turn.rules.spec.run_id
    if body.version != 0 or body.parent is not None or body.run_id not in (None, run_id):
        raise _refused("the base model", "it is not a version 0, or belongs to another run")
    known = turn.state.base_root
    if known and known != body.root:
        raise _refused("the base model", f"this run began with {known}")
    if turn.state.head is None:
        _commit(turn, replace(body, run_id=run_id), round_id=None, metrics={}, groups=(), canary=event.canary)


def attest(turn: Turn, event: VersionAttested) -> None:
    """Notes a member's word; the last one commits the version or aborts the round.

    Raises `RoundStaleError`, `NotEnrolledError` or `ManifestRefusedError`; then nothing has changed.
    """
    if _is_committed(turn, event.body):
        return
    round_, batch = _open_round(turn, event.peer_id, event.round_id)
    _check_body(turn, event.body)
    soft = turn.soft
    soft.attestations[event.peer_id] = Attestation(event.body.digest, event.body, event.metrics, event.canary)
    if any(peer not in soft.attestations for peer in round_.peer_ids):
        return
    _judge(turn, round_, batch)


def _judge(turn: Turn, round_: Round, batch: Batch) -> None:
    """All members have spoken."""
    words = dict(turn.soft.attestations)
    if len({word.digest for word in words.values()}) > 1:
        suspects = _suspects(turn, words, batch)
        abort(turn, reason="DIVERGED", detail="the members made different weights", suspects=suspects)
        return
    _check_batch(turn, batch)
    turn.soft.attestations.clear()
    body = next(iter(words.values())).body
    metrics = {**_mean_metrics(words), **batch_metrics(turn.state, batch)}
    canary = _agreed_canary([word.canary for word in words.values()])
    _commit(turn, body, round_id=round_.round_id, metrics=metrics, groups=batch.groups, canary=canary)
    turn.soft.old_slots_since_ms = None
    cancel_stale(turn)


def fail(turn: Turn, event: RoundFailed) -> None:
    """Aborts the round without those whom a member names; who names nobody cannot do its own part.

    Raises `RoundStaleError` or `NotEnrolledError`.
    """
    round_, _ = _open_round(turn, event.peer_id, event.round_id)
    named = tuple(p for p in round_.peer_ids if p in event.suspects and p != event.peer_id)
    abort(turn, reason="FAILED", detail=event.reason[:MAX_DETAIL], suspects=named or (event.peer_id,))


def _is_committed(turn: Turn, body: Body) -> bool:
    """Whether a member repeats its word on what became the head; it may have missed the answer."""
    head, committed = turn.state.head, turn.state.head_body
    return head is not None and head.version == body.version > 0 and committed == body


def _open_round(turn: Turn, peer_id: PeerId, round_id: RoundId) -> tuple[Round, Batch]:
    round_, batch = turn.state.round, turn.state.batch
    if round_ is None or batch is None or round_.round_id != round_id:
        raise RoundStaleError(
            f"round {round_id} was refused", why="it is not the open one", remedy="Wait for the next plan."
        )
    if peer_id not in round_.peer_ids:
        raise NotEnrolledError(f"node {peer_id} was refused", why=f"it is not a member of round {round_id}")
    return round_, batch


def _check_body(turn: Turn, body: Body) -> None:
    """Raises `ManifestRefusedError` unless the body could follow the head."""
    head, before = turn.require_head(), turn.state.head_body
    assert before is not None
    what = f"the body of version {body.version}"
    if body.run_id != turn.rules.spec.run_id:
        raise _refused(what, "it belongs to another run")
    if body.version != head.version + 1 or body.parent != head.root:
        raise _refused(what, f"it does not follow version {head.version}")
    same = (before.tensors, before.chunk_bytes, before.files)
    if (body.tensors, body.chunk_bytes, body.files) != same or len(body.chunks) != len(before.chunks):
        raise _refused(what, "its tensors, chunk size or files are not those of the version before")


def _refused(what: str, why: str) -> ManifestRefusedError:
    return ManifestRefusedError(f"{what} was refused", why=why)


def _check_batch(turn: Turn, batch: Batch) -> None:
    """Gate 3 at commit: the tokens that were live at the cut, and no others, are what the trainers got."""
    num_tokens = sum(
        num_live_tokens(slot, v_train=turn.require_head().version, max_lag=batch.max_lag)
        for index in batch.groups
        for slot in turn.state.groups[index].slots
        if slot.status == "in_round"
    )
    assert num_tokens == batch.num_tokens, f"the batch held {batch.num_tokens} live tokens, now {num_tokens}"


def _suspects(turn: Turn, words: Mapping[PeerId, Attestation], batch: Batch) -> tuple[PeerId, ...]:
    """The minority if there is a majority. Without one nobody at first; when it happens again at this version, the
    member that took part in the fewest committed rounds, so that no pair can stop the run."""
    (digest, count), *_ = Counter(word.digest for word in words.values()).most_common(1)
    if 2 * count > len(words):
        return tuple(sorted(peer for peer, word in words.items() if word.digest != digest))
    if batch.num_attempts < 2:
        return ()
    return (min(words, key=lambda peer: (turn.state.nodes[peer].num_rounds, peer)),)


def _agreed_canary(canaries: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """What the first member says of the probe, unless another one's word is further from it than two right computations
    may be: a version without a canary only goes unjudged, one with a wrong canary would be sampled by nobody."""
    told = [canary for canary in canaries if canary]
    allowed = TOLERANCES["float32"].max_difference
    if not told or any(max_difference(other, told[0]) > allowed for other in told[1:]):
        return ()
    return told[0]


def _mean_metrics(words: Mapping[PeerId, Attestation]) -> dict[str, float]:
    """Of what the members measured: the mean over those that sent a finite number."""
    values: dict[str, list[float]] = {}
    for peer in sorted(words):
        for name, value in sorted(words[peer].metrics.items())[:MAX_METRICS]:
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {  # shares are summed, since a sum of what strangers send may overflow
        name: math.fsum(value / len(values[name]) for value in values[name]) for name in sorted(values)[:MAX_METRICS]
    }


def _commit(
    turn: Turn,
    body: Body,
    *,
    round_id: RoundId | None,
    metrics: dict[str, float],
    groups: tuple[int, ...],
    canary: tuple[float, ...] = (),
) -> None:
    every = turn.rules.evaluate_every
    keep_from = Version(max(0, body.version - turn.max_lag - 2))
    turn.emit(
        VersionCommitted(
            version=body.version,
            root=body.root,
            body=body,
            round_id=round_id,
            committed_ms=turn.now_ms,
            metrics=metrics,
            groups=groups,
            keep_from=keep_from,
            evaluate=every > 0 and (body.version % every == 0 or body.version == turn.rules.stop_version),
            canary=canary,
        )
    )
    turn.ask(AnnounceVersion(body.version, body))
