"""Gate 2: which filled slots are accepted, and what their rewards make of their groups. Pure.

Invariants: a slot is filled once, by the node that holds it under an open lease; the same rollout again from the same
node is a DUPLICATE and changes nothing; a slot that moved is filled only by what goes on from its prefix; the
environment's tokens in it are those of the prefix, and no node adds to them.
"""

import math

from coordinator.core.effects import ScoreRollout
from coordinator.core.events import EnvironmentReplied, RolloutScored, RolloutSubmitted
from coordinator.core.facts import LeaseClosed, RewardRecorded, RolloutAccepted, SlotFailed, SlotGivenBack, TurnTaken
from coordinator.core.leases import unknown_lease
from coordinator.core.replies import Receipt
from coordinator.core.returns import settle
from coordinator.core.state import Prefix
from coordinator.core.turn import Turn
from protocol.errors import RolloutConflictError, RolloutMalformedError, VersionFromFutureError
from protocol.ids import Digest, PeerId, SlotKey, Version
from protocol.lag import is_fresh


def submit(turn: Turn, event: RolloutSubmitted) -> Receipt:
    """ACCEPTED, DUPLICATE, VERSION_TOO_OLD (the slot is given back), or TURN_TAKEN or SLOT_FAILED (by the environment).

    Raises `NotEnrolledError`, `LeaseUnknownError`, `RolloutConflictError`, `RolloutMalformedError` or
    `VersionFromFutureError`; then nothing has changed.
    """
    turn.require_enrolled(event.peer_id)
    filled = _fill_of(turn, event.slot)
    if filled is not None and filled[0] == event.peer_id:
        if filled[1] == event.digest:
            return Receipt(event.slot, "DUPLICATE", "it was accepted before")
        raise RolloutConflictError(
            f"the rollout for slot {event.slot} was refused",
            why="this node filled the slot with another rollout before",
            remedy="Drop it.",
        )
    slot = turn.state.find(event.slot)
    prefix = slot.prefix if slot is not None else None
    if prefix is not None and prefix.answered is not None and event.edges[-1:] == (prefix.answered,):
        return Receipt(event.slot, "DUPLICATE", "its last turn was taken before")
    _check_lease(turn, event)
    head = _check_segments(turn, event)
    _check_prefix(event, prefix)
    _check_given(event, prefix)
    turn.soft.progress.pop((event.slot.task.index, event.slot.sample), None)
    newest = event.segments[-1][0]
    if not is_fresh(v_train=head, v_token=newest, max_lag=turn.max_lag):
        turn.emit(SlotGivenBack(event.lease_id, event.slot))
        _close_if_done(turn, event)
        detail = f"its newest token is of version {newest}, the newest version is {head}, the bound {turn.max_lag}"
        return Receipt(event.slot, "VERSION_TOO_OLD", detail)
    turn.soft.faults.pop(event.peer_id, None)
    if isinstance(event.reply, str):
        return _fail(turn, event, event.reply)
    if event.reply is not None:
        return _take_turn(turn, event, event.reply)
    turn.emit(
        RolloutAccepted(
            event.slot, event.lease_id, event.peer_id, event.digest, event.segments, turn.now_ms, event.given
        )
    )
    _close_if_done(turn, event)
    turn.ask(ScoreRollout(event.slot))
    return Receipt(event.slot, "ACCEPTED")


def _take_turn(turn: Turn, event: RolloutSubmitted, reply: EnvironmentReplied) -> Receipt:
    """The environment's tokens follow, as of the version before them, and the slot waits for whoever goes on."""
    *before, (version, length) = event.segments
    segments = (*before, (version, length + reply.num_tokens))
    given = (*event.given, (sum(length for _, length in event.segments), reply.num_tokens))
    answered = event.edges[-1]
    turn.emit(TurnTaken(event.slot, event.lease_id, event.peer_id, segments, reply.edge, given, answered, turn.now_ms))
    _close_if_done(turn, event)
    return Receipt(event.slot, "TURN_TAKEN", "the slot goes on after the environment's reply")


def _fail(turn: Turn, event: RolloutSubmitted, reason: str) -> Receipt:
    """Nobody else's turn would fare better: the slot ends, and nothing speaks against the node."""
    turn.emit(SlotGivenBack(event.lease_id, event.slot, "no_reply"))
    turn.emit(SlotFailed(event.slot, reason))
    _close_if_done(turn, event)
    settle(turn, event.slot.task.index)
    return Receipt(event.slot, "SLOT_FAILED", reason)


def score(turn: Turn, event: RolloutScored) -> None:
    """Records a reward; a second word on the same slot changes nothing. A reward that is no number is missing."""
    slot = turn.state.find(event.slot)
    if slot is None or slot.status != "accepted":
        return
    reward = event.reward if event.reward is not None and math.isfinite(event.reward) else None
    turn.emit(RewardRecorded(event.slot, reward))
    settle(turn, event.slot.task.index)


def ask_for_scores(turn: Turn) -> None:
    """Asks again for every accepted slot without a reward; the grader's memory died with the process."""
    for group in turn.state.groups.values():
        for sample, slot in enumerate(group.slots):
            if slot.status == "accepted":
                turn.ask(ScoreRollout(group.key(sample)))


def _fill_of(turn: Turn, key: SlotKey) -> tuple[PeerId, Digest] | None:
    slot = turn.state.find(key)
    if slot is not None:
        return (slot.peer_id, slot.digest) if slot.peer_id and slot.digest else None
    retired = turn.state.retired.get(key.task.index)
    if retired is None or retired.task != key.task or retired.version != key.version:
        return None
    return retired.fills[key.sample] if 0 <= key.sample < len(retired.fills) else None


def _check_lease(turn: Turn, event: RolloutSubmitted) -> None:
    lease = turn.state.leases.get(event.lease_id)
    place = (event.slot.task.index, event.slot.sample)
    is_his = lease is not None and lease.peer_id == event.peer_id and turn.now_ms < lease.deadline_ms
    if lease is None or not is_his or place not in lease.slots or turn.state.find(event.slot) is None:
        raise unknown_lease(event.lease_id)


def _check_segments(turn: Turn, event: RolloutSubmitted) -> Version:
    """The head's version, once the segments' versions have an order that could have happened."""
    head = turn.require_head().version
    versions = [version for version, _ in event.segments]
    if not versions or versions != sorted(versions) or any(length < 1 for _, length in event.segments):
        raise RolloutMalformedError(
            f"the rollout for slot {event.slot} was refused",
            why="it has no segments, an empty one, or versions that go backwards",
        )
    if versions[0] < event.slot.version:
        raise RolloutMalformedError(
            f"the rollout for slot {event.slot} was refused",
            why=f"it has tokens of version {versions[0]}, older than the slot",
        )
    if versions[-1] > head:
        raise VersionFromFutureError(
            f"the rollout for slot {event.slot} was refused",
            why=f"it has tokens of version {versions[-1]}, and the newest version is {head}",
        )
    return head


def _check_given(event: RolloutSubmitted, prefix: Prefix | None) -> None:
    if event.given != (prefix.given if prefix is not None else ()):
        raise RolloutMalformedError(
            f"the rollout for slot {event.slot} was refused",
            why="it has other tokens of the environment than came with its lease",
            remedy="Hand in what was sampled; the coordinator asks the environment.",
        )


def _check_prefix(event: RolloutSubmitted, prefix: Prefix | None) -> None:
    if prefix is not None and prefix.edge not in event.edges:
        raise RolloutMalformedError(
            f"the rollout for slot {event.slot} was refused",
            why="it does not go on from the pieces that came with its lease",
            remedy="Hand in those pieces as they came, and then what was sampled after them.",
        )


def _close_if_done(turn: Turn, event: RolloutSubmitted) -> None:
    if not turn.state.leases[event.lease_id].slots:
        turn.emit(LeaseClosed(event.lease_id, "filled"))
