"""One lease: only slots whose prompt holds are generated, what finishes is signed and handed in, the rest goes back."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

import node.leases
from coordinator.submissions import MAX_ROLLOUTS_A_CALL, check_size
from node.home import Home
from protocol.errors import EngineError, HexcombError, LeaseUnknownError, UnreachableError, UsageError
from protocol.ids import Version
from protocol.rollout import Piece, Rollout, check_rollout, verify_pieces
from protocol.seeds import slot_seed
from tests.node.fakes import RUN_ID, SPEC
from tests.node.lease_bench import PROMPTS, SECRET, Bench, SlowChild, slot, work


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


async def test_a_lease_is_filled_signed_and_handed_in(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(7, 1), work(8))
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(7), slot(7, 1), slot(8)]
    for rollout in bench.coordinator.taken:
        verify_pieces(rollout, run_id=RUN_ID)
        check_rollout(rollout, SPEC.sampling)
        assert [(piece.version, piece.start) for piece in rollout.pieces] == [(1, 0), (2, 1)]
    [generated] = bench.child.generated
    assert [order.seed for order in generated.orders] == [
        slot_seed(SECRET, key) for key in (slot(7), slot(7, 1), slot(8))
    ]
    assert (bench.lease.num_taken, bench.coordinator.returned) == (3, [])
    assert bench.node.state.rate.total == 6


@pytest.mark.parametrize("made", [UsageError("no such environment"), {7: (9, 9), 8: (6,)}])
async def test_given_prompts_stand_in_for_an_environment_that_lacks_or_differs(
    node_home: Home, made: dict[int, tuple[int, ...]] | HexcombError
) -> None:
    bench = Bench(node_home, work(7, given=PROMPTS[7]), work(8, given=PROMPTS[8]), made=made)
    await bench.run()
    assert [order.prompt_ids for order in bench.child.generated[0].orders] == [PROMPTS[7], PROMPTS[8]]
    assert bench.lease.num_taken == 2


async def test_a_prompt_that_does_not_have_the_digest_is_left_out(node_home: Home) -> None:
    bench = Bench(node_home, work(7, digest="0" * 64, given=PROMPTS[7]), work(8))
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == [("ff", True)]


async def test_samples_that_were_cut_off_are_not_handed_in(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.child.finish_reason = "abort"
    await bench.run()
    assert (bench.coordinator.taken, bench.coordinator.returned) == ([], [("ff", True)])


async def test_handing_in_outlasts_a_silent_coordinator(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.coordinator.troubles = [UnreachableError("nobody"), UnreachableError("nobody")]
    await bench.run()
    assert (bench.lease.num_taken, bench.coordinator.returned) == (1, [])


async def test_a_lease_that_is_over_is_not_given_back(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.coordinator.troubles = [LeaseUnknownError("over")]
    await bench.run()
    assert (bench.lease.num_taken, bench.coordinator.returned) == (0, [])


async def test_refused_rollouts_are_counted_and_the_lease_goes_back(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.coordinator.outcome = "ROLLOUT_CONFLICT"
    await bench.run()
    assert bench.node.state.counts["receipt/ROLLOUT_CONFLICT"] == 1
    assert bench.coordinator.returned == [("ff", False)]


async def test_a_lost_engine_gives_the_lease_back_and_is_told(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.child.failure = EngineError("the engine is lost")
    with pytest.raises(EngineError, match="lost"):
        await bench.run()
    assert bench.coordinator.returned == [("ff", True)]


@pytest.mark.parametrize("child_is_lost", [False, True])
async def test_cancelling_gives_the_lease_back(node_home: Home, child_is_lost: bool) -> None:
    """Whether it is a fault: the child's end may reach the work as a cancellation too."""
    bench = Bench(node_home, work(7), child=SlowChild(PROMPTS))
    task = asyncio.create_task(bench.run())
    async with asyncio.timeout(10):
        await cast(SlowChild, bench.child).begun.wait()
    bench.child.is_closed = child_is_lost
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.coordinator.returned == [("ff", child_is_lost)]


async def test_a_call_that_the_coordinator_cannot_take_is_a_fault_of_its_slots_alone(node_home: Home) -> None:
    bench = Bench(node_home, work(7))
    bench.coordinator.troubles = [UsageError("the call was refused", why="it has too many pieces")]
    await bench.run()
    assert (bench.lease.num_taken, bench.coordinator.returned) == (0, [("ff", True)])
    assert "too many pieces" in bench.coordinator.reasons[0]


@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        ((2048, 1024), [[0, 1, 2, 3]]),
        ((5, 1024), [[0, 1], [2, 3]]),
        ((3, 1024), [[0], [1], [2], [3]]),
        ((1, 1024), [[0], [1], [2], [3]]),
        ((2048, 3), [[0, 1, 2], [3]]),
    ],
)
async def test_what_is_handed_in_is_cut_into_calls(
    node_home: Home, limits: tuple[int, int], calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these rollouts has two pieces."""
    monkeypatch.setattr(node.leases, "MAX_PIECES_A_CALL", limits[0])
    monkeypatch.setattr(node.leases, "MAX_ROLLOUTS_A_CALL", limits[1])
    bench = Bench(node_home, *(work(7, sample) for sample in range(4)))
    await bench.run()
    assert [[slot.sample for slot in slots] for slots in bench.coordinator.calls] == calls
    assert bench.lease.num_taken == 4


async def test_no_call_of_long_pieced_rollouts_is_larger_than_is_taken(node_home: Home) -> None:
    piece = Piece(node_home.peer_id, Version(0), 0, (5,), (0.0,))
    rollouts = [Rollout(slot(7, sample), (piece,) * 1030, "stop") for sample in range(32)]
    parts = list(node.leases._parts(rollouts))
    assert [rollout for part in parts for rollout in part] == rollouts
    for part in parts:
        check_size(len(part), sum(len(rollout.pieces) for rollout in part), max_slots=MAX_ROLLOUTS_A_CALL)
