"""One lease: only slots whose prompt holds are generated, what finishes is signed and handed in, the rest goes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.compute.messages import Done, Generate, MakePrompts, Prompts, SlotAdvanced, SlotFilled, StopSlots
from node.home import Home
from node.leases import LeaseWork
from node.orders import Lease, PiecesReceived, Receipt, SlotWork
from node.pieces import PieceSender, SlotProgress
from node.state import NodeState
from protocol.errors import EngineError, HexcombError, LeaseUnknownError, UnreachableError, UsageError
from protocol.ids import Digest, LeaseId, SlotKey, TaskKey, Version
from protocol.keys import Identity, peer_id_of
from protocol.rollout import Piece, Rollout, check_rollout, edges_of, sign_piece, verify_pieces
from protocol.seeds import slot_seed
from protocol.tasks import prompt_digest
from tests.node.fakes import RUN_ID, SPEC, until

SECRET = bytes(32)
PROMPTS = {7: (3, 4, 5), 8: (6,)}


def slot(index: int, sample: int = 0) -> SlotKey:
    return SlotKey(Version(2), TaskKey("chain_sum", 1, index), sample)


def work(index: int, sample: int = 0, *, given: tuple[int, ...] = (), digest: str | None = None) -> SlotWork:
    right = prompt_digest(PROMPTS[index])
    return SlotWork(slot(index, sample), cast(Any, digest or right), given)


def with_pieces(work: SlotWork, *pieces: tuple[int, int, tuple[int, ...]]) -> SlotWork:
    """With what another node sampled of it, as (version, start, ids)."""
    other = Identity.from_seed(b"o" * 32)
    name = peer_id_of(other.public_bytes)
    made = (Piece(name, Version(version), start, ids, (-0.1,) * len(ids)) for version, start, ids in pieces)
    signed = tuple(sign_piece(other, run_id=RUN_ID, slot=work.slot, piece=piece) for piece in made)
    return replace(work, pieces=signed)


class Child:
    """Generates at once: token 2 and then the stop id, the first under v1, the second under v2."""

    def __init__(self, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        self.made, self.is_closed, self.generated = made, False, list[Generate]()
        self.finish_reason, self.failure = "stop", cast("HexcombError | None", None)
        self.deliver: Callable[[SlotFilled], None] = lambda _: None
        self.stopped: list[StopSlots] = []

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        if isinstance(body, MakePrompts):
            if isinstance(self.made, HexcombError):
                raise self.made
            return Prompts(tuple(self.made[index] for _, _, index in body.tasks))
        if isinstance(body, StopSlots):
            self.stopped.append(body)
            for name in body.slots:
                self.deliver(SlotFilled(body.lease_id, name, (), (), (), "abort"))
            return Done()
        self.generated.append(body)
        await self.sample(body)
        return Done()

    async def sample(self, body: Generate) -> None:
        for order in body.orders:
            if self.failure is not None:
                raise self.failure
            self.finish(body.lease_id, order.slot)

    def finish(self, lease_id: str, name: str) -> None:
        segments = ((1, 1), (2, 1))
        self.deliver(SlotFilled(lease_id, name, (2, 1), (-0.5, -0.25), segments, self.finish_reason))


class SlowChild(Child):
    """Generates until it is told to `finish` the last slot."""

    def __init__(self, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        super().__init__(made)
        self.begun, self.running = asyncio.Event(), set[str]()
        self.news = asyncio.Event()

    async def sample(self, body: Generate) -> None:
        self.running = {order.slot for order in body.orders}
        self.begun.set()
        while self.running:
            await self.news.wait()
            self.news.clear()

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        done = await super().request(body, reply, deadline_s=deadline_s)
        if isinstance(body, StopSlots):
            self.running -= {*body.slots}
            self.news.set()
        return done

    def finish(self, lease_id: str, name: str) -> None:
        super().finish(lease_id, name)
        self.running.discard(name)
        self.news.set()


class Coordinator:
    """Takes rollouts; `troubles` are raised first, one a call."""

    def __init__(self) -> None:
        self.troubles: list[HexcombError] = []
        self.taken: list[Rollout] = []
        self.returned: list[tuple[str, bool]] = []
        self.reasons: list[str] = []
        self.outcome = "ACCEPTED"

    async def submit(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        if self.troubles:
            raise self.troubles.pop(0)
        self.taken += rollouts
        return [Receipt(rollout.slot, self.outcome, "") for rollout in rollouts]

    async def return_lease(self, lease_id: LeaseId, *, reason: str, is_fault: bool = False) -> None:
        self.returned.append((lease_id, is_fault))
        self.reasons.append(reason)


class Bench:
    """A lease with what is around it."""

    def __init__(
        self,
        home: Home,
        *works: SlotWork,
        made: dict[int, tuple[int, ...]] | HexcombError = PROMPTS,
        child: Child | None = None,
        remaining_s: float = 30.0,
    ) -> None:
        self.child, self.coordinator = child or Child(made), Coordinator()
        self.progress: list[SlotProgress] = []
        self.num_generated = 0
        manifest = SimpleNamespace(seal=SimpleNamespace(secret=SECRET))
        self.node = SimpleNamespace(
            home=home,
            peer_id=home.peer_id,
            run_id=RUN_ID,
            control=self.coordinator,
            state=NodeState(),
            spec=SPEC,
            versions=SimpleNamespace(manifest=lambda _: manifest),
        )
        lease = Lease(LeaseId("ff"), works, remaining_s)
        counts = self.node.state.counts
        self.sender = PieceSender(self.receive, 0.01, counts, lambda *_: None, lambda *_: None)
        self.lease = LeaseWork(cast(Any, self.node), cast(Any, self.child), lease, self.sender, self.note_generated)
        self.child.deliver = self.lease.filled.put_nowait

    async def receive(self, progress: Sequence[SlotProgress]) -> PiecesReceived:
        self.progress += progress
        return PiecesReceived()

    def note_generated(self) -> None:
        self.num_generated += 1

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.lease.run()

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[SlowChild]:
        """While the child generates; the lease must be done soon after."""
        child = cast(SlowChild, self.child)
        task = asyncio.create_task(self.run())
        async with asyncio.timeout(20):
            await child.begun.wait()
            yield child
            await task


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
    assert bench.coordinator.returned == [("ff", True)]
    assert "cannot be gone on from" in bench.coordinator.reasons[0]


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
