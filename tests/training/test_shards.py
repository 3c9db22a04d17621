"""The owner's arithmetic and the checks of plans and answers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.optimizer import OptimizerState
from node.training.shards import (
    Average,
    PartIntake,
    ShardState,
    check_average,
    check_plan,
    check_state,
    reduce_parts,
    round_order,
    shard_state,
)
from protocol.errors import EngineError, PartRefusedError, RootMismatchError, RoundStaleError
from protocol.ids import Digest, PeerId, RoundId, RunId, Version
from protocol.round import Member, RoundPlan, Shard

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
ROOT = Digest("f" * 64)
PLAN = RoundPlan(
    run_id=RunId("0" * 32),
    round_id=RoundId("4.2"),
    base_version=Version(4),
    base_root=ROOT,
    members=(Member(A, "a:1"), Member(B, "b:1")),
    shards=(Shard(A, 0, 6), Shard(B, 6, 10)),
    divisor=5,
    deadline_ms=0,
)


@given(num_parts=st.integers(1, 5), size=st.integers(0, 300), seed=st.integers(0, 99))
def test_any_split_gives_the_same_average(num_parts: int, size: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    parts = [chance.normal(size=size).astype(np.float32) for _ in range(num_parts)]
    average = reduce_parts(parts, divisor=17)
    exact = sum(part.astype(np.float64) for part in parts) / 17
    np.testing.assert_allclose(average.gradient_S, exact, rtol=1e-6, atol=1e-7)
    assert average.squared_norm == pytest.approx(float((average.gradient_S.astype(float) ** 2).sum()))
    check_average(average)
    shuffled = reduce_parts(parts[::-1], divisor=17)
    np.testing.assert_allclose(shuffled.gradient_S, average.gradient_S, rtol=2e-7)


def test_a_sum_out_of_range_is_refused() -> None:
    huge = np.full(3, 3e38, np.float32)
    assert np.isfinite(reduce_parts([huge, huge], divisor=2).gradient_S).all()
    with pytest.raises(EngineError):
        reduce_parts([huge, huge], divisor=1)


@pytest.mark.parametrize(("value", "factor"), [(1.0, 0.9), (1.0, float("nan")), (float("nan"), 1.0)])
def test_an_average_that_is_not_what_its_owner_says_is_refused(value: float, factor: float) -> None:
    gradient = np.array([value, 2.0], np.float32)
    with pytest.raises(PartRefusedError):
        check_average(Average(gradient, 5.0 * factor))


def test_a_part_arrives_whole_or_not_at_all() -> None:
    values = np.arange(6, dtype=np.float32)
    intake = PartIntake(6, "f32", sender=A)
    intake.write(0, values[:2].tobytes())
    with pytest.raises(PartRefusedError, match="ended after 8 of 24"):
        intake.finish()
    intake.write(8, values[2:].tobytes())
    np.testing.assert_array_equal(intake.finish(), values)
    empty = PartIntake(0, "f32", sender=A)
    empty.write(0, b"")
    assert len(empty.finish()) == 0


def state(seed: int) -> OptimizerState:
    chance = np.random.default_rng(seed)
    return OptimizerState(*(np.abs(chance.normal(size=10)).astype(np.float32) for _ in range(3)))


@pytest.mark.parametrize("field", ["weights_P", "first_P", "second_P"])
def test_an_owners_state_may_differ_by_rounding_alone(field: str) -> None:
    mine = state(0)
    vector = getattr(mine, field).copy()
    vector[3] = np.nextafter(vector[3], np.float32(9))
    check_state(shard_state(replace(mine, **{field: vector}), slice(0, 10)), mine, rate=1e-3)
    for wrong in (vector[3] + 0.01, np.nan, np.inf):
        vector = vector.copy()
        vector[3] = wrong
        with pytest.raises(PartRefusedError, match="not what the averages lead to"):
            check_state(shard_state(replace(mine, **{field: vector}), slice(0, 10)), mine, rate=1e-3)
    with pytest.raises(PartRefusedError, match="digest"):
        check_state(ShardState(mine, Digest("0" * 64)), mine, rate=1e-3)


def check(plan: RoundPlan, me: PeerId = A) -> tuple[int, int]:
    return check_plan(plan, me=me, version=Version(4), root=ROOT, num_elements=10)


def test_a_sound_plan_is_taken_in_order() -> None:
    assert check(PLAN) == (4, 2)
    assert check(replace(PLAN, shards=(Shard(A, 0, 0), Shard(B, 0, 10), Shard(A, 10, 10)))) == (4, 2)
    assert round_order(RoundId("4.10")) > round_order(RoundId("4.9"))


@pytest.mark.parametrize(
    ("plan", "me"),
    [
        (PLAN, C),
        (replace(PLAN, members=(*PLAN.members, Member(A, "c:1"))), A),
        (replace(PLAN, shards=(Shard(A, 0, 6), Shard(B, 5, 10))), A),
        (replace(PLAN, shards=(Shard(A, 0, 6), Shard(B, 7, 10))), A),
        (replace(PLAN, shards=(Shard(A, 0, 6), Shard(B, 6, 11))), A),
        (replace(PLAN, shards=(Shard(A, 0, 6), Shard(B, 6, 4), Shard(B, 4, 10))), A),
        (replace(PLAN, shards=()), A),
        (replace(PLAN, shards=(Shard(A, 0, 6), Shard(C, 6, 10))), A),
        (replace(PLAN, divisor=0), A),
        (replace(PLAN, round_id=RoundId("4")), A),
        (replace(PLAN, round_id=RoundId("4.-1")), A),
    ],
)
def test_an_unsound_plan_is_refused(plan: RoundPlan, me: PeerId) -> None:
    with pytest.raises(RoundStaleError):
        check(plan, me)


@pytest.mark.parametrize("plan", [replace(PLAN, base_version=Version(5)), replace(PLAN, base_root=Digest("0" * 64))])
def test_a_plan_on_other_weights_is_refused(plan: RoundPlan) -> None:
    with pytest.raises(RootMismatchError):
        check(plan)
