"""Pools whose shares follow their rewards: the rule, what an index means, and that a restart changes nothing."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import task_memory
from coordinator.core.curriculum import MIN_REWARDS, shares_of
from coordinator.core.facts import BlockBegun, CurriculumBegun, LeaseGranted
from coordinator.core.rules import Curriculum
from coordinator.core.state import Pool
from protocol.run import EnvironmentSpec
from tests.coordinator.world import World, make_rules

EVEN = Curriculum((1.0, 1.0, 1.0), target=0.5, floor=0.1)
REWARDS = (0.02, 0.5, 0.98)
"""Of the three pools: too hard, right, too easy."""


def measured(*means: float) -> list[Pool]:
    return [Pool(0, MIN_REWARDS, mean) for mean in means]


def start(curriculum: Curriculum = EVEN, *, num_tasks: int = 0) -> World:
    environment = EnvironmentSpec("sums", num_tasks=num_tasks)
    rules = make_rules(curriculum=curriculum, environment=environment, groups_per_batch=8)
    world = World(rules)
    world.start()
    world.is_checked = False
    return world


def run(world: World, num_versions: int, rewards: tuple[float, ...] = REWARDS) -> None:
    """Each pool's rewards have its mean, but for a bit that differs within groups."""
    for _ in range(num_versions):
        while world.core.state.round is None:
            grant = world.lease("r0", 2)
            for slot in grant.slots:
                world.submit(grant, slot)
                world.score(slot, rewards[slot.task.index % len(rewards)] + (0.01 if slot.sample else -0.01))
        world.finish_round()
        world.see_all()


def opened(world: World) -> list[int]:
    return [group.task.index for grant in world.granted() for group in grant.opened]


def test_a_pool_at_the_target_is_preferred_and_others_keep_the_floor() -> None:
    assert shares_of(EVEN, measured(0.0, 0.5, 1.0)) == pytest.approx((0.1, 0.8, 0.1))
    assert shares_of(EVEN, measured(0.25, 0.5, 0.75)) == pytest.approx((0.1 + 0.7 / 4, 0.1 + 0.7 / 2, 0.1 + 0.7 / 4))
    assert shares_of(Curriculum((1.0, 1.0), target=0.8), measured(0.8, 0.4)) == pytest.approx((0.65, 0.35))


def test_weights_count_among_pools_that_are_as_near() -> None:
    assert shares_of(Curriculum((3.0, 1.0), floor=0.1), measured(0.5, 0.5)) == pytest.approx((0.7, 0.3))


def test_pools_that_are_not_measured_are_tried() -> None:
    few = [Pool(0, MIN_REWARDS - 1, 0.0), *measured(0.0, 0.0)]
    assert shares_of(EVEN, few) == pytest.approx((0.8, 0.1, 0.1))


@pytest.mark.parametrize("means", [(0.0, 1.0, 0.0), (-5.0, 7.0, 30.0)])
def test_where_all_are_out_of_reach_weights_decide(means: tuple[float, ...]) -> None:
    shares = shares_of(Curriculum((2.0, 1.0, 1.0), floor=0.1), measured(*means))
    assert shares == pytest.approx((0.45, 0.275, 0.275))


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 40), st.floats(-2, 3)), min_size=2, max_size=8),
    st.floats(0, 1),
    st.floats(0.001, 0.125),
)
def test_shares_sum_to_one_and_none_falls_below_the_floor(
    drawn: list[tuple[float, int, float]], target: float, floor: float
) -> None:
    curriculum = Curriculum(tuple(weight for weight, _, _ in drawn), target, floor)
    shares = shares_of(curriculum, [Pool(0, number, mean) for _, number, mean in drawn])
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= floor - 1e-9


def share_of_pools(indices: list[int]) -> list[float]:
    found = Counter(index % 3 for index in indices)
    return [found[pool] / len(indices) for pool in range(3)]


@pytest.mark.parametrize("num_tasks", [0, 30])
def test_groups_follow_the_rewards(num_tasks: int) -> None:
    """And each pool's tasks are opened in its own order, none twice, none left out."""
    world = start(num_tasks=num_tasks)
    run(world, 30)
    indices = opened(world)
    assert share_of_pools(indices[:15]) == pytest.approx([1 / 3] * 3, abs=0.14)
    late = indices[80:]
    assert share_of_pools(late) == pytest.approx([0.125, 0.75, 0.125], abs=0.05)
    for pool in range(3):
        places = sorted(index // 3 for index in indices if index % 3 == pool)
        gaps = set(range(len(places))) - set(places)
        in_block = {index // 3 for index in world.core.state.ahead if index % 3 == pool}
        assert gaps <= in_block
        assert len(places) == len(set(places))
    assert [round(pool.mean_reward, 1) for pool in world.core.state.pools] == [0.0, 0.5, 1.0]


def test_shares_move_when_rewards_do() -> None:
    world = start()
    run(world, 25)
    num_before = len(opened(world))
    run(world, 60, (0.5, 0.98, 0.98))
    shares = share_of_pools(opened(world)[num_before + 300 :])
    assert shares[0] > 0.5 > shares[1], shares


def test_what_is_not_measured_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a core that forgets rewards mixes by weight for ever."""
    monkeypatch.setattr(task_memory, "REWARD_ALPHA", 0.0)
    monkeypatch.setattr("coordinator.core.curriculum.MIN_REWARDS", 10**9)
    world = start()
    run(world, 20)
    assert share_of_pools(opened(world)[60:]) == pytest.approx([1 / 3] * 3, abs=0.05)


@pytest.mark.parametrize("num_tasks", [0, 30])
def test_a_restart_goes_on_where_it_was(num_tasks: int) -> None:
    world = start(num_tasks=num_tasks)
    run(world, 12)
    shares = shares_of(EVEN, world.core.state.pools)
    world.crash()  # replay gives the same bytes
    assert shares_of(EVEN, world.core.state.pools) == shares
    for name in ("t0", "r0"):
        world.see(name)
    run(world, 4)
    indices = opened(world)
    assert len(indices) == len(set(indices)), "a task was opened twice"
    assert sum(isinstance(fact, CurriculumBegun) for fact in world.facts) == 1


def test_a_block_counts_what_it_holds_before_that_is_opened() -> None:
    world = start(num_tasks=30)
    world.lease("r0", 2)
    (block,) = [fact for fact in world.facts if isinstance(fact, BlockBegun)]
    assert len(block.indices) == 8
    assert sum(pool.num_opened for pool in world.core.state.pools) == 8


def test_without_a_curriculum_tasks_come_in_order() -> None:
    world = World(make_rules())
    world.start()
    world.is_checked = False
    run(world, 3)
    assert not world.core.state.pools
    for expected, index in zip(count(), opened(world), strict=False):
        assert index == expected
    assert not any(isinstance(fact, CurriculumBegun) for fact in world.facts)
    assert [fact for fact in world.facts if isinstance(fact, LeaseGranted)]
