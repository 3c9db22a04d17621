"""Pieces on their way: gathered, in order, one call at a time, again after a failure, only while they are wanted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

import node.pieces
from node.orders import PiecesReceived
from node.pieces import MUCH, PieceSender, SlotProgress
from protocol.errors import HexcombError, RefusedError, UnreachableError
from protocol.ids import LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.rollout import Piece
from tests.node.fakes import until

A, B = (SlotKey(Version(0), TaskKey("chain_sum", 1, index), 0) for index in (1, 2))
ONE, TWO = LeaseId("1" * 16), LeaseId("2" * 16)


def piece(start: int, num: int = 2) -> Piece:
    return Piece(PeerId("me"), Version(0), start, tuple(range(num)), (0.0,) * num)


class Bench:
    """A sender whose coordinator waits for `answer`; `answers` are given in order, then empty ones."""

    def __init__(self, *, interval_s: float = 0.01) -> None:
        self.answers: list[PiecesReceived | HexcombError] = []
        self.calls: list[list[tuple[SlotKey, list[int]]]] = []
        self.unwanted: list[tuple[LeaseId, SlotKey]] = []
        self.times: list[tuple[LeaseId, float]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_in_flight = 0
        self.called = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.sender = PieceSender(
            self.submit,
            interval_s,
            self.counts,
            on_unwanted=lambda *what: self.unwanted.append(what),
            on_time=lambda *what: self.times.append(what),
        )

    async def submit(self, progress: Sequence[SlotProgress]) -> PiecesReceived:
        assert self.num_in_flight == 0
        self.num_in_flight += 1
        self.calls.append([(item.slot, [piece.start for piece in item.pieces]) for item in progress])
        self.called.set()
        await self.may_answer.wait()
        self.num_in_flight -= 1
        answer = self.answers.pop(0) if self.answers else PiecesReceived()
        if isinstance(answer, HexcombError):
            raise answer
        return answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.sender.run())
        try:
            async with asyncio.timeout(10):
                yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def have_called(self, num_calls: int) -> None:
        """So many calls were made and answered."""
        await until(lambda: len(self.calls) >= num_calls and not self.num_in_flight)


async def test_pieces_of_all_leases_go_in_one_call_and_in_order() -> None:
    bench = Bench()
    for start in (0, 2, 4):
        bench.sender.add(ONE, A, piece(start))
        bench.sender.add(TWO, B, piece(start))
    async with bench.running():
        await bench.have_called(1)
        bench.sender.add(ONE, A, piece(6))
        await bench.have_called(2)
    assert bench.calls == [[(A, [0, 2, 4]), (B, [0, 2, 4])], [(A, [6])]]
    assert bench.counts["pieces/handed in"] == 7


async def test_one_call_is_in_flight_and_the_next_takes_what_came_meanwhile() -> None:
    bench = Bench()
    bench.may_answer.clear()
    bench.sender.add(ONE, A, piece(0))
    async with bench.running():
        await bench.called.wait()
        bench.sender.add(ONE, A, piece(2))
        bench.sender.add(ONE, A, piece(4))
        bench.may_answer.set()
        await bench.have_called(2)
    assert bench.calls == [[(A, [0])], [(A, [2, 4])]]


async def test_calls_keep_their_distance_unless_there_is_much() -> None:
    bench = Bench(interval_s=8.0)
    bench.sender.add(ONE, A, piece(0))
    async with bench.running():
        await bench.have_called(1)
        started_s = asyncio.get_running_loop().time()
        for number in range(1, MUCH + 1):
            bench.sender.add(ONE, A, piece(2 * number))
        await bench.have_called(2)
        assert 0.5 < asyncio.get_running_loop().time() - started_s < 4.0
        bench.sender.add(ONE, A, piece(2 * MUCH + 2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await bench.have_called(3)


@pytest.mark.parametrize("error", [UnreachableError("nobody"), RefusedError("not now")])
async def test_a_call_that_fails_is_made_again_for_what_is_still_wanted(error: HexcombError) -> None:
    bench = Bench()
    bench.answers = [error, error]
    bench.may_answer.clear()
    bench.sender.add(ONE, A, piece(0))
    bench.sender.add(ONE, B, piece(0))
    async with bench.running():
        await bench.called.wait()
        bench.sender.forget(ONE, B)
        bench.sender.add(ONE, A, piece(2))
        bench.may_answer.set()
        await bench.have_called(3)
    assert bench.calls == [[(A, [0]), (B, [0])], [(A, [0, 2])], [(A, [0, 2])]]
    assert bench.counts["pieces/calls failed"] == 2


async def test_unwanted_slots_are_told_and_leave_no_trace() -> None:
    bench = Bench()
    bench.answers = [PiecesReceived(unwanted=(A,), remaining_s=((ONE, 7.0),))]
    bench.sender.add(ONE, A, piece(0))
    bench.sender.add(TWO, B, piece(0))
    async with bench.running():
        await bench.have_called(1)
        bench.sender.add(TWO, B, piece(2))
        await bench.have_called(2)
    assert bench.unwanted == [(ONE, A)]
    assert bench.times == [(ONE, 7.0)]
    assert bench.calls[1] == [(B, [2])]


async def test_an_answer_about_a_slot_that_has_ended_is_no_news() -> None:
    bench = Bench()
    bench.answers = [PiecesReceived(unwanted=(A,), gaps=((A, 0),))]
    bench.may_answer.clear()
    bench.sender.add(ONE, A, piece(0))
    async with bench.running():
        await bench.called.wait()
        bench.sender.forget(ONE, A)
        bench.may_answer.set()
        await bench.have_called(1)
    assert bench.unwanted == []


async def test_a_gap_is_filled_from_where_it_begins() -> None:
    bench = Bench()
    bench.answers = [PiecesReceived(), PiecesReceived(gaps=((A, 6),)), PiecesReceived(gaps=((A, 4),))]
    bench.sender.add(ONE, A, piece(4))  # after four tokens of another node
    bench.sender.add(ONE, A, piece(6))
    async with bench.running():
        await bench.have_called(1)
        bench.sender.add(ONE, A, piece(8))
        await bench.have_called(4)
    assert [starts for [(_, starts)] in bench.calls] == [[4, 6], [8], [6, 8], [4, 6, 8]]
    assert bench.counts["pieces/gaps"] == 2


@pytest.mark.parametrize("position", [0, 5, 40])
async def test_a_gap_that_this_node_cannot_fill_ends_the_pieces_of_the_slot(position: int) -> None:
    bench = Bench()
    bench.answers = [PiecesReceived(gaps=((A, position),))]
    bench.sender.add(ONE, A, piece(4))
    async with bench.running():
        await bench.have_called(1)
        bench.sender.add(ONE, A, piece(6))
        bench.sender.add(ONE, B, piece(0))
        await bench.have_called(2)
    assert bench.calls == [[(A, [4])], [(B, [0])]]


async def test_without_room_a_slot_is_cut_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.pieces, "MAX_HELD", 3)
    bench = Bench()
    for start in (0, 2, 4, 6):
        bench.sender.add(ONE, A, piece(start))
    bench.sender.forget(TWO, B)
    bench.sender.add(TWO, B, piece(0))
    assert bench.counts["pieces/no room"] == 2
    async with bench.running():
        await bench.have_called(1)
        bench.sender.forget(TWO, B)
        bench.sender.add(ONE, A, piece(8))  # there is room now, but no way back
        bench.sender.forget(ONE, A)
        bench.sender.add(ONE, A, piece(0))
        await bench.have_called(2)
    assert bench.calls == [[(A, [0, 2, 4])], [(A, [0])]]


async def test_what_was_handed_in_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.pieces, "MAX_HELD", 3)
    bench = Bench()
    async with bench.running():
        for start in (0, 2, 4):
            bench.sender.add(ONE, A, piece(start))
        await bench.have_called(1)
        for start in (6, 8):
            bench.sender.add(ONE, A, piece(start))
        bench.sender.add(TWO, B, piece(0))
        await bench.have_called(2)
    assert bench.calls == [[(A, [0, 2, 4])], [(A, [6, 8]), (B, [0])]]
    assert not bench.counts["pieces/no room"]


async def test_a_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.pieces, "MAX_CALL", 3)
    bench = Bench()
    for start in (0, 2):
        bench.sender.add(ONE, A, piece(start))
        bench.sender.add(ONE, B, piece(start))
    async with bench.running():
        await bench.have_called(2)
    assert bench.calls == [[(A, [0, 2]), (B, [0])], [(B, [2])]]
