"""Who is alive, and in which role. Pure.

Invariants: a node without a sign of life for three heartbeats is lost, as is one whose stream broke and that was not
seen again within two; a lost node holds no lease and no role. After a restart every node with a role has three
heartbeats and `RETURN_MS` to come back.
"""

from coordinator.core.apply import STRIKES_TO_FAIL
from coordinator.core.effects import AssignRole
from coordinator.core.events import ANY_ROLE, CapabilityLearned, NodeSeen, Presence, SessionEnded
from coordinator.core.facts import LeaseExtended, NodeLost, RoleGiven
from coordinator.core.returns import close_all, leases_by_peer
from coordinator.core.roles import Candidate, decide_roles
from coordinator.core.soft import Sighting
from coordinator.core.turn import Turn
from protocol.ids import LeaseId, PeerId
from protocol.run import Role

HEARTBEATS_TO_LOSS = 3
HEARTBEATS_AFTER_BREAK = 2
RETURN_MS = 15_000
"""After a restart of the coordinator nodes come back one by one, with growing pauses between their attempts."""


def see(turn: Turn, event: NodeSeen) -> None:
    """Notes a sign of life. Raises `NotEnrolledError`."""
    turn.require_enrolled(event.peer_id)
    before = turn.soft.live.get(event.peer_id)
    turn.soft.live[event.peer_id] = Sighting(event.presence, turn.now_ms)
    if before is None:
        turn.soft.newcomer_ms = turn.now_ms
        turn.soft.roles_dirty = True
    elif _wishes(before.presence) != _wishes(event.presence):
        turn.soft.roles_dirty = True


def learn(turn: Turn, event: CapabilityLearned) -> None:
    """Notes what a node can do. Raises `NotEnrolledError`."""
    turn.require_enrolled(event.peer_id)
    if turn.soft.capabilities.get(event.peer_id) != event.capability:
        turn.soft.capabilities[event.peer_id] = event.capability
        turn.soft.roles_dirty = True


def end_session(turn: Turn, event: SessionEnded) -> None:
    """Notes that a node's stream broke."""
    sighting = turn.soft.live.get(event.peer_id)
    if sighting is not None and sighting.ended_ms is None:
        sighting.ended_ms = turn.now_ms


def watch_nodes(turn: Turn) -> None:
    """Loses the nodes that were silent for too long."""
    heartbeat_ms = round(turn.rules.spec.heartbeat_s * 1000)
    return_ms = return_time_ms(turn)
    if turn.soft.thawed_ms is not None and turn.now_ms - turn.soft.thawed_ms <= return_ms:
        return  # streams that broke meanwhile end only now, and their nodes come back one by one
    lost: dict[PeerId, str] = {}
    for peer_id, sighting in turn.soft.live.items():
        if turn.now_ms - sighting.seen_ms > HEARTBEATS_TO_LOSS * heartbeat_ms:
            lost[peer_id] = f"no sign of life for {HEARTBEATS_TO_LOSS} heartbeats"
        elif sighting.ended_ms is not None and (
            turn.now_ms - sighting.ended_ms > HEARTBEATS_AFTER_BREAK * heartbeat_ms
        ):
            lost[peer_id] = "its stream broke and it did not come back"
    if turn.now_ms - (turn.soft.started_ms or 0) > return_ms:
        for peer_id in [peer for peer in turn.state.roles if peer not in turn.soft.live]:
            lost[peer_id] = "it did not come back after the coordinator's restart"
    held = leases_by_peer(turn) if lost else {}
    for peer_id, reason in lost.items():
        _lose(turn, peer_id, reason, held.get(peer_id, ()))


def return_time_ms(turn: Turn) -> int:
    """How long nodes may take to come back to a coordinator that was away."""
    return HEARTBEATS_TO_LOSS * round(turn.rules.spec.heartbeat_s * 1000) + RETURN_MS


def forgive_own_silence(turn: Turn) -> None:
    """Time in which the coordinator itself stood still (a frozen or starved process) is nobody's silence. Timers fire
    several times a heartbeat; what a gap between two of them has over that is added to every last sign of life, and,
    where it is long, to every lease. Nodes then have time to come back, but not again and again."""
    soft, longest_ms = turn.soft, round(turn.rules.spec.heartbeat_s * 1000)
    gap_ms = 0 if soft.watched_ms is None else turn.now_ms - soft.watched_ms - longest_ms
    soft.watched_ms = turn.now_ms
    if gap_ms <= 0:
        return
    if gap_ms >= longest_ms:
        if soft.thawed_ms is None or turn.now_ms - soft.thawed_ms > 2 * return_time_ms(turn):
            soft.thawed_ms = turn.now_ms
        for lease_id, lease in turn.state.leases.items():
            turn.emit(LeaseExtended(lease_id, lease.deadline_ms + gap_ms))
    soft.started_ms = (soft.started_ms or 0) + gap_ms
    for sighting in soft.live.values():
        sighting.seen_ms = min(sighting.seen_ms + gap_ms, turn.now_ms)
        if sighting.ended_ms is not None:
            sighting.ended_ms = min(sighting.ended_ms + gap_ms, turn.now_ms)


def _lose(turn: Turn, peer_id: PeerId, reason: str, held: tuple[LeaseId, ...]) -> None:
    turn.soft.live.pop(peer_id, None)
    turn.soft.tardy.discard(peer_id)
    turn.soft.roles_dirty = True
    if peer_id in turn.state.roles:
        close_all(turn, peer_id, held, "expired", reason=f"the node was lost: {reason}", is_fault=True)
        turn.emit(NodeLost(peer_id, reason))


def assign_roles(turn: Turn) -> None:
    """Gives roles to nodes that need one; changes those of others only as `roles.decide_roles` says."""
    state, soft, rules = turn.state, turn.soft, turn.rules
    peers = sorted({*state.roles, *(peer for peer in soft.live if peer in soft.capabilities)})
    if not state.roles_given and not _may_begin(turn, len(peers)):
        return
    soft.roles_dirty = any(_is_bound(turn, peer) for peer, seen in soft.live.items() if seen.presence.unwilling)
    candidates = [
        Candidate(
            peer,
            state.nodes[peer].invite_role,
            soft.capabilities.get(peer),
            state.roles.get(peer),
            is_failing=state.nodes[peer].num_strikes >= STRIKES_TO_FAIL,
            unwilling=_unwilling(turn, peer),
            wish=soft.live[peer].presence.allowed_roles if peer in soft.live else ANY_ROLE,
        )
        for peer in peers
    ]
    changes = decide_roles(
        candidates,
        num_trainers=rules.num_trainers,
        num_rollouts=rules.num_rollouts,
        num_vacant_seats=state.num_vacant_seats,
    )
    for peer_id, given in changes.items():
        if given.role != "rollout":
            held = leases_by_peer(turn).get(peer_id, ())
            close_all(turn, peer_id, held, "returned", reason="its role changed", is_fault=False)
        turn.emit(RoleGiven(peer_id, given.role, given.reason))
        turn.ask(AssignRole(peer_id, given.role, given.reason))


def _wishes(presence: Presence) -> tuple[bool, tuple[Role, ...]]:
    """What of an owner's word matters to the roles."""
    return bool(presence.unwilling), presence.allowed_roles


def _unwilling(turn: Turn, peer_id: PeerId) -> str:
    """Why a node's owner wants no work for it; one that is bound keeps its role until that is over."""
    sighting = turn.soft.live.get(peer_id)
    return "" if sighting is None or _is_bound(turn, peer_id) else sighting.presence.unwilling


def _is_bound(turn: Turn, peer_id: PeerId) -> bool:
    """Whether the node is in the open round or still holds leases, which it ends by itself."""
    state = turn.state
    is_member = state.round is not None and peer_id in state.round.peer_ids
    return is_member or (peer_id in state.roles and state.nodes[peer_id].num_leased > 0)


def _may_begin(turn: Turn, num_known: int) -> bool:
    """One node alone is no swarm: unless it is all that is expected, it waits for a second."""
    expected = turn.rules.expected_nodes
    settled = turn.now_ms - turn.soft.newcomer_ms >= turn.rules.settle_s * 1000
    return num_known >= max(1, expected) or (num_known >= 2 and settled)
