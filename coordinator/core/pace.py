"""How fast nodes are, and how long work should take: measured where there is a measurement, claimed before. Pure.

The coordinator measures a node by the tokens that it accepts from it over time (`apply` keeps the moving average);
what a node says of itself counts only until then.
"""

from coordinator.core.live import is_live, live_in_role
from coordinator.core.soft import Pace, Totals
from coordinator.core.turn import Turn
from protocol.ids import PeerId, TaskKey

MIN_LEASE_S = 10.0
"""No deadline is shorter: what is measured of short leases says little."""

PATIENCE = 8

SAFETY = 4.0
"""A lease may take so many times what the measured rate makes it expect."""

PACE_KEPT = 0.9
"""Of what was measured of a node's slots, with each slot that comes on."""

TOTAL_MS, MAX_TOTAL_MS, FEW_NODES = 1, 5_000, 64
"""How long the sums over all nodes hold for each of them, where there are more than a few: they are not taken at each
request."""


def rate_of(turn: Turn, peer_id: PeerId) -> float:
    """Tokens per second; 0 = nothing is known. What a node says of itself counts for no more than the best that was
    measured of any."""
    return _rate(turn, peer_id, best=_totals(turn).best_measured)


def weight_of(turn: Turn, peer_id: PeerId) -> float:
    """What a node's wish counts for: its rate, less the share of its slots that it fails to fill."""
    return _weight(turn, peer_id, best=_totals(turn).best_measured)


def part_of(turn: Turn, peer_id: PeerId) -> float:
    """The node's part of the speed of all living rollout nodes, in 0..1."""
    totals = _totals(turn)
    return min(1.0, weight_of(turn, peer_id) / totals.weight) if totals.weight > 0 else 1 / max(1, totals.num_nodes)


def _rate(turn: Turn, peer_id: PeerId, *, best: float) -> float:
    measured = turn.state.nodes[peer_id].rate
    if measured > 0:
        return measured
    known = turn.soft.capabilities.get(peer_id)
    claim = max(known.decode_tokens_per_s, 0.0) if known else 0.0
    return min(claim, best) if best > 0 else claim


def _weight(turn: Turn, peer_id: PeerId, *, best: float) -> float:
    return _rate(turn, peer_id, best=best) * (1 - turn.state.nodes[peer_id].failure)


def _totals(turn: Turn) -> Totals:
    """Of the living rollout nodes; where there are many, as of a moment ago."""
    soft, nodes = turn.soft, turn.state.nodes
    holds_ms = min(MAX_TOTAL_MS, TOTAL_MS * len(soft.live)) if len(soft.live) > FEW_NODES else 0
    if soft.totals is None or turn.now_ms - soft.totals.at_ms > holds_ms:
        peers = live_in_role(turn, "rollout")
        best = max((nodes[peer].rate for peer in peers), default=0.0)
        weight = sum(_weight(turn, peer, best=best) for peer in peers)
        soft.totals = Totals(turn.now_ms, best, weight, len(peers))
    return soft.totals


def is_slow(turn: Turn, peer_id: PeerId) -> bool:
    """Whether the node is slower than the mean of the living rollout nodes."""
    if not is_live(turn, peer_id, role="rollout"):
        return False
    return part_of(turn, peer_id) * _totals(turn).num_nodes < 1.0 - 1e-9


def expected_length(turn: Turn, task: TaskKey) -> float:
    """Tokens that a completion of the task should have: those of its last epoch, else the mean over all."""
    remembered = length_of(turn, task.index)
    return remembered or turn.state.mean_length or turn.rules.spec.sampling.max_new_tokens


def length_of(turn: Turn, index: int) -> int:
    """Median length of the task's completions when it was last done; 0 = not known."""
    return _remembered(turn, turn.state.lengths, index)


def longest_of(turn: Turn, index: int) -> int:
    """The longest of them; 0 = not known."""
    return _remembered(turn, turn.state.longest, index)


def _remembered(turn: Turn, memory: bytearray, index: int) -> int:
    num_tasks = turn.rules.spec.environment.num_tasks
    if not num_tasks:
        return 0
    start = 4 * (index % num_tasks)
    return int.from_bytes(memory[start : start + 4], "little")


def note_progress(turn: Turn, peer_id: PeerId, *, num_new: int, span_ms: int) -> None:
    """A slot has come on by `num_new` tokens in `span_ms`: measures its node, where anything is remembered of tasks."""
    if turn.rules.spec.environment.num_tasks and span_ms > 0:
        pace = turn.soft.paces.setdefault(peer_id, Pace())
        pace.num_tokens = pace.num_tokens * PACE_KEPT + num_new
        pace.span_ms = pace.span_ms * PACE_KEPT + span_ms


def lease_span_ms(turn: Turn, peer_id: PeerId, tasks: tuple[TaskKey, ...]) -> int:
    """How long a lease over one slot of each of `tasks` (with repeats) may take, on top of what the node holds. A node
    that has filled nothing yet has the longest time, and less of it with each slot that it fails."""
    spec, node = turn.rules.spec, turn.state.nodes[peer_id]
    if node.rate <= 0:
        patience_s = spec.lease_s * (1 - node.failure) ** PATIENCE
        return round(min(max(patience_s, MIN_LEASE_S), spec.lease_s) * 1000)
    mean = turn.state.mean_length or spec.sampling.max_new_tokens
    num_tokens = node.num_leased * mean + sum(expected_length(turn, task) for task in tasks)
    span_s = SAFETY * num_tokens / node.rate
    return round(min(max(span_s, MIN_LEASE_S), spec.lease_s) * 1000)
