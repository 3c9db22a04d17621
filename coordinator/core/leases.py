"""Gate 1: who may fill which slots, until when. Pure.

Invariants: a slot is under one lease at most; a lease's unfilled slots return exactly once, at its deadline, when the
node gives them back, or when the node is lost; new groups open only within `protocol.lag.capacity`. Slots that wait
for a node go out before new groups open.
"""

import math

from coordinator.core.effects import CancelLeases
from coordinator.core.events import LeaseReturned, WorkRequested
from coordinator.core.facts import LeaseClosed, LeaseGranted, OpenedGroup
from coordinator.core.replies import Grant
from coordinator.core.roster import is_live, live_in_role
from coordinator.core.turn import Turn
from protocol.errors import (
    LeaseUnknownError,
    NoWorkError,
    RootMismatchError,
    VersionFromFutureError,
    VersionTooOldError,
    WorkRefusedError,
)
from protocol.ids import LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.lag import capacity, is_fresh

FIRST_GROUPS = 4
"""Groups' worth of slots that a node may hold before it has filled any."""

MAX_HALVINGS = 20


def request_work(turn: Turn, event: WorkRequested) -> Grant:
    """A lease of at most `num_slots` slots.

    Raises `NotEnrolledError`, `WorkRefusedError`, `VersionFromFutureError`, `VersionTooOldError`,
    `RootMismatchError` or `NoWorkError`.
    """
    _check_node(turn, event)
    _check_version(turn, event)
    wanted = min(event.num_slots, _allowance(turn, event.peer_id))
    group_size = turn.rules.spec.group_size
    old = _waiting_slots(turn, version=event.version, limit=wanted)
    num_new = min(math.ceil((wanted - len(old)) / group_size), spare_groups(turn, version=event.version))
    opened = tuple(_new_group(turn, event.version, offset) for offset in range(max(0, num_new)))
    new = [SlotKey(group.version, group.task, sample) for group in opened for sample in range(group_size)]
    slots = tuple([*old, *new][: max(0, wanted)])
    if not slots or event.lease_id in turn.state.leases:
        raise NoWorkError(
            "there is no work now",
            why="as many groups are under way as the lag bound allows, or the node holds its share",
            remedy="Ask again in a moment.",
        )
    deadline_ms = turn.now_ms + round(turn.rules.spec.lease_s * 1000)
    turn.emit(LeaseGranted(event.lease_id, event.peer_id, slots, opened, deadline_ms))
    return Grant(event.lease_id, slots, deadline_ms)


def return_lease(turn: Turn, event: LeaseReturned) -> None:
    """Takes unfilled slots back. Raises `LeaseUnknownError` if the lease is not open or not the node's."""
    lease = turn.state.leases.get(event.lease_id)
    if lease is None or lease.peer_id != event.peer_id:
        raise unknown_lease(event.lease_id)
    turn.emit(LeaseClosed(event.lease_id, "returned"))


def expire_leases(turn: Turn) -> None:
    """Closes the leases whose time is over."""
    late = [(key, lease.peer_id) for key, lease in turn.state.leases.items() if turn.now_ms >= lease.deadline_ms]
    by_peer: dict[PeerId, list[LeaseId]] = {}
    for lease_id, peer_id in late:
        turn.emit(LeaseClosed(lease_id, "expired"))
        by_peer.setdefault(peer_id, []).append(lease_id)
    for peer_id, lease_ids in by_peer.items():
        if peer_id in turn.soft.live:
            turn.ask(CancelLeases(peer_id, tuple(lease_ids)))


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
    that it claims, of all slots that may be under way, but at least one group; and no more than it has earned: a few
    groups at first, one slot more for each one filled, half of it all for each lease that ran out since the last."""
    spec, soft = turn.rules.spec, turn.soft
    peers = live_in_role(turn, "rollout")
    rates = {
        peer: max(known.decode_tokens_per_s, 0.0) if (known := soft.capabilities.get(peer)) else 0.0 for peer in peers
    }
    total = sum(rates.values())
    part = rates[peer_id] / total if total > 0 else 1 / len(peers)
    num_groups = min(turn.rules.max_concurrent, (turn.max_lag + 1) * spec.groups_per_batch)
    most = max(spec.group_size, math.ceil(part * num_groups * spec.group_size))
    node = turn.state.nodes[peer_id]
    earned = (FIRST_GROUPS * spec.group_size + node.credit) >> min(node.num_late, MAX_HALVINGS)
    return min(most, max(1, earned)) - node.num_leased


def _waiting_slots(turn: Turn, *, version: Version, limit: int) -> list[SlotKey]:
    """Oldest first; a slot opened under a newer version than the node's is not for this node."""
    found: list[SlotKey] = []
    for index, sample in turn.state.waiting:
        if len(found) >= limit:
            break
        group = turn.state.groups[index]
        if group.version <= version:
            found.append(group.key(sample))
    return found


def _new_group(turn: Turn, version: Version, offset: int) -> OpenedGroup:
    spec = turn.rules.spec
    task = TaskKey(spec.environment.name, spec.seed, turn.state.next_index + offset)
    return OpenedGroup(task, version, spec.group_size)
