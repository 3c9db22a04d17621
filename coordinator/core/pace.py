"""How fast nodes are, and how long work should take: measured where there is a measurement, claimed before. Pure.

The coordinator measures a node by the tokens that it accepts from it over time (`apply` keeps the moving average);
what a node says of itself counts only until then.
"""

from coordinator.core.live import is_live, live_in_role
from coordinator.core.turn import Turn
from protocol.ids import PeerId, TaskKey

MIN_LEASE_S = 10.0
"""No deadline is shorter: what is measured of short leases says little."""

SAFETY = 4.0
"""A lease may take so many times what the measured rate makes it expect."""

TOTAL_MS = 1000
"""How long the sum over all nodes holds: with thousands of nodes it is not taken at each request."""


def rate_of(turn: Turn, peer_id: PeerId) -> float:
    """Tokens per second; 0 = nothing is known."""
    measured = turn.state.nodes[peer_id].rate
    if measured > 0:
        return measured
    known = turn.soft.capabilities.get(peer_id)
    return max(known.decode_tokens_per_s, 0.0) if known else 0.0


def weight_of(turn: Turn, peer_id: PeerId) -> float:
    """What a node's wish counts for: its rate, less the share of its slots that it fails to fill."""
    return rate_of(turn, peer_id) * (1 - turn.state.nodes[peer_id].failure)


def part_of(turn: Turn, peer_id: PeerId) -> float:
    """The node's part of the speed of all living rollout nodes, in 0..1."""
    soft = turn.soft
    if soft.totals is None or turn.now_ms - soft.totals[0] >= TOTAL_MS or len(soft.live) <= 64:
        peers = live_in_role(turn, "rollout")
        soft.totals = (turn.now_ms, sum(rate_of(turn, peer) for peer in peers), len(peers))
    _, total, num_nodes = soft.totals
    rate = rate_of(turn, peer_id)
    return min(1.0, rate / total) if total > 0 else 1 / max(1, num_nodes)


def is_slow(turn: Turn, peer_id: PeerId) -> bool:
    """Whether the node is slower than the mean of the living rollout nodes."""
    if not is_live(turn, peer_id, role="rollout"):
        return False
    part = part_of(turn, peer_id)
    assert turn.soft.totals is not None
    return part * turn.soft.totals[2] < 1.0 - 1e-9


def expected_length(turn: Turn, task: TaskKey) -> float:
    """Tokens that a completion of the task should have: those of its last epoch, else the mean over all."""
    remembered = length_of(turn, task.index)
    return remembered or turn.state.mean_length or turn.rules.spec.sampling.max_new_tokens


def length_of(turn: Turn, index: int) -> int:
    """Median length of the task's completions when it was last done; 0 = not known."""
    num_tasks = turn.rules.spec.environment.num_tasks
    if not num_tasks:
        return 0
    start = 4 * (index % num_tasks)
    return int.from_bytes(turn.state.lengths[start : start + 4], "little")


def lease_span_ms(turn: Turn, peer_id: PeerId, tasks: tuple[TaskKey, ...]) -> int:
    """How long a lease over one slot of each of `tasks` (with repeats) may take, on top of what the node holds."""
    spec, node = turn.rules.spec, turn.state.nodes[peer_id]
    if node.rate <= 0:
        return round(spec.lease_s * 1000)
    mean = turn.state.mean_length or spec.sampling.max_new_tokens
    num_tokens = node.num_leased * mean + sum(expected_length(turn, task) for task in tasks)
    span_s = SAFETY * num_tokens / node.rate
    return round(min(max(span_s, MIN_LEASE_S), spec.lease_s) * 1000)
