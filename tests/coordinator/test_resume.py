"""A slot that moves to another node goes on from what was received of it; what cannot be trusted starts anew."""

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.core import leases, returns
from coordinator.core.effects import CancelSlots
from coordinator.core.turn import Turn
from coordinator.grader import Grader
from node.orders import Lease, LeasesCancelled, SlotWork, Welcome, order_of
from protocol.errors import UsageError
from protocol.ids import LeaseId, SlotKey, Version
from protocol.rollout import Piece, Rollout
from protocol.v1 import control_pb2
from protocol.wire import piece_message, slot_message
from tests.coordinator.office import DEADLINE_S, STOP_ID, Member, Office, serving, typed

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUICK = {"limits": {"heartbeat_s": 0.5}}


@pytest_asyncio.fixture(loop_scope="session")
async def quick(grader: Grader, base: Path, make_home: Callable[[], Path]) -> AsyncIterator[Office]:
    """A coordinator that soon misses a node."""
    async with serving(grader, base, make_home, **QUICK) as running:
        yield running


async def two_rollout_nodes(office: Office) -> tuple[Member, Member]:
    _, first = await office.swarm()
    second = await office.join(role="rollout")
    await second.hello()
    await office.until(lambda: second.identity.peer_id in office.core.state.roles)
    return first, second


async def told(office: Office, slot: SlotKey, num_tokens: int) -> None:
    """Waits until the core knows of so many tokens of a slot."""
    progress, place = office.core.soft.progress, (slot.task.index, slot.sample)
    await office.until(lambda: place in progress and sum(n for _, n in progress[place].said.segments) == num_tokens)


async def moved(office: Office, first: Member, second: Member, *pieces: tuple[int, ...]) -> tuple[Lease, SlotWork]:
    """The slot that `first` streamed these pieces of before it was lost, as `second` gets it."""
    lease = await first.lease(1)
    slot = lease.slots[0].slot
    if pieces:
        await first.stream(lease.lease_id, slot, *first.pieces(slot, *pieces))
        await told(office, slot, sum(map(len, pieces)))
    await first.vanish()
    again = await second.lease(2)
    return again, next(work for work in again.slots if work.slot == slot)


def finished(member: Member, work: SlotWork, *parts: tuple[int, ...]) -> Rollout:
    """The rollout of what came with the slot and these own pieces."""
    start = sum(len(piece.token_ids) for piece in work.pieces)
    return Rollout(work.slot, (*work.pieces, *member.pieces(work.slot, *parts, start=start)), "stop")


async def test_a_lost_nodes_slot_goes_on_elsewhere(quick: Office) -> None:
    first, second = await two_rollout_nodes(quick)
    lease, work = await moved(quick, first, second, (7,), (8,))
    assert [(piece.node, piece.start, piece.token_ids) for piece in work.pieces] == [
        (first.identity.peer_id, 0, (7,)),
        (first.identity.peer_id, 1, (8,)),
    ]
    others = [other for other in lease.slots if other != work]
    assert [other.pieces for other in others] == [()]
    anew = second.rollout(work.slot, (7, 8, STOP_ID))
    forked = Rollout(
        work.slot, (*second.pieces(work.slot, (9,), (8,)), *second.pieces(work.slot, (STOP_ID,), start=2)), "stop"
    )
    for wrong in (anew, forked):
        assert await second.outcome(lease, wrong) == "ROLLOUT_MALFORMED"
    assert await second.outcome(lease, finished(second, work, (9, STOP_ID))) == "ACCEPTED"
    slot = quick.core.state.find(work.slot)
    assert (slot.peer_id, slot.segments) == (second.identity.peer_id, ((0, 4),))


async def test_a_slot_that_moves_twice_goes_on_twice(quick: Office) -> None:
    first, second = await two_rollout_nodes(quick)
    lease, work = await moved(quick, first, second, (7,))
    answer = await second.stream(lease.lease_id, work.slot, *second.pieces(work.slot, (8,), start=1))
    assert not answer.gaps
    await told(quick, work.slot, 2)
    await second.control.return_lease(lease.lease_id, reason="a test")
    third = await quick.join(role="rollout")
    await third.hello()
    await quick.until(lambda: third.identity.peer_id in quick.core.state.roles)
    last = await third.lease(2)
    work = next(again for again in last.slots if again.slot == work.slot)
    assert [piece.node for piece in work.pieces] == [first.identity.peer_id, second.identity.peer_id]
    assert await third.outcome(last, finished(third, work, (9, STOP_ID))) == "ACCEPTED"


async def test_a_slot_that_is_taken_over_goes_on_at_once(quick: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it may be is tested elsewhere; here, that the turn which takes it gives it with all its pieces, and that
    the node that had it is told."""
    first, second = await two_rollout_nodes(quick)
    lease = await first.lease(2)
    slot = lease.slots[0].slot
    await first.stream(lease.lease_id, slot, *first.pieces(slot, (7,), (8,)))
    await told(quick, slot, 2)

    def take_all(turn: Turn, *_: object, **__: object) -> tuple[SlotKey, ...]:
        found = [(place, advance.said) for place, advance in turn.soft.progress.items()]
        for place, said in found:
            returns.take_from_node(turn, place, said, "outgrown")
        return tuple(said.slot for _, said in found)

    monkeypatch.setattr(leases, "take_outliers", take_all)
    monkeypatch.setattr(leases, "spare_groups", lambda *_, **__: 0)
    again = await second.lease(2)
    (work,) = again.slots
    assert work.slot == slot
    assert [(piece.node, piece.token_ids) for piece in work.pieces] == [
        (first.identity.peer_id, (7,)),
        (first.identity.peer_id, (8,)),
    ]
    assert await first.wait_for(LeasesCancelled) == LeasesCancelled((), (slot,))
    assert await first.outcome(lease, first.rollout(slot)) == "LEASE_UNKNOWN"
    answer = await first.stream(lease.lease_id, slot, *first.pieces(slot, (9,), start=2))
    assert list(answer.unwanted) == [slot_message(slot)]
    assert await second.outcome(again, finished(second, work, (9, STOP_ID))) == "ACCEPTED"
    assert quick.core.state.num_moved == 1


@pytest.mark.parametrize("end", [(7, STOP_ID), (7, 7, 7)])
@pytest.mark.parametrize("is_begun", [True, False])
async def test_pieces_that_leave_nothing_to_sample_are_no_part_of_what_moves(
    quick: Office, end: tuple[int, ...], is_begun: bool
) -> None:
    """No node could go on from them, whether its own was lost before handing the slot in or never meant to; from those
    before them one can."""
    first, second = await two_rollout_nodes(quick)
    lease = await first.lease(1)
    slot, begun = lease.slots[0].slot, (8,)
    if is_begun:
        await first.stream(lease.lease_id, slot, *first.pieces(slot, begun))
        await told(quick, slot, 1)
        await first.stream(lease.lease_id, slot, *first.pieces(slot, end, start=1))
    else:
        await first.stream(lease.lease_id, slot, *first.pieces(slot, (*begun, *end)))
    await quick.coordinator.pieces.tick()
    await first.vanish()
    again = await second.lease(2)
    work = next(work for work in again.slots if work.slot == slot)
    assert [piece.token_ids for piece in work.pieces] == ([begun] if is_begun else [])
    assert (quick.core.state.find(slot).prefix is None) is not is_begun
    assert await second.outcome(again, finished(second, work, (9, STOP_ID))) == "ACCEPTED"


async def test_nothing_comes_with_a_slot_of_which_nothing_was_received(quick: Office) -> None:
    first, second = await two_rollout_nodes(quick)
    lease, work = await moved(quick, first, second)
    assert work.pieces == ()
    assert await second.outcome(lease, second.rollout(work.slot)) == "ACCEPTED"


async def test_pieces_with_a_forged_signature_go_to_nobody(quick: Office) -> None:
    first, second = await two_rollout_nodes(quick)
    lease = await first.lease(1)
    slot = lease.slots[0].slot
    forged = piece_message(first.pieces(slot, (7,))[0])
    forged.signature = bytes(64)
    await first.stream(lease.lease_id, slot, forged)
    await told(quick, slot, 1)
    await first.vanish()
    assert quick.core.state.find(slot).prefix is not None
    again = await second.lease(2)
    work = next(work for work in again.slots if work.slot == slot)
    assert work.pieces == ()
    assert quick.core.state.find(slot).prefix is None
    assert await second.outcome(again, second.rollout(slot)) == "ACCEPTED"


async def test_pieces_that_are_gone_let_the_slot_start_anew(quick: Office) -> None:
    first, second = await two_rollout_nodes(quick)
    lease = await first.lease(1)
    slot = lease.slots[0].slot
    await first.stream(lease.lease_id, slot, *first.pieces(slot, (7,)))
    await told(quick, slot, 1)
    await first.vanish()
    quick.coordinator.pieces._slots.clear()
    again = await second.lease(2)
    work = next(work for work in again.slots if work.slot == slot)
    assert (work.pieces, quick.core.state.find(slot).prefix) == ((), None)
    assert await second.outcome(again, second.rollout(slot)) == "ACCEPTED"


async def test_a_coordinator_that_dies_keeps_what_it_told_of(
    quick: Office, grader: Grader, base: Path, make_home: Callable[[], Path]
) -> None:
    first, second = await two_rollout_nodes(quick)
    lease = await first.lease(1)
    slot = lease.slots[0].slot
    await first.stream(lease.lease_id, slot, *first.pieces(slot, (7,), (8,)))
    await told(quick, slot, 2)
    left = make_home()
    ignored = shutil.ignore_patterns("*.sock", "addresses.json")  # this one still has its ports
    shutil.copytree(quick.home.path, left, dirs_exist_ok=True, ignore=ignored)  # what a kill would leave
    with (left / "pieces.log").open("ab") as file:
        file.write(b"\x40\0\0\0torn")
    async with serving(grader, base, make_home, on=left, **QUICK) as reborn:
        first.follow(reborn)
        second.follow(reborn)
        await second.hello()
        await told(reborn, slot, 2)
        await first.control.return_lease(lease.lease_id, reason="a test")
        again = await second.lease(2)
        work = next(work for work in again.slots if work.slot == slot)
        assert [piece.token_ids for piece in work.pieces] == [(7,), (8,)]
        assert await second.outcome(again, finished(second, work, (STOP_ID,))) == "ACCEPTED"


# What a node is told while it streams


async def test_slots_that_a_node_does_not_hold_are_unwanted(office: Office) -> None:
    first, second = await two_rollout_nodes(office)
    lease = await first.lease(1)
    slot = lease.slots[0].slot
    before = office.state()
    for member, lease_id in ((second, lease.lease_id), (first, LeaseId("ff" * 8)), (first, LeaseId(""))):
        answer = await member.stream(lease_id, slot, *member.pieces(slot, (7,)))
        assert (list(answer.unwanted), list(answer.leases)) == ([slot_message(slot)], [])
    assert office.coordinator.pieces.num_bytes == 0
    answer = await first.stream(lease.lease_id, slot, *first.pieces(slot, (7,)))
    assert (list(answer.unwanted), [time.lease_id for time in answer.leases]) == ([], [lease.lease_id])
    assert office.state() == before
    assert await first.outcome(lease, first.rollout(slot)) == "ACCEPTED"
    answer = await first.stream(lease.lease_id, slot, *first.pieces(slot, (8,), start=1))
    assert list(answer.unwanted) == [slot_message(slot)]


async def test_a_lease_whose_slots_come_on_is_prolonged(office: Office) -> None:
    _, rollout = await office.swarm()
    idle, lease = await rollout.lease(1), await rollout.lease(1)
    slot = lease.slots[0].slot
    leases = office.core.state.leases
    for lease_id in (idle.lease_id, lease.lease_id):
        leases[lease_id].deadline_ms = office.clock() + 5_000  # as if the node had been measured to be fast
    answer = await rollout.stream(lease.lease_id, slot, *rollout.pieces(slot, (7,)))
    assert 0 < answer.leases[0].remaining_s <= 5
    await office.until(lambda: leases[lease.lease_id].deadline_ms > office.clock() + 10_000)
    answer = await rollout.stream(lease.lease_id, slot)
    assert answer.leases[0].remaining_s > 10
    answer = await rollout.stream(idle.lease_id, idle.slots[0].slot)
    assert answer.leases[0].remaining_s <= 5


async def test_a_hole_is_answered_with_where_it_begins(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    slot = lease.slots[0].slot
    pieces = rollout.pieces(slot, (7,), (8,), (9,))
    assert not (await rollout.stream(lease.lease_id, slot, pieces[0])).gaps
    (gap,) = (await rollout.stream(lease.lease_id, slot, pieces[2])).gaps
    assert (gap.slot, gap.start) == (slot_message(slot), 1)
    assert not (await rollout.stream(lease.lease_id, slot, *pieces[1:])).gaps
    await told(office, slot, 3)


async def test_too_many_slots_or_pieces_in_one_call_are_refused(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    slot = lease.slots[0].slot
    pieces = [piece_message(piece) for piece in rollout.pieces(slot, (7,))]
    many = control_pb2.SlotProgress(lease_id=lease.lease_id, slot=slot_message(slot), pieces=pieces * 4097)
    one = control_pb2.SlotProgress(lease_id=lease.lease_id, slot=slot_message(slot))
    for progress in ([many], [one] * 4097):
        request = control_pb2.SubmitPiecesRequest(progress=progress)
        with office.refuses(UsageError, match="smaller parts"):
            await typed(rollout.control.stub.SubmitPieces(request, timeout=DEADLINE_S))
    assert not (await rollout.stream(lease.lease_id, slot, *pieces)).unwanted


async def test_malformed_pieces_are_counted_and_harm_nobody(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    slot = lease.slots[0].slot
    ugly = [
        Piece(rollout.identity.peer_id, Version(0), 0, (64,), (-0.5,), b"s" * 64),
        Piece(rollout.identity.peer_id, Version(1), 0, (7,), (-0.5,), b"s" * 64),
        Piece(rollout.identity.peer_id, Version(0), 0, (7,) * 5, (-0.5,) * 5, b"s" * 64),
    ]
    for piece in ugly:
        await rollout.stream(lease.lease_id, slot, piece)
    assert office.coordinator.authority.refusals["ROLLOUT_MALFORMED"] == len(ugly)
    assert office.coordinator.pieces.num_bytes == 0
    assert await rollout.outcome(lease, rollout.rollout(slot)) == "ACCEPTED"


async def test_cancelled_slots_reach_their_node(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    slot = lease.slots[0].slot
    office.coordinator.authority.effects.put_nowait(CancelSlots(rollout.identity.peer_id, (slot,)))
    assert await rollout.wait_for(LeasesCancelled) == LeasesCancelled((), (slot,))


# A daemon that is started anew


async def test_a_daemon_that_starts_anew_loses_what_it_held(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    leases = office.core.state.leases

    async def greet(boot_id: str) -> None:
        call = rollout.control.stub.Session()
        await call.write(control_pb2.SessionRequest(hello=control_pb2.Hello(program="test", boot_id=boot_id)))
        assert isinstance(order_of(await call.read()), Welcome)
        call.cancel()

    for boot_id in ("", "first", "first", ""):
        await greet(boot_id)
        assert lease.lease_id in leases
    await greet("second")
    assert lease.lease_id not in leases
    assert office.core.state.find(lease.slots[0].slot).num_tries == 1
