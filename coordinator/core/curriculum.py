"""Which pool of tasks the next groups come from: the more of a pool, the nearer its mean reward is to a target. Pure.

With P pools, index i is task i // P of pool i mod P, for whoever makes its prompt, whatever the rewards: the weights
move which indices are opened next, never what an index means. Which ones were opened, and what came of them, are facts,
so a restart goes on where it was, and measures the same.
"""

from collections.abc import Sequence

from coordinator.core.facts import CurriculumBegun
from coordinator.core.fair import next_turn
from coordinator.core.rules import Curriculum
from coordinator.core.state import Pool
from coordinator.core.turn import Turn

MIN_REWARDS = 16
"""A mean over fewer says nothing yet; until then a pool counts as if it were at the target, so that it is tried."""


def shares_of(curriculum: Curriculum, pools: Sequence[Pool]) -> tuple[float, ...]:
    """Each pool's part of the next groups; they sum to 1. Rewards are taken to lie in 0 to 1: a pool that is as far
    from the target as can be, or further, keeps the floor alone; where all of them are, their weights decide."""
    widest = max(curriculum.target, 1 - curriculum.target)

    def nearness(pool: Pool) -> float:
        is_known = pool.num_rewards >= MIN_REWARDS
        return max(0.0, 1 - abs(pool.mean_reward - curriculum.target) / widest) if is_known else 1.0

    wishes = [weight * nearness(pool) for weight, pool in zip(curriculum.weights, pools, strict=True)]
    if not sum(wishes):
        wishes = list(curriculum.weights)
    left = 1 - curriculum.floor * len(wishes)
    return tuple(curriculum.floor + left * wish / sum(wishes) for wish in wishes)


def next_indices(turn: Turn, count: int) -> list[int]:
    """The next so many tasks: in order, or, with a curriculum, of pools in turn, each in its own order. Emits a fact
    before the first of a curriculum."""
    curriculum, state = turn.rules.curriculum, turn.state
    if curriculum is None or not count:
        return list(range(state.next_index, state.next_index + count))
    if not state.pools:
        turn.emit(CurriculumBegun(len(curriculum.weights)))
    shares = dict(enumerate(shares_of(curriculum, state.pools)))
    places, indices = [pool.num_opened for pool in state.pools], list[int]()
    for _ in range(count):
        pool = next_turn(turn.soft.pool_credits, shares)
        indices.append(places[pool] * len(places) + pool)
        places[pool] += 1
    return indices
