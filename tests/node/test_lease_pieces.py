"""A lease while it runs: tokens leave by pieces, slots go on from those of others, stop alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.compute.messages import SlotAdvanced, SlotFilled, StopSlots
from node.home import Home
from node.orders import Receipt, SlotWork
from protocol.ids import Digest, LeaseId, SlotKey, Version
from protocol.rollout import Rollout, check_rollout, edges_of, verify_pieces
from tests.node.fakes import RUN_ID, SPEC, until
from tests.node.lease_bench import PROMPTS, Bench, SlowChild, slot, with_pieces, work


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


def advanced(name: SlotKey, start: int, ids: tuple[int, ...], version: int = 2) -> SlotAdvanced:
    return SlotAdvanced("ff", str(name), start, ids, (-0.5,) * len(ids), version)


async def test_tokens_under_way_leave_signed_and_end_with_the_slot(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(8), child=SlowChild(PROMPTS))
    async with bench.under_way() as child:
        sending = asyncio.create_task(bench.sender.run())
        bench.lease.advance(advanced(slot(7), 0, (2, 3), version=1))
        bench.lease.advance(advanced(slot(7), 2, (4,)))
        await until(lambda: bool(bench.progress))
        child.finish("ff", str(slot(7)))
        child.finish("ff", str(slot(8)))
    bench.lease.advance(advanced(slot(8), 0, (2,)))  # too late
    sending.cancel()
    [progress] = bench.progress
    assert (progress.lease_id, progress.slot) == ("ff", slot(7))
    assert [(p.node, p.version, p.start, p.token_ids) for p in progress.pieces] == [
        (node_home.peer_id, 1, 0, (2, 3)),
        (node_home.peer_id, 2, 2, (4,)),
    ]
    verify_pieces(Rollout(slot(7), progress.pieces, "stop"), run_id=RUN_ID)
    assert not bench.sender._streams
    # The rollouts are whole all the same, and of their own pieces.
    assert [rollout.token_ids for rollout in bench.coordinator.taken] == [(2, 1), (2, 1)]


async def test_a_slot_is_gone_on_with_from_the_pieces_of_others(node_home: Home) -> None:
    begun = with_pieces(work(7), (0, 0, (5, 6)), (1, 2, (7,)))
    bench = Bench(node_home, begun, work(8), child=SlowChild(PROMPTS))
    async with bench.under_way() as child:
        bench.lease.advance(advanced(slot(7), 3, (2,)))
        child.finish("ff", str(slot(7)))
        child.finish("ff", str(slot(8)))
    [generated] = bench.child.generated
    assert [(order.prompt_ids, order.prefix_ids) for order in generated.orders] == [((3, 4, 5), (5, 6, 7)), ((6,), ())]
    first, second = bench.coordinator.taken
    assert first.pieces[:2] == begun.pieces
    assert [(p.node, p.version, p.start, p.token_ids) for p in first.pieces[2:]] == [
        (node_home.peer_id, 1, 3, (2,)),
        (node_home.peer_id, 2, 4, (1,)),
    ]
    assert edges_of(slot(7), begun.pieces)[-1] in edges_of(slot(7), first.pieces)
    verify_pieces(first, run_id=RUN_ID)
    check_rollout(first, SPEC.sampling)
    assert len(second.pieces) == 2
    assert bench.node.state.counts["slots/gone on with"] == 1
    assert bench.node.state.rate.total == 4  # its own tokens alone


def without_logprobs(work: SlotWork, *places: int) -> SlotWork:
    """Some of its pieces as the environment's."""
    made = (replace(piece, logprobs=()) if at in places else piece for at, piece in enumerate(work.pieces))
    return replace(work, pieces=tuple(made))


async def test_a_slot_is_gone_on_with_from_what_the_environment_said(node_home: Home) -> None:
    begun = without_logprobs(with_pieces(work(7), (0, 0, (5, 1)), (0, 2, (6, 1, 7))), 1)
    bench = Bench(node_home, begun)
    bench.coordinator.outcome = "TURN_TAKEN"
    await bench.run()
    [generated] = bench.child.generated
    assert [order.prefix_ids for order in generated.orders] == [(5, 1, 6, 1, 7)]
    [rollout] = bench.coordinator.taken
    assert rollout.pieces[:2] == begun.pieces
    assert rollout.given == ((2, 3),)
    check_rollout(rollout, SPEC.sampling)
    assert (bench.lease.num_taken, bench.coordinator.returned) == (1, [])


@pytest.mark.parametrize("places", [(0,), (0, 1), (2,)])
async def test_a_slot_in_which_the_environment_speaks_out_of_turn_is_left_out(
    node_home: Home, places: tuple[int, ...]
) -> None:
    begun = without_logprobs(with_pieces(work(7), (0, 0, (5, 1)), (0, 2, (6,)), (0, 3, (7,))), *places)
    bench = Bench(node_home, begun)
    await bench.run()
    assert bench.coordinator.taken == []
    assert bench.coordinator.returned == [("ff", False)]


@pytest.mark.parametrize(
    "pieces",
    [
        ((0, 1, (5,)),),
        ((0, 0, (5,)), (0, 2, (5,))),
        ((1, 0, (5,)), (0, 1, (5,))),
        ((0, 0, (64,)),),
        ((0, 0, (5, 1)),),
        ((0, 0, ()),),
        ((0, 0, (5,) * 8),),
    ],
)
async def test_a_slot_whose_pieces_cannot_be_gone_on_from_is_left_out(node_home: Home, pieces: Any) -> None:
    bench = Bench(node_home, with_pieces(work(7), *pieces), work(8))
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == [("ff", False)], "the coordinator gave it those pieces"
    assert bench.node.state.counts["slots/filled"] == 1


async def test_a_node_behind_the_tokens_of_a_slot_leaves_it_to_others(node_home: Home) -> None:
    bench = Bench(node_home, with_pieces(work(7), (3, 0, (5,))), work(8))
    bench.node.state.loaded = (Version(2), Digest(""))
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == [("ff", False)]
    bench = Bench(node_home, with_pieces(work(7), (2, 0, (5,))))
    bench.node.state.loaded = (Version(2), Digest(""))
    await bench.run()
    assert bench.lease.num_taken == 1


async def test_a_slot_is_stopped_and_its_neighbour_goes_on(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(8), child=SlowChild(PROMPTS))
    async with bench.under_way() as child:
        bench.lease.advance(advanced(slot(7), 0, (2,)))
        bench.lease.stop([slot(7), slot(7, 99)])
        await until(lambda: bool(child.stopped))
        assert child.running == {str(slot(8))}
        bench.lease.stop([slot(7)])  # once is enough
        child.finish("ff", str(slot(8)))
    assert child.stopped == [StopSlots("ff", (str(slot(7)),))]
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == []
    assert bench.node.state.counts["slots/stopped"] == 1
    assert bench.node.state.counts["slots/aborted"] == 0
    assert not bench.sender._streams


async def test_a_slot_stopped_before_it_began_is_never_ordered(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(8))
    bench.lease.stop([slot(7)])
    await bench.run()
    assert [order.slot for order in bench.child.generated[0].orders] == [str(slot(8))]
    assert (bench.lease.num_taken, bench.coordinator.returned) == (1, [])


async def test_a_lease_of_stopped_slots_is_over(node_home: Home) -> None:
    bench = Bench(node_home, work(7), child=SlowChild(PROMPTS))
    async with bench.under_way():
        bench.lease.stop([slot(7)])
    assert (bench.coordinator.taken, bench.coordinator.returned) == ([], [])


async def test_a_refused_slot_does_not_end_its_neighbours(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(8), child=SlowChild(PROMPTS))
    async with bench.under_way() as child:
        child.deliver(SlotFilled("ff", str(slot(7)), (), (), (), "refused"))
        child.running.discard(str(slot(7)))
        child.finish("ff", str(slot(8)))
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == [("ff", True)]


async def test_generation_ends_with_the_lease(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(8), child=SlowChild(PROMPTS), remaining_s=0.01)  # at least a second
    async with bench.under_way() as child:
        child.finish("ff", str(slot(8)))
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == [("ff", True)]
    assert "ran out" in bench.coordinator.reasons[0]
    assert bench.num_generated == 1


async def test_a_prolonged_lease_is_worked_on_beyond_its_first_end(node_home: Home) -> None:
    bench = Bench(node_home, work(7), child=SlowChild(PROMPTS), remaining_s=0.01)
    loop = asyncio.get_running_loop()
    async with bench.under_way() as child:
        assert bench.lease._limit is not None
        assert (bench.lease._limit.when() or 0) < loop.time() + 2
        bench.lease.prolong(20.0)
        bench.lease.prolong(0.1)  # a later word of an earlier end changes nothing
        assert (bench.lease._limit.when() or 0) > loop.time() + 10
        child.finish("ff", str(slot(7)))
    assert (bench.lease.num_taken, bench.coordinator.returned) == (1, [])
    bench.lease.prolong(20.0)  # after the end: nothing


async def test_the_engine_is_free_before_the_coordinator_answers(node_home: Home) -> None:
    bench = Bench(node_home, work(7), child=SlowChild(PROMPTS))
    answer = asyncio.Event()
    submit = bench.coordinator.submit

    async def slow_submit(lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        await answer.wait()
        return await submit(lease_id, rollouts)

    bench.coordinator.submit = slow_submit  # type: ignore[method-assign]
    async with bench.under_way() as child:
        assert bench.lease.is_generating
        child.finish("ff", str(slot(7)))
        await until(lambda: not bench.lease.is_generating)
        assert (bench.num_generated, bench.lease.num_taken) == (1, 0)
        answer.set()
    assert bench.lease.num_taken == 1
