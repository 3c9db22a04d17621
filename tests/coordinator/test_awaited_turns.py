"""Turns while the environment is asked: it may be slow, nodes may lie or die meanwhile, and no turn before is lost."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import submissions
from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core.books import check
from coordinator.core.replies import Grant
from coordinator.submissions import MAX_CALLS_WAITING
from protocol.errors import LeaseUnknownError, UnreachableError
from protocol.ids import Digest, PeerId, SlotKey, Version
from protocol.rollout import Piece, Rollout, sign_piece
from protocol.v1 import control_pb2
from protocol.wire import rollout_message
from tests.coordinator.conversation import Stage, again, joined, on_stage, turn, write_folder
from tests.coordinator.office import Member, typed
from tests.coordinator.test_moves import live_for, received
from tests.coordinator.world import World, make_rules

# The core


@pytest.fixture
def world() -> World:
    """Two rollout nodes that are so fast that their leases are short."""
    world = World(make_rules(lease_s=60.0))
    world.start(rollouts=2)
    for name in ("r0", "r1"):
        grant = world.lease(name, 2)
        live_for(world, 2)
        for slot in grant.slots:
            world.submit(grant, slot, name=name)
            world.score(slot)
    return world


def wait(world: World, grant: Grant, seconds: int, *, is_told: bool = True, name: str = "r0") -> None:
    """The environment takes its time, and the core hears of that."""
    for _ in range(seconds):
        if is_told:
            world.do(e.TurnsAwaited(PeerId(name), grant.lease_id, grant.slots))
        live_for(world, 1)


def hand_in(world: World, grant: Grant, slot: SlotKey) -> str:
    said = e.EnvironmentReplied(2, Digest("after the reply"))
    segments = ((Version(world.core.state.head.version), 4),)  # type: ignore[union-attr]
    edges = (Digest("turn"),)
    event = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, slot, Digest("d"), segments, edges, (), said)
    return str(getattr(world.do(event).reply, "outcome", ""))


def test_a_lease_lasts_while_the_environment_is_asked(world: World) -> None:
    grant = world.lease("r0", 2)
    assert grant.deadline_ms - world.now_ms == 10_000
    wait(world, grant, 25)
    assert hand_in(world, grant, grant.slots[0]) == "TURN_TAKEN"
    assert world.core.state.nodes[PeerId("r0")].failure == 0.0


def test_a_lease_ends_where_nobody_says_that_the_environment_is_asked(world: World) -> None:
    grant = world.lease("r0", 2)
    wait(world, grant, 11, is_told=False)
    with pytest.raises(LeaseUnknownError):
        hand_in(world, grant, grant.slots[0])


def test_the_bound_on_every_lease_holds_for_an_environment_too(world: World) -> None:
    grant = world.lease("r0", 2)
    wait(world, grant, 59)
    assert grant.lease_id in world.core.state.leases
    wait(world, grant, 2)
    assert grant.lease_id not in world.core.state.leases


@pytest.mark.parametrize("is_told", [True, False])
def test_a_slot_that_waits_for_a_reply_does_not_stand_still(world: World, is_told: bool) -> None:
    grant = world.lease("r0", 2)
    asked, other = grant.slots
    version = world.core.state.head.version  # type: ignore[union-attr]
    world.do(received(grant, asked, 3, version=version))
    for num_tokens in range(3, 23):
        world.do(received(grant, other, num_tokens, version=version))
        if is_told:
            world.do(e.TurnsAwaited(PeerId("r0"), grant.lease_id, (asked,)))
        live_for(world, 1)
    stalled = [fact for fact in world.facts if isinstance(fact, f.SlotGivenBack) and fact.reason == "stalled"]
    assert [fact.slot for fact in stalled] == ([] if is_told else [asked])


def test_nobody_prolongs_the_lease_of_another_or_without_its_slots(world: World) -> None:
    grant, mine = world.lease("r0", 2), world.lease("r1", 2)
    for _ in range(9):
        world.do(e.TurnsAwaited(PeerId("r1"), grant.lease_id, grant.slots))
        world.do(e.TurnsAwaited(PeerId("r1"), mine.lease_id, grant.slots))
        live_for(world, 1)
    live_for(world, 2)
    assert not {grant.lease_id, mine.lease_id} & set(world.core.state.leases)


# The service


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An organizer's folder."""
    return write_folder(tmp_path)


Replies = Callable[[Sequence[Any]], Any]


def slow(stage: Stage, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> asyncio.Event:
    """The environment answers `after` requests, and others once the event is set."""
    go_on, replies, num_asked = asyncio.Event(), stage.grader.replies, 0

    async def reply(said: Sequence[Any]) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked > after:
            await go_on.wait()
        return await replies(said)

    monkeypatch.setattr(stage.grader, "replies", reply)
    return go_on


async def submit_for(member: Member, lease_id: str, rollout: Rollout, *, seconds: float) -> None:
    request = control_pb2.SubmitRolloutsRequest(lease_id=lease_id, rollouts=[rollout_message(rollout)])
    await typed(member.control.stub.SubmitRollouts(request, timeout=seconds))


def signed_anew(stage: Stage, member: Member, slot: SlotKey, piece: Piece) -> Piece:
    """The same tokens with other log-probabilities: another history, to which the environment says the same."""
    changed = replace(piece, node=member.identity.peer_id, logprobs=(-0.25,) * len(piece.token_ids), signature=b"")
    return sign_piece(member.identity, run_id=stage.office.home.run_id, slot=slot, piece=changed)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_turn_that_is_over_and_never_handed_in_costs_no_turn_before_it(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    """What ends with a stop id is a prefix for nobody; the turns before it are."""
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        office = stage.office
        _, first = await office.swarm()
        second = await joined(office)
        lease = await first.lease(1)
        work = lease.slots[0]
        assert await first.outcome(lease, turn(first, work, stage.said("4"))) == "TURN_TAKEN"
        lease_2, work_2 = await again(first, work.slot)
        at = sum(len(piece.token_ids) for piece in work_2.pieces)
        await first.stream(lease_2.lease_id, work.slot, *first.pieces(work.slot, stage.said("4"), start=at))
        await office.coordinator.pieces.tick()
        await first.vanish()
        _, work_3 = await again(second, work.slot)
        assert work_3.pieces == work_2.pieces


@pytest.mark.asyncio(loop_scope="session")
async def test_a_node_cannot_put_another_history_in_the_place_of_what_came_before(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        office = stage.office
        _, first = await office.swarm()
        liar = await joined(office)
        lease = await first.lease(1)
        slot = lease.slots[0].slot
        assert await first.outcome(lease, turn(first, lease.slots[0], stage.said("4"))) == "TURN_TAKEN"
        lease_2, work_2 = await again(liar, slot)
        said, reply = work_2.pieces
        forged = replace(work_2, pieces=(signed_anew(stage, liar, slot, said), reply))
        asked = slow(stage, monkeypatch)
        asked.set()
        assert await liar.outcome(lease_2, turn(liar, forged, stage.said("4"))) == "ROLLOUT_MALFORMED"
        await liar.control.return_lease(lease_2.lease_id, reason="a test")
        _, work_3 = await again(first, slot)
        assert work_3.pieces == work_2.pieces


@pytest.mark.asyncio(loop_scope="session")
async def test_a_slot_that_is_handed_in_twice_in_a_call_keeps_the_turn_that_was_taken(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        _, node = await stage.office.swarm()
        lease = await node.lease(1)
        work = lease.slots[0]
        rollout = turn(node, work, stage.said("4"))
        other = Rollout(work.slot, (signed_anew(stage, node, work.slot, rollout.pieces[0]),), "stop")
        receipts = await node.control.submit(lease.lease_id, [rollout, other])
        assert [receipt.outcome for receipt in receipts] == ["TURN_TAKEN", "LEASE_UNKNOWN"]
        _, work_2 = await again(node, work.slot)
        assert [piece.is_sampled for piece in work_2.pieces] == [True, False]
        assert work_2.pieces[0] == rollout.pieces[0]


@pytest.mark.asyncio(loop_scope="session")
async def test_what_was_replied_to_is_taken_before_the_next_is_asked_about(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "MAX_ASKED", 1)
    monkeypatch.setattr(submissions, "AWAIT_S", 0.05)
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        office = stage.office
        _, node = await office.swarm()
        lease = await node.lease(2)
        go_on, awaited = slow(stage, monkeypatch, after=1), list[e.TurnsAwaited]()
        handle = office.core.handle

        def note(event: e.Event, now_ms: int) -> Any:
            awaited.extend([event] if isinstance(event, e.TurnsAwaited) else [])
            return handle(event, now_ms)

        monkeypatch.setattr(office.core, "handle", note)
        rollouts = [turn(node, work, stage.said("4")) for work in lease.slots]
        handing = asyncio.create_task(node.control.submit(lease.lease_id, rollouts))
        await office.until(lambda: stage.prefix(rollouts[0].slot) is not None)
        await office.until(lambda: awaited)
        assert stage.prefix(rollouts[1].slot) is None
        go_on.set()
        assert [receipt.outcome for receipt in await handing] == ["TURN_TAKEN", "TURN_TAKEN"]
        assert awaited[0].slots == tuple(rollout.slot for rollout in rollouts)
        check(office.core.state)


@pytest.mark.asyncio(loop_scope="session")
async def test_calls_that_nobody_waits_for_do_not_pile_up(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        _, node = await stage.office.swarm()
        honest = await joined(stage.office)
        lease, other = await node.lease(1), await honest.lease(1)
        rollout = turn(node, lease.slots[0], stage.said("4"))
        go_on = slow(stage, monkeypatch)
        for _ in range(MAX_CALLS_WAITING):
            with pytest.raises(UnreachableError):
                await submit_for(node, lease.lease_id, rollout, seconds=0.2)
        with pytest.raises(UnreachableError, match="wait for replies"):
            await submit_for(node, lease.lease_id, rollout, seconds=5.0)
        handing = asyncio.create_task(honest.outcome(other, turn(honest, other.slots[0], stage.said("4"))))
        go_on.set()
        assert await handing == "TURN_TAKEN"
        assert await node.outcome(lease, rollout) == "DUPLICATE"
