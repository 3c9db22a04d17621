"""Gate 3: which tokens are live, what is dropped, and how a batch is shared out."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import shares
from coordinator.core.effects import SendPlan
from coordinator.core.shares import divide, share_of
from protocol.errors import NotEnrolledError, RoundStaleError
from protocol.ids import PeerId, RoundId, SlotKey, TaskKey, Version
from protocol.loss import Aggregation, LossSpec
from tests.coordinator.world import World, make_rules


def test_shares_are_exact_and_for_members_only() -> None:
    world = World()
    world.start(trainers=2)
    world.fill_batch()
    state, round_id = world.core.state, world.round_id
    items = [item for peer in ("t0", "t1") for item in share_of(state, round_id, PeerId(peer))]
    assert [item.advantage for item in sorted(items, key=lambda item: str(item.slot))] == [0.5, -0.5, 0.5, -0.5]
    assert all(item.mask == b"\1\1\1\1" and item.segments == ((0, 4),) for item in items)
    assert len({item.slot for item in items}) == 4
    with pytest.raises(RoundStaleError):
        share_of(state, RoundId("0.9"), PeerId("t0"))
    with pytest.raises(NotEnrolledError):
        share_of(state, round_id, PeerId("r0"))


def test_advantages_are_as_the_run_says() -> None:
    world = World(make_rules(loss=LossSpec(advantage="standardised")))
    world.start(trainers=1)
    world.fill_batch()
    items = world.core.share_of(world.round_id, PeerId("t0"))
    assert [item.advantage for item in items] == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "divisor"), [("token_mean", 16), ("seq_mean_token_mean", 4), ("dr_grpo", 4 * 64)]
)
def test_the_plan_has_the_divisor_of_the_runs_loss(aggregation: Aggregation, divisor: int) -> None:
    world = World(make_rules(loss=LossSpec(aggregation=aggregation, max_tokens=64)))
    world.start(trainers=2)
    world.fill_batch()
    (plan,) = world.asked(SendPlan)
    assert isinstance(plan, SendPlan)
    assert plan.divisor == divisor


def aged() -> World:
    """Head 3 at a bound of 2, and two groups opened under version 0 about to be complete: tokens of version 0 are too
    old. The slots of the first have 3 such and 1 fresh token; of the second, sample 0 has only such."""
    world = World()
    world.start(trainers=1, rollouts=2)
    grant = world.lease("r1", 4)
    pieces = {0: ((0, 3), (2, 1)), 1: ((0, 4),)}
    for _ in range(2):
        world.make_version()
    for slot in grant.slots:
        stale = slot.task.index == 1 and slot.sample == 0
        world.submit(grant, slot, name="r1", segments=pieces[1] if stale else pieces[0])
    world.make_version()
    for slot in grant.slots:
        world.score(slot)
    return world


def test_tokens_over_the_bound_are_masked_and_slots_of_nothing_else_dropped() -> None:
    world = aged()
    state = world.core.state
    assert state.round is not None
    items = {str(item.slot): item for item in share_of(state, world.round_id, PeerId("t0"))}
    assert set(items) == {"v0/sums:7:0/0", "v0/sums:7:0/1", "v0/sums:7:1/1"}
    assert all(item.mask == b"\0\0\0\1" for item in items.values())
    assert items["v0/sums:7:1/1"].advantage == -0.5, "the dropped slot's reward still shapes the mean"
    assert (world.core.books().dropped, state.batch and state.batch.num_tokens) == (1, 3)
    world.crash()
    world.see("t0")
    world.finish_round()
    assert (state.num_tokens_masked, world.core.state.num_tokens_masked) == (0, 9)
    assert world.core.state.lag_histogram[1] == 3
    assert max(world.core.state.lag_histogram) <= 2


def test_group_without_a_live_token_is_dropped_whole() -> None:
    world = World()
    world.start(trainers=1, rollouts=2)
    grant = world.lease("r1", 2)
    for slot in grant.slots:
        world.submit(grant, slot, name="r1")
    for _ in range(3):
        world.make_version()
    for slot in grant.slots:
        world.score(slot)
    world.make_version()
    assert (world.core.books().dropped, world.core.state.num_groups_dropped) == (2, 1)
    assert world.core.books().trained == 16


def test_a_bound_that_is_not_kept_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of gate 3: the check finds the live tokens that are too old."""
    monkeypatch.setattr(shares, "is_fresh", lambda **_: True)
    with pytest.raises(AssertionError, match="a token of lag 3 is live"):
        aged()


def slots(num: int) -> list[SlotKey]:
    return [SlotKey(Version(0), TaskKey("sums", 7, index), 0) for index in range(num)]


@pytest.mark.parametrize(
    ("num_slots", "rates", "expected"),
    [
        (10, (1.0, 1.0), (5, 5)),
        (10, (3.0, 1.0), (8, 2)),
        (10, (1e9, 1.0), (9, 1)),
        (10, (0.0, 1.0), (5, 5)),
        (10, (float("nan"), float("inf")), (5, 5)),
        (3, (1.0, 1.0, 1.0, 1.0), (1, 1, 1, 0)),
        (0, (1.0, 1.0), (0, 0)),
    ],
)
def test_division_by_rate(num_slots: int, rates: tuple[float, ...], expected: tuple[int, ...]) -> None:
    peers = {PeerId(name): rate for name, rate in zip("abcd", rates, strict=False)}
    parts = divide(slots(num_slots), [7] * num_slots, peers)
    assert tuple(len(part) for _, part in parts) == expected
    assert sorted(key.task.index for _, part in parts for key in part) == list(range(num_slots))


def test_division_is_by_cost() -> None:
    costs = [100, 10, 10, 10, 10, 10, 10, 10, 10, 20]
    parts = divide(slots(10), costs, {PeerId("a"): 1.0, PeerId("b"): 1.0})
    assert [len(part) for _, part in parts] == [1, 9]


@given(
    costs=st.lists(st.floats(0, 1e12), max_size=60),
    rates=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
)
def test_every_slot_is_dealt_once_and_nobody_goes_empty_without_need(costs: list[float], rates: list[float]) -> None:
    keys, peers = slots(len(costs)), {PeerId(f"p{index}"): rate for index, rate in enumerate(rates)}
    parts = divide(keys, costs, peers)
    assert [peer for peer, _ in parts] == list(peers)
    assert sorted(key.task.index for _, part in parts for key in part) == list(range(len(keys)))
    assert all(list(part) == sorted(part, key=lambda key: key.task.index) for _, part in parts)
    assert sum(not part for _, part in parts) == max(0, len(rates) - len(costs))
    assert divide(keys, costs, peers) == parts


SPEEDS = (1.0, 2.0, 4.0)
SMOLLM2_135M = 30 * 576 / 134_515_008


def lengths_of(seed: int, num_slots: int) -> list[int]:
    """Lognormal with sigma 1, about a median of 400 tokens, cut at 8192."""
    chance = random.Random(seed)
    return [min(8192, max(1, round(chance.lognormvariate(math.log(400), 1.0)))) for _ in range(num_slots)]


def worst_finish(lengths: list[int], dealt: list[float], speeds: Sequence[float], *, square_cost: float) -> float:
    """Longest finish time over the mean, where slots were dealt as if they cost `dealt`."""
    keys = slots(len(lengths))
    peers = {PeerId(f"p{index}"): speed for index, speed in enumerate(speeds)}
    finish = [
        sum(lengths[key.task.index] + square_cost * lengths[key.task.index] ** 2 for key in part) / peers[peer]
        for peer, part in divide(keys, dealt, peers)
    ]
    return max(finish) / (sum(finish) / len(finish))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots_per_member=st.integers(64, 200),
    speeds=st.permutations(SPEEDS),
    square_cost=st.sampled_from([0.0, 1e-5, SMOLLM2_135M]),
)
def test_members_of_unequal_speed_finish_together(
    seed: int, slots_per_member: int, speeds: list[float], square_cost: float
) -> None:
    lengths = lengths_of(seed, slots_per_member * len(speeds))
    costs = [length + square_cost * length**2 for length in lengths]
    assert worst_finish(lengths, costs, speeds, square_cost=square_cost) <= 1.10


def test_dealing_by_the_number_of_slots_would_be_seen() -> None:
    """Negative control: most batches are then above the bound."""
    batches = [lengths_of(seed, 192) for seed in range(20)]
    worst = [worst_finish(lengths, [1.0] * 192, SPEEDS, square_cost=SMOLLM2_135M) for lengths in batches]
    assert sum(ratio > 1.10 for ratio in worst) > 10


@pytest.mark.parametrize(("square_cost", "expected"), [(0.0, [2, 2]), (1.0, [1, 3])])
def test_a_round_deals_by_what_long_slots_cost(square_cost: float, expected: list[int]) -> None:
    world = World(make_rules(square_cost=square_cost))
    world.start(trainers=2)
    grant = world.lease("r0", 4)
    for slot, length in zip(grant.slots, (10, 6, 5, 4), strict=True):
        world.submit(grant, slot, segments=((0, length),))
        world.score(slot)
    round_ = world.core.state.round
    assert round_ is not None
    assert [len(share) for _, share in round_.shares] == expected
