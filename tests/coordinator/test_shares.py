"""Gate 3: which tokens are live, what is dropped, and how a batch is shared out."""

import pytest

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
    assert [item.advantage for item in items] == [0.5, -0.5, 0.5, -0.5]
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


keys = [SlotKey(Version(0), TaskKey("sums", 7, index), 0) for index in range(10)]


@pytest.mark.parametrize(
    ("num_slots", "rates", "expected"),
    [
        (10, (1.0, 1.0), (5, 5)),
        (10, (3.0, 1.0), (8, 2)),
        (10, (1e9, 1.0), (9, 1)),
        (10, (0.0, 1.0), (5, 5)),
        (10, (float("nan"), float("inf")), (5, 5)),
        (3, (1.0, 1.0, 1.0, 1.0), (0, 1, 1, 1)),
        (0, (1.0, 1.0), (0, 0)),
    ],
)
def test_division_by_rate(num_slots: int, rates: tuple[float, ...], expected: tuple[int, ...]) -> None:
    peers = {PeerId(name): rate for name, rate in zip("abcd", rates, strict=False)}
    parts = divide(keys[:num_slots], [7] * num_slots, peers)
    assert tuple(len(part) for _, part in parts) == expected
    assert [key for _, part in parts for key in part] == keys[:num_slots]


def test_division_is_by_tokens() -> None:
    lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 20]
    parts = divide(keys, lengths, {PeerId("a"): 1.0, PeerId("b"): 1.0})
    assert [len(part) for _, part in parts] == [1, 9]
