"""Gate 1: who may fill which slots, until when. Pure.

Invariants: a slot is under one lease at most; a lease's unfilled slots return exactly once, at its deadline, when the
node gives them back, or when the node is lost; new groups open only within `protocol.lag.capacity`. Slots that wait
for a node go out before new groups open.
"""

import math
from collections.abc import Iterator
from itertools import islice

from coordinator.core.demand import allowed_now, note_served
from coordinator.core.effects import CancelLeases
from coordinator.core.events import LeaseReturned, WorkRequested
from coordinator.core.facts import LeaseExtended, LeaseGranted, OpenedGroup, PrefixDropped
from coordinator.core.live import is_live
from coordinator.core.opening import open_groups
from coordinator.core.outliers import take_outliers
from coordinator.core.pace import is_slow, lease_span_ms, length_of, part_of
from coordinator.core.replies import Grant
from coordinator.core.returns import close_lease, take_stalled
from coordinator.core.roster import return_time_ms
from coordinator.core.turn import Turn
from protocol.errors import (
    LeaseUnknownError,
    NoWorkError,
    RootMismatchError,
    VersionFromFutureError,
    VersionTooOldError,
    WorkRefusedError,
)
from protocol.ids import LeaseId, PeerId, SlotKey, Version
from protocol.lag import capacity, is_fresh

FIRST_GROUPS = 4
"""Groups' worth of slots that a node may hold before it has filled any."""

MAX_LOOKED_AT = 512
"""Of the slots that wait for a node, at a request: where more wait, there is enough for all that ask."""

OTHERS_MS = 10_000
"""So long a slot is kept from the node that failed it, if another one asked for work meanwhile."""

LOOKED_AT_A_MS = 20
"""So many leases are looked through for each millisecond that passes: a second between two looks at 20,000."""

MAX_PAUSE_MS = 60_000
"""A node that fails one lease after another gets work after growing pauses, up to this one."""


def request_work(turn: Turn, event: WorkRequested) -> Grant:
    """A lease of at most `num_slots` slots.

    Raises `NotEnrolledError`, `WorkRefusedError`, `VersionFromFutureError`, `VersionTooOldError`,
    `RootMismatchError` or `NoWorkError`.
    """
    _check_node(turn, event)
    _check_version(turn, event)
    slots, opened = ((), ()) if event.lease_id in turn.state.leases else _choose(turn, event)
    if not slots:
        raise NoWorkError(
            "there is no work now",
            why="as many groups are under way as the lag bound allows, or the node holds its share",
            remedy="Ask again in a moment.",
        )
    _drop_stale_prefixes(turn, slots)
    deadline_ms = turn.now_ms + lease_span_ms(turn, event.peer_id, tuple(slot.task for slot in slots))
    for slot in slots:
        turn.soft.failed_ms.pop((slot.task.index, slot.sample), None)
    turn.emit(LeaseGranted(event.lease_id, event.peer_id, slots, opened, deadline_ms, turn.now_ms))
    return Grant(event.lease_id, slots, deadline_ms)


def _choose(turn: Turn, event: WorkRequested) -> tuple[tuple[SlotKey, ...], tuple[OpenedGroup, ...]]:
    """The slots for a wish, and the groups to open for them. Emits nothing if there are none."""
    _note_asker(turn, event.peer_id)
    group_size = turn.rules.spec.group_size
    wanted = max(0, min(event.num_slots, _allowance(turn, event.peer_id)))
    num_useful = wanted + sum(known.num_wanted for known in turn.soft.hungry.values())
    num_looked_at = MAX_LOOKED_AT if turn.rules.spec.environment.num_tasks else min(num_useful, MAX_LOOKED_AT)
    old = list(islice(_waiting_places(turn, event.peer_id, version=event.version), num_looked_at))
    if turn.rules.spec.environment.num_tasks:
        sign = 1 if is_slow(turn, event.peer_id) else -1
        old.sort(key=lambda place: sign * length_of(turn, place[0]))
    num_spare = max(0, spare_groups(turn, version=event.version))
    num_there = len(old) + num_spare * group_size
    count = allowed_now(
        turn, event.peer_id, num_wanted=wanted, num_there=num_there, room_of=lambda peer: _room(turn, peer)
    )
    is_behind = event.version < turn.require_head().version
    note_served(turn, event.peer_id, num_wanted=wanted, num_got=count, is_behind=is_behind)
    old = old[:count]
    if turn.rules.spec.environment.num_tasks and count - len(old) > group_size:
        count -= (count - len(old)) % group_size  # the rest of a long group would go to whoever asks next
    num_new = min(math.ceil((count - len(old)) / group_size), num_spare)
    opened = open_groups(turn, event.peer_id, version=event.version, count=num_new)
    new = [group.key(sample) for group in opened for sample in range(group_size)]
    chosen = [*(turn.state.groups[index].key(sample) for index, sample in old), *new][:count]
    if num_there < wanted:
        chosen += take_outliers(turn, event, most=wanted - len(chosen))
    return tuple(chosen), opened


def return_lease(turn: Turn, event: LeaseReturned) -> None:
    """Takes unfilled slots back. Raises `LeaseUnknownError` if the lease is not open or not the node's."""
    lease = turn.state.leases.get(event.lease_id)
    if lease is None or lease.peer_id != event.peer_id:
        raise unknown_lease(event.lease_id)
    close_lease(turn, event.lease_id, "returned", reason=event.reason, is_fault=event.is_fault, is_try=event.is_try)


def expire_leases(turn: Turn) -> None:
    """Closes the leases whose time is over, and takes slots back that stand still. Where there are many they are looked
    through less often: what comes in under a lease whose time is over is refused all the same."""
    take_stalled(turn)
    if turn.now_ms - turn.soft.leases_seen_ms < len(turn.state.leases) // LOOKED_AT_A_MS:
        return
    turn.soft.leases_seen_ms = turn.now_ms
    late = [(key, lease.peer_id) for key, lease in turn.state.leases.items() if turn.now_ms >= lease.deadline_ms]
    by_peer: dict[PeerId, list[LeaseId]] = {}
    for lease_id, peer_id in late:
        close_lease(turn, lease_id, "expired", reason="its deadline passed", is_fault=True)
        by_peer.setdefault(peer_id, []).append(lease_id)
    for peer_id, lease_ids in by_peer.items():
        if peer_id in turn.soft.live:
            turn.ask(CancelLeases(peer_id, tuple(lease_ids)))


def allow_return(turn: Turn) -> None:
    """After a restart: what nodes finished while the coordinator was away can still be handed in."""
    until_ms = turn.now_ms + return_time_ms(turn)
    for lease_id, lease in turn.state.leases.items():
        if lease.deadline_ms < until_ms:
            turn.emit(LeaseExtended(lease_id, until_ms))


def spare_groups(turn: Turn, *, version: Version) -> int:
    """How many groups a node that has `version` loaded may open now: a node that is behind the head gets less, since
    its tokens will be older when their turn comes. Complete groups count as accepted, those trained long ago included,
    so that the bound holds over a restart; groups that were dropped return their capacity."""
    state = turn.state
    num_reserved = len(state.batch.groups) if state.batch else 0
    num_complete = len(state.complete) + num_reserved
    return capacity(
        max_lag=turn.max_lag,
        version=version,
        groups_per_batch=turn.rules.spec.groups_per_batch,
        num_accepted=state.num_groups_trained + num_complete,
        num_running=len(state.groups) - num_complete,
        max_concurrent=turn.rules.max_concurrent,
    )


def unknown_lease(lease_id: LeaseId) -> LeaseUnknownError:
    """The refusal for whoever works under a lease that is not open, or not theirs."""
    return LeaseUnknownError(
        f"lease {lease_id} was refused",
        why="it is over, or it is not this node's",
        remedy="Drop its slots and ask for new work.",
    )


def _check_node(turn: Turn, event: WorkRequested) -> None:
    turn.require_enrolled(event.peer_id)
    if not is_live(turn, event.peer_id, role="rollout"):
        raise WorkRefusedError(
            f"node {event.peer_id} gets no work",
            why="it has no open session, or its role is not to generate",
            remedy="Open a session and wait for the role 'rollout'.",
        )
    if turn.is_stopped:
        raise NoWorkError("there is no more work", why="the run has reached its last version")
    num_faults, failed_ms = turn.soft.faults.get(event.peer_id, (0, 0))
    pause_ms = min(MAX_PAUSE_MS, 1000 * 2 ** min(num_faults - 1, 10)) if num_faults > 1 else 0
    if turn.now_ms < failed_ms + pause_ms:
        raise NoWorkError(
            f"node {event.peer_id} gets no work yet",
            why=f"it failed its last {num_faults} leases",
            remedy=f"Ask again in {(failed_ms + pause_ms - turn.now_ms) / 1000:.0f} s; see its log for the reason.",
        )


def _check_version(turn: Turn, event: WorkRequested) -> None:
    head = turn.require_head()
    if event.version > head.version:
        raise VersionFromFutureError(
            f"version {event.version} was refused",
            why=f"the newest version is {head.version}",
            remedy=f"Load version {head.version}.",
        )
    if event.version < 0 or not is_fresh(v_train=head.version, v_token=event.version, max_lag=turn.max_lag):
        raise VersionTooOldError(
            f"version {event.version} is too old for new work",
            why=f"the newest version is {head.version} and the bound is {turn.max_lag}",
            remedy=f"Fetch version {head.version} ({head.root}).",
        )
    if turn.state.roots.get(event.version) != event.root:
        raise RootMismatchError(
            f"the weights of version {event.version} were refused",
            why="their root is not the committed one",
            remedy=f"Fetch version {head.version} ({head.root}) again.",
        )


def _allowance(turn: Turn, peer_id: PeerId) -> int:
    """Slots that the node may take on top of what it holds, so that no node sits on all the work: its part, by the rate
    that is known of it, of all slots that may be under way, but at least one group; and no more than it has earned: a
    few groups at first, one slot more for each one filled, less the share that it fails to fill."""
    spec, node = turn.rules.spec, turn.state.nodes[peer_id]
    num_groups = min(turn.rules.max_concurrent, (turn.max_lag + 1) * spec.groups_per_batch)
    most = max(spec.group_size, math.ceil(part_of(turn, peer_id) * num_groups * spec.group_size))
    earned = (FIRST_GROUPS * spec.group_size + node.credit) * (1 - node.failure)
    return min(most, max(1, round(earned))) - node.num_leased


def _note_asker(turn: Turn, peer_id: PeerId) -> None:
    kept = [asker for asker in turn.soft.askers if asker[0] != peer_id]
    turn.soft.askers = (*kept[-1:], (peer_id, turn.now_ms))


def _has_others(turn: Turn, peer_id: PeerId) -> bool:
    return any(peer != peer_id and turn.now_ms - at_ms < OTHERS_MS for peer, at_ms in turn.soft.askers)


def _room(turn: Turn, peer_id: PeerId) -> int:
    """Slots that another node could take if it asked again now, with the version that it was last seen with."""
    version = turn.soft.live[peer_id].presence.version
    most = _allowance(turn, peer_id)
    is_in_step = is_fresh(v_train=turn.require_head().version, v_token=version, max_lag=turn.max_lag)
    if not is_in_step or most <= 0:
        return 0
    num_old = sum(1 for _ in islice(_waiting_places(turn, peer_id, version=version), most))
    num_spare = max(0, spare_groups(turn, version=version)) * turn.rules.spec.group_size
    return min(most, num_old + num_spare)


def _waiting_places(turn: Turn, peer_id: PeerId, *, version: Version) -> Iterator[tuple[int, int]]:
    """Oldest first; a slot opened under a newer version than the node's is not for this node, and one that it failed
    to fill goes to another that wants work."""
    has_others = _has_others(turn, peer_id)
    for index, sample in turn.state.waiting:
        group = turn.state.groups[index]
        slot = group.slots[sample]
        newest = slot.prefix.segments[-1][0] if slot.prefix else group.version
        failed_ms = turn.soft.failed_ms.get((index, sample), 0)
        is_kept = has_others and slot.failed_by == peer_id and turn.now_ms - failed_ms < OTHERS_MS
        if newest <= version and not is_kept:
            yield index, sample


def _drop_stale_prefixes(turn: Turn, slots: tuple[SlotKey, ...]) -> None:
    """Tokens that are too old to be trained on are not worth going on from."""
    head = turn.require_head().version
    for key in slots:
        slot = turn.state.find(key)
        if slot is None or slot.prefix is None:
            continue
        newest = slot.prefix.segments[-1][0]
        if not is_fresh(v_train=head, v_token=newest, max_lag=turn.max_lag):
            turn.emit(PrefixDropped(key, f"its newest token is of version {newest}"))
