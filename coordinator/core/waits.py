"""What the run waits for, in a word and a sentence, for the status page. Pure."""

from coordinator.core.live import live_in_role
from coordinator.core.roles import Candidate
from coordinator.core.rounds import is_ready
from coordinator.core.turn import Turn
from protocol.run import Role


def waiting_for(turn: Turn) -> tuple[str, str]:
    """A stable code and a sentence for people."""
    state, spec = turn.state, turn.rules.spec
    trainers, rollouts = live_in_role(turn, "trainer"), live_in_role(turn, "rollout")
    if state.head is None:
        return "WAITING_FOR_BASE", "No base model is registered yet."
    if turn.is_stopped:
        return "FINISHED", f"The run has reached version {state.head.version}, its last."
    if state.round is not None:
        left_s = max(0, state.round.deadline_ms - turn.now_ms) // 1000
        members = state.round.peer_ids
        num_done = sum(peer in turn.soft.attestations for peer in members)
        done = f"{num_done} of {len(members)} trainers are done"
        return "TRAINING", f"Round {state.round.round_id}: {done}, {left_s} s left."
    if not state.roles_given:
        known = sum(peer in turn.soft.capabilities for peer in turn.soft.live)
        return "WAITING_FOR_NODES", f"{known} of {turn.rules.expected_nodes} expected nodes are here."
    if not trainers:
        return "WAITING_FOR_TRAINERS", f"No trainer is alive; {_who_may(turn, 'trainer')}."
    if state.batch is None and len(state.complete) < spec.groups_per_batch:
        have = f"{len(state.complete)} of {spec.groups_per_batch} groups are complete"
        if not rollouts:
            return "WAITING_FOR_ROLLOUT_NODES", f"No rollout node is alive; {_who_may(turn, 'rollout')}; {have}."
        return "GENERATING", f"{have[0].upper()}{have[1:]}."
    if turn.soft.old_slots_since_ms is not None:
        return "WAITING_FOR_OLD_SLOTS", "Slots under way would be over the bound after the next version."
    num_ready = sum(is_ready(turn, peer) for peer in trainers)
    pinned = f", {turn.rules.num_trainers} are asked for" if turn.rules.num_trainers else ""
    return (
        "WAITING_FOR_TRAINERS",
        f"{num_ready} of {len(trainers)} trainers have version {state.head.version}{pinned}.",
    )


def _who_may(turn: Turn, role: Role) -> str:
    """How many of those that are here have that role open to them, by invite and by owner."""
    live, nodes = turn.soft.live, turn.state.nodes
    candidates = [
        Candidate(peer, nodes[peer].invite_role, None, None, wish=seen.presence.allowed_roles)
        for peer, seen in live.items()
        if not seen.presence.unwilling
    ]
    num_allowed = sum(role in candidate.may for candidate in candidates)
    return f"of {len(live)} nodes that are here {num_allowed} may be one now"
