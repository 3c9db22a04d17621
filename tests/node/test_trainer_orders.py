"""A trainer's orders: the latest plan, on the right version, as long as it is not over."""

import pytest

from node.trainer_orders import TrainerOrders, suspects_in
from protocol.errors import EngineError, HexcombError, RoundStaleError
from protocol.ids import Digest, PeerId, RoundId, Version
from protocol.round import RoundPlan
from tests.node.fakes import RUN_ID

A, B = PeerId("12D3KooA"), PeerId("12D3KooB")


def plan(attempt: int, base: int = 3) -> RoundPlan:
    round_id = RoundId(f"{base}.{attempt}")
    return RoundPlan(RUN_ID, round_id, Version(base), Digest("r"), (), (), 1, 0)


def test_a_later_plan_replaces_an_earlier_one() -> None:
    orders = TrainerOrders()
    orders.note_plan(plan(0), b"0")
    assert orders.is_wanted(plan(0), version=Version(3))
    orders.note_plan(plan(1), b"1")
    assert not orders.is_wanted(plan(0), version=Version(3))
    assert orders.is_wanted(plan(1), version=Version(3))
    assert not orders.is_wanted(plan(1), version=Version(4))


def test_an_aborted_round_is_not_worked_on_even_if_its_plan_comes_again() -> None:
    orders = TrainerOrders()
    orders.note_plan(plan(0), b"0")
    orders.note_abort(RoundId("3.0"))
    orders.note_plan(plan(0), b"0")
    assert not orders.is_wanted(plan(0), version=Version(3))


def test_an_abort_that_overtakes_its_plan_holds() -> None:
    orders = TrainerOrders()
    orders.note_abort(RoundId("3.0"))
    orders.note_plan(plan(0), b"0")
    assert orders.plan is None


@pytest.mark.parametrize(
    ("error", "suspects"),
    [
        (RoundStaleError("failed", why=f"{B}"), (B,)),
        (RoundStaleError("failed", why=f"{B}, {A}"), (A, B)),
        (RoundStaleError("failed", why="12D3KooStranger"), ()),
        (EngineError("failed", why=f"{A}"), ()),
    ],
)
def test_only_members_that_a_stale_round_names_are_suspects(error: HexcombError, suspects: tuple[PeerId, ...]) -> None:
    assert suspects_in(error, members=[A, B]) == suspects
