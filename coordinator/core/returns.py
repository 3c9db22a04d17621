"""How slots come back from leases, what they keep, and how groups come to their end. Pure.

Invariants: an unfilled slot returns exactly once; what was received of it goes with it, and whoever fills it goes on
from there; a slot that too many nodes failed ends as a dead letter, so that one bad task cannot hold the run; a group
ends when its last slot does.
"""

from statistics import median_low
from typing import Literal

from coordinator.core.effects import CancelLeases, CancelSlots
from coordinator.core.events import PiecesReceived, PrefixLost, SlotProgress, TurnsAwaited
from coordinator.core.facts import (
    GroupDropped,
    LeaseClosed,
    LeaseEnd,
    LeaseExtended,
    LengthLearned,
    PrefixDropped,
    SlotCancelled,
    SlotFailed,
    SlotGivenBack,
    SlotMoved,
)
from coordinator.core.pace import lease_span_ms, note_progress
from coordinator.core.soft import Advance
from coordinator.core.state import Slot
from coordinator.core.turn import Turn
from protocol.ids import LeaseId, PeerId, SlotKey, Version
from protocol.lag import is_fresh

MIN_REWARDS = 2
"""A group's mean over fewer members says nothing."""

STALL_MS = 15_000
"""A slot that has begun, and of which nothing came for so long while others of its node came on, is lost there."""

STALL_LOOK_MS, LOOKED_AT_A_MS = 2_000, 10
"""No more often, and no more slots for each millisecond that passes, are looked through for those that stand still."""

MAX_TRIES = 8
"""So many nodes may fail a slot before it is a dead letter."""

MAX_FILTERED_BATCHES = 32
"""Batches' worth of groups without variance that are filtered for one version; then they are trained on as they are,
so that a run whose rewards are all equal goes on."""


def close_lease(
    turn: Turn, lease_id: LeaseId, how: LeaseEnd, *, reason: str, is_fault: bool, is_try: bool = False
) -> None:
    """Takes back what is unfilled of a lease."""
    places, peer_id = list(turn.state.leases[lease_id].slots), turn.state.leases[lease_id].peer_id
    if is_fault and places:
        turn.soft.faults[peer_id] = (turn.soft.faults.get(peer_id, (0, 0))[0] + 1, turn.now_ms)
        turn.soft.failed_ms.update(dict.fromkeys(places, turn.now_ms))
    turn.emit(LeaseClosed(lease_id, how, reason, is_fault, is_try))
    for place in places:
        _keep_prefix(turn, place)
        group = turn.state.groups[place[0]]
        if group.slots[place[1]].num_tries >= MAX_TRIES:
            turn.soft.failed_ms.pop(place, None)
            turn.emit(SlotFailed(group.key(place[1]), f"it was tried {MAX_TRIES} times; the last: {reason}"))
            settle(turn, place[0])


def leases_by_peer(turn: Turn) -> dict[PeerId, tuple[LeaseId, ...]]:
    """The open leases of each node."""
    held: dict[PeerId, tuple[LeaseId, ...]] = {}
    for lease_id, lease in turn.state.leases.items():
        held[lease.peer_id] = (*held.get(lease.peer_id, ()), lease_id)
    return held


def close_all(
    turn: Turn, peer_id: PeerId, held: tuple[LeaseId, ...], how: LeaseEnd, *, reason: str, is_fault: bool
) -> None:
    """Takes the leases of a node back, and tells it if it is alive."""
    for lease_id in held:
        close_lease(turn, lease_id, how, reason=reason, is_fault=is_fault)
    if held and peer_id in turn.soft.live:
        turn.ask(CancelLeases(peer_id, held))


def take_progress(turn: Turn, event: PiecesReceived) -> None:
    """Notes how far slots have come, and prolongs the leases of those that come on."""
    for progress in event.progress:
        lease = turn.state.leases.get(progress.lease_id)
        place = (progress.slot.task.index, progress.slot.sample)
        slot = turn.state.find(progress.slot)
        if lease is None or lease.peer_id != progress.peer_id or place not in lease.slots or slot is None:
            continue
        if not _could_be(turn, progress):
            continue
        known = turn.soft.progress.get(place)
        least = _num_tokens(known.said.segments) if known else slot.prefix.num_tokens if slot.prefix else 0
        num_new = _num_tokens(progress.segments) - least
        if num_new > 0:
            span_ms = turn.now_ms - known.at_ms if known else 0
            note_progress(turn, progress.peer_id, num_new=num_new, span_ms=span_ms)
            turn.soft.progress[place] = Advance(progress, turn.now_ms)
            turn.soft.newest_piece_ms[progress.peer_id] = turn.now_ms
            _prolong(turn, progress.lease_id)


def await_environment(turn: Turn, event: TurnsAwaited) -> None:
    """Time that the environment takes is not the node's: its lease lasts, and its slots neither stand still nor are
    taken over. Should the node be lost meanwhile, they go on from where their turns began."""
    lease = turn.state.leases.get(event.lease_id)
    if lease is None or lease.peer_id != event.peer_id:
        return
    awaited = [place for key in event.slots if (place := (key.task.index, key.sample)) in lease.slots]
    for place in awaited:
        turn.soft.progress.pop(place, None)
    if awaited:
        _prolong(turn, event.lease_id)


def _could_be(turn: Turn, progress: SlotProgress) -> bool:
    """Whether tokens of these versions could have been sampled by now."""
    versions = [version for version, _ in progress.segments]
    head = turn.state.head
    is_ordered = bool(versions) and versions == sorted(versions) and all(length > 0 for _, length in progress.segments)
    return is_ordered and head is not None and progress.slot.version <= versions[0] <= versions[-1] <= head.version


def take_stalled(turn: Turn) -> None:
    """A slot that has begun and stands still while others of its node come on goes to another node."""
    soft = turn.soft
    if turn.now_ms - soft.stalls_seen_ms < max(STALL_LOOK_MS, len(soft.progress) // LOOKED_AT_A_MS):
        return
    soft.stalls_seen_ms = turn.now_ms
    stalled = [
        (place, advance.said)
        for place, advance in soft.progress.items()
        if soft.newest_piece_ms[advance.said.peer_id] - advance.at_ms >= STALL_MS
    ]
    for place, said in stalled:
        take_from_node(turn, place, said, "stalled")


def take_from_node(
    turn: Turn, place: tuple[int, int], said: SlotProgress, reason: Literal["stalled", "outgrown"]
) -> None:
    """A running slot waits again, with all that was received of it, and its node is told to stop."""
    turn.emit(SlotGivenBack(said.lease_id, said.slot, reason))
    _keep_prefix(turn, place)
    turn.ask(CancelSlots(said.peer_id, (said.slot,)))
    if not turn.state.leases[said.lease_id].slots:
        turn.emit(LeaseClosed(said.lease_id, "filled"))


def lose_prefix(turn: Turn, event: PrefixLost) -> None:
    """A slot starts anew."""
    slot = turn.state.find(event.slot)
    if slot is not None and slot.prefix is not None:
        turn.emit(PrefixDropped(event.slot, event.reason))


def cancel_stale(turn: Turn) -> None:
    """After a commit, where the policy drops whole rollouts: ends running slots whose first token is too old now."""
    state = turn.state
    if turn.rules.spec.staleness != "drop" or state.head is None:
        return
    head, by_peer = state.head.version, dict[PeerId, list[SlotKey]]()
    for index, group in list(state.groups.items()):
        if is_fresh(v_train=head, v_token=group.version, max_lag=turn.max_lag):
            continue
        for sample, slot in enumerate(group.slots):
            if slot.status not in ("waiting", "leased"):
                continue
            first = first_version(turn, (index, sample), slot)
            if first is None or is_fresh(v_train=head, v_token=first, max_lag=turn.max_lag):
                continue
            if slot.lease_id is not None:
                by_peer.setdefault(state.leases[slot.lease_id].peer_id, []).append(group.key(sample))
            _cancel(turn, group.key(sample), slot.lease_id)
        settle(turn, index)
    for peer_id, slots in by_peer.items():
        turn.ask(CancelSlots(peer_id, tuple(slots)))


def settle(turn: Turn, index: int) -> None:
    """Drops a group that has come to its end and will not be trained on; its capacity returns."""
    group = turn.state.groups[index]
    if not group.is_complete or index not in turn.state.complete:
        return
    spec, rewards = turn.rules.spec, group.rewards
    _learn_length(turn, index)
    if len(rewards) < MIN_REWARDS:
        turn.emit(GroupDropped(index, "too_few_rewards"))
    elif spec.dynamic_sampling and min(rewards) == max(rewards) and _may_filter(turn):
        turn.emit(GroupDropped(index, "no_variance"))


def _may_filter(turn: Turn) -> bool:
    return turn.state.num_filtered_in_row < MAX_FILTERED_BATCHES * turn.rules.spec.groups_per_batch


def _learn_length(turn: Turn, index: int) -> None:
    num_tasks = turn.rules.spec.environment.num_tasks
    lengths = [_num_tokens(slot.segments) for slot in turn.state.groups[index].slots if slot.segments]
    if num_tasks and lengths:
        turn.emit(LengthLearned(index % num_tasks, median_low(lengths), max(lengths)))


def _keep_prefix(turn: Turn, place: tuple[int, int]) -> None:
    advance = turn.soft.progress.pop(place, None)
    if advance is not None:
        turn.emit(SlotMoved(advance.said.slot, advance.said.segments, advance.said.edge, advance.said.given))


def _prolong(turn: Turn, lease_id: LeaseId) -> None:
    """A lease that is two thirds over gets its time again, counted from now, within the bound on every lease."""
    lease = turn.state.leases[lease_id]
    span_ms = lease_span_ms(turn, lease.peer_id, ())
    last_ms = lease.granted_ms + round(turn.rules.spec.lease_s * 1000)
    until_ms = min(turn.now_ms + span_ms, last_ms)
    if lease.deadline_ms - turn.now_ms < span_ms // 3 and until_ms > lease.deadline_ms:
        turn.emit(LeaseExtended(lease_id, until_ms))


def first_version(turn: Turn, place: tuple[int, int], slot: Slot) -> Version | None:
    """Of the slot's first token that is known of; None = there is none."""
    advance = turn.soft.progress.get(place)
    segments = advance.said.segments if advance else slot.prefix.segments if slot.prefix else slot.segments
    return segments[0][0] if segments else None


def _cancel(turn: Turn, key: SlotKey, lease_id: LeaseId | None) -> None:
    turn.soft.progress.pop((key.task.index, key.sample), None)
    turn.emit(SlotCancelled(key, lease_id))
    if lease_id is not None and not turn.state.leases[lease_id].slots:
        turn.emit(LeaseClosed(lease_id, "filled"))


def _num_tokens(segments: tuple[tuple[Version, int], ...]) -> int:
    return sum(length for _, length in segments)
