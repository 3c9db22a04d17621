"""Tasks of several turns: the calculator of docs/tasks.md, nodes that die in the middle, nodes that forge replies."""

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.books import check
from coordinator.core.events import PrefixLost, RolloutSubmitted
from coordinator.grading import Conversation
from coordinator.replay import prove
from node.slot_orders import prefix_trouble
from node.tokenizer import END
from protocol.errors import EngineError, UnreachableError, UsageError
from protocol.ids import SlotKey, TaskKey, Version
from protocol.rollout import Piece, Rollout, pack_ids, sign_piece
from protocol.v1 import control_pb2
from protocol.wire import rollout_message
from tests.coordinator.conversation import again, joined, on_stage, turn, write_folder
from tests.coordinator.office import typed

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An organizer's folder."""
    return write_folder(tmp_path)


async def test_two_turns_go_over_two_nodes_and_are_scored_and_trained_on(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    async with on_stage(folder, make_home) as stage:
        office = stage.office
        trainer, first = await office.swarm()
        second = await joined(office)
        lease = await first.lease(4)
        work = lease.slots[0]
        call, value, answer = stage.answer(work.prompt_ids)
        assert await first.outcome(lease, turn(first, work, stage.said(call))) == "TURN_TAKEN"
        check(office.core.state)
        assert await first.outcome(lease, turn(first, work, stage.said(call))) == "DUPLICATE"

        lease_2, work_2 = await again(first, work.slot)
        said, reply = work_2.pieces
        assert (said.node, said.token_ids) == (first.identity.peer_id, stage.said(call))
        assert (reply.node, reply.start, reply.version) == (office.home.identity.peer_id, len(said.token_ids), 0)
        assert not reply.is_sampled
        assert reply.token_ids == stage.tokenizer.encode(f"\n[tool]{value}{END}\n[assistant]")
        assert prefix_trouble(work_2.pieces, office.core.rules.spec.sampling) == ""

        at = len(said.token_ids) + len(reply.token_ids)
        begun = stage.tokenizer.encode(answer[:1])
        await first.stream(lease_2.lease_id, work.slot, *first.pieces(work.slot, begun, start=at))
        await office.until(lambda: (work.slot.task.index, work.slot.sample) in office.core.soft.progress)
        await first.vanish()

        lease_3, work_3 = await again(second, work.slot)
        assert work_3.pieces[:2] == work_2.pieces
        assert work_3.pieces[2].token_ids == begun
        rest = stage.said(answer[1:])
        assert await second.outcome(lease_3, turn(second, work_3, rest)) == "ACCEPTED"
        slot = office.core.state.find(work.slot)
        await office.until(lambda: slot.status == "scored")
        assert slot.reward == 1.0
        assert slot.given == ((len(said.token_ids), len(reply.token_ids)),)
        assert slot.sampled == ((0, len(said.token_ids) + len(begun) + len(rest)),)

        trainer.load(*office.head)
        for other in [other for other in lease_3.slots if other.slot != work.slot]:
            assert await second.outcome(lease_3, turn(second, other, stage.said("1"))) == "ACCEPTED"
        await office.until(lambda: office.core.state.round)
        samples = {s.slot: s for s in await trainer.control.fetch_batch(office.core.state.round.round_id)}
        sample = samples[str(work.slot)]
        stop = len(said.token_ids) + len(reply.token_ids)
        live = [True] * len(said.token_ids) + [False] * len(reply.token_ids) + [True] * (len(begun) + len(rest))
        assert list(sample.mask) == live
        assert sample.logprobs == tuple(-0.5 if alive else 0.0 for alive in live)
        assert sample.completion_ids[len(said.token_ids) : stop] == reply.token_ids
        assert office.core.state.batch.num_tokens == sum(sum(item.mask) for item in samples.values())
        check(office.core.state)
        await office.until(lambda: prove(office.home.journal)[0].state == office.core.state)


async def test_no_node_can_speak_for_the_environment(folder: Path, make_home: Callable[[], Path]) -> None:
    async with on_stage(folder, make_home) as stage:
        office = stage.office
        _, node = await office.swarm()
        lease = await node.lease(4)
        work, other = lease.slots[:2]
        call, _, answer = stage.answer(work.prompt_ids)
        assert await node.outcome(lease, turn(node, work, stage.said(call))) == "TURN_TAKEN"
        lease_2, work_2 = await again(node, work.slot)
        said, reply = work_2.pieces

        def signed(piece: Piece, slot: SlotKey) -> Piece:
            return sign_piece(node.identity, run_id=office.home.run_id, slot=slot, piece=piece)

        def ended(slot: SlotKey, *pieces: Piece) -> Rollout:
            start = sum(len(piece.token_ids) for piece in pieces)
            return Rollout(slot, (*pieces, *node.pieces(slot, stage.said(answer), start=start)), "stop")

        def sampled(token_ids: tuple[int, ...], start: int) -> Piece:
            return node.pieces(work.slot, token_ids, start=start)[0]

        at = len(said.token_ids) + len(reply.token_ids)
        own = dataclasses.replace(reply, node=node.identity.peer_id, signature=b"")
        once_more = signed(dataclasses.replace(own, start=at + 2), work.slot)
        others_said = node.pieces(other.slot, said.token_ids)[0]
        before = office.state()
        forged = {
            "its own": (ended(work.slot, said, signed(own, work.slot)), lease_2),
            "its own after the coordinator's": (
                ended(work.slot, said, reply, sampled(stage.said("1"), at), once_more),
                lease_2,
            ),
            "in the coordinator's name": (ended(work.slot, said, signed(reply, work.slot)), lease_2),
            "with other tokens": (ended(work.slot, said, dataclasses.replace(reply, token_ids=(9,) * 4)), lease_2),
            "of another slot": (ended(other.slot, others_said, reply), lease),
            "as sampled": (ended(work.slot, said, sampled(reply.token_ids, reply.start)), lease_2),
            "left out": (ended(work.slot, said), lease_2),
        }
        outcomes = {name: await node.outcome(under, rollout) for name, (rollout, under) in forged.items()}
        unsigned = ("in the coordinator's name", "with other tokens", "of another slot")
        expected = {name: "UNAUTHENTICATED" if name in unsigned else "ROLLOUT_MALFORMED" for name in forged}
        assert outcomes == expected
        refused = office.coordinator.authority.refusals["ROLLOUT_MALFORMED"]
        await node.stream(lease_2.lease_id, work.slot, signed(dataclasses.replace(own, start=at), work.slot))
        assert office.coordinator.authority.refusals["ROLLOUT_MALFORMED"] == refused + 1
        assert office.state() == before

        await node.control.return_lease(lease_2.lease_id, reason="a test")
        await node.control.return_lease(lease.lease_id, reason="a test")
        await office.coordinator.authority.submit(PrefixLost(work.slot, "a test"))
        lease_3, work_3 = await again(node, work.slot)
        assert work_3.pieces == ()  # the genuine reply, of a conversation that the slot no longer goes on from
        assert await node.outcome(lease_3, ended(work.slot, said, reply)) == "ROLLOUT_MALFORMED"
        assert await node.outcome(lease_3, turn(node, work_3, stage.said(answer))) == "ACCEPTED"


async def test_an_environment_that_fails_costs_its_slot_alone(folder: Path, make_home: Callable[[], Path]) -> None:
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        office = stage.office
        _, node = await office.swarm()
        reasons = {"7": "KeyError: 'no such tool'", "9": "gave int", "6": "makes no token", "3": "child was lost"}
        for said, why in reasons.items():
            lease = await node.lease(1)
            receipts = await node.control.submit(lease.lease_id, [turn(node, lease.slots[0], stage.said(said))])
            assert [receipt.outcome for receipt in receipts] == ["SLOT_FAILED"]
            letter = office.core.state.dead_letters[-1]
            assert letter.slot == lease.slots[0].slot
            assert why in letter.reason
            assert lease.lease_id not in office.core.state.leases
        check(office.core.state)
        lease = await node.lease(1)
        assert await node.outcome(lease, turn(node, lease.slots[0], stage.said("1"))) == "ACCEPTED"
        assert office.core.state.nodes[node.identity.peer_id].failure == 0.0


async def test_a_reply_that_hangs_ends_in_time(folder: Path, make_home: Callable[[], Path]) -> None:
    async with on_stage(folder, make_home, module="broken_tools") as stage:
        _, node = await stage.office.swarm()
        lease = await node.lease(2)
        first, second = lease.slots
        receipts = await node.control.submit(
            lease.lease_id, [turn(node, first, stage.said("8")), turn(node, second, stage.said("1"))]
        )
        assert [receipt.outcome for receipt in receipts] == ["SLOT_FAILED", "ACCEPTED"]
        assert "longer than 5 s" in stage.office.core.state.dead_letters[-1].reason


@pytest.mark.parametrize(("said", "sampling"), [("4", {"max_turns": 2}), ("5", {}), ("4", {"max_turns": 1})])
async def test_a_conversation_ends_where_its_turns_or_its_room_do(
    folder: Path, make_home: Callable[[], Path], said: str, sampling: dict[str, int]
) -> None:
    """The environment would reply to `4` for ever, and to `5` with more than there is room for."""
    async with on_stage(folder, make_home, module="broken_tools", **sampling) as stage:
        office = stage.office
        _, node = await office.swarm()
        lease = await node.lease(1)
        work = lease.slots[0]
        num_replies = sampling.get("max_turns", 1) - 1
        for _ in range(num_replies):
            assert await node.outcome(lease, turn(node, work, stage.said(said))) == "TURN_TAKEN"
            lease, work = await again(node, work.slot)
        assert await node.outcome(lease, turn(node, work, stage.said(said))) == "ACCEPTED"
        slot = office.core.state.find(work.slot)
        await office.until(lambda: slot.status in ("scored", "failed"))
        assert len(slot.given) == num_replies
        assert slot.status == ("failed" if num_replies else "scored")  # three messages are no score, and one is


async def test_a_turn_outlives_the_coordinator_and_is_there_once(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when the turn is taken; and, of another slot, when the reply is in the file and the core never heard."""
    async with on_stage(folder, make_home) as stage:
        office = stage.office
        _, node = await office.swarm()
        lease = await node.lease(2)
        taken, unheard = lease.slots
        calls = {work.slot: stage.answer(work.prompt_ids) for work in lease.slots}
        turns = {work.slot: turn(node, work, stage.said(calls[work.slot][0])) for work in lease.slots}
        assert await node.outcome(lease, turns[taken.slot]) == "TURN_TAKEN"
        submit_all = office.coordinator.authority.submit_all

        async def lose(wishes: Any) -> Any:
            if any(isinstance(event, RolloutSubmitted) and event.reply is not None for event, _ in wishes):
                raise UsageError("it died here")
            return await submit_all(wishes)

        monkeypatch.setattr(office.coordinator.authority, "submit_all", lose)
        with pytest.raises(UsageError):
            await node.control.submit(lease.lease_id, [turns[unheard.slot]])
        left = make_home()
        ignored = shutil.ignore_patterns("*.sock", "addresses.json")  # this one still has its ports
        shutil.copytree(office.home.path, left, dirs_exist_ok=True, ignore=ignored)  # what a kill would leave
        async with on_stage(folder, make_home, on=left) as stage:
            office = stage.office
            node.follow(office)
            await node.hello()
            assert await node.outcome(lease, turns[taken.slot]) == "DUPLICATE"
            await office.until(lambda: (unheard.slot.task.index, unheard.slot.sample) in office.core.soft.progress)
            assert await node.outcome(lease, turns[unheard.slot]) == "TURN_TAKEN"
            more = await node.lease(8)
            found = {work.slot: work for work in more.slots if work.slot in calls}
            assert set(found) == set(calls)
            for slot, work in found.items():
                _, value, answer = calls[slot]
                assert [piece.is_sampled for piece in work.pieces] == [True, False]
                assert stage.tokenizer.decode(work.pieces[1].token_ids) == f"\n[tool]{value}\n[assistant]"
                assert await node.outcome(more, turn(node, work, stage.said(answer))) == "ACCEPTED"
                await office.until(lambda slot=slot: office.core.state.find(slot).reward == 1.0)
            check(office.core.state)
            await office.until(lambda: prove(office.home.journal)[0].state == office.core.state)


async def test_a_turn_that_only_the_file_has_moves_on_with_its_reply(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    """The reply is in the file, the core hears of it as of pieces, and the node is lost before it asks again."""
    async with on_stage(folder, make_home) as stage:
        office = stage.office
        _, first = await office.swarm()
        second = await joined(office)
        lease = await first.lease(1)
        work = lease.slots[0]
        call, value, answer = stage.answer(work.prompt_ids)
        rollout = turn(first, work, stage.said(call))
        data = pack_ids(stage.tokenizer.encode(f"\n[tool]{value}{END}\n[assistant]")), b""
        at = len(rollout.token_ids)
        reply = Piece.of_data(office.home.identity.peer_id, Version(0), at, data, b"")
        reply = sign_piece(office.home.identity, run_id=office.home.run_id, slot=work.slot, piece=reply)
        office.coordinator.pieces.keep(work.slot, lease.lease_id, (*rollout.pieces, reply))
        await office.until(lambda: (work.slot.task.index, work.slot.sample) in office.core.soft.progress)
        await first.vanish()
        lease_2, work_2 = await again(second, work.slot)
        assert work_2.pieces == (*rollout.pieces, reply)
        assert stage.prefix(work.slot).given == ((at, len(reply.token_ids)),)
        assert await second.outcome(lease_2, turn(second, work_2, stage.said(answer))) == "ACCEPTED"
        assert office.core.state.find(work.slot).given == ((at, len(reply.token_ids)),)
        await office.until(lambda: office.core.state.find(work.slot).reward == 1.0)


async def test_an_environment_that_says_another_thing_than_before_is_not_believed(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    async with on_stage(folder, make_home) as stage:
        key = TaskKey("make", 7, 0)
        (prompt_ids,) = await stage.grader.prompts([key])
        call, value, answer = stage.answer(prompt_ids)
        said, told = stage.said(call), stage.tokenizer.encode(f"\n[tool]{value}{END}\n[assistant]")
        other = stage.tokenizer.encode(f"\n[tool]{value}0{END}\n[assistant]")
        rest = stage.said(answer)
        kept = Conversation((*said, *told, *rest), ((len(said), len(told)),))
        changed = Conversation((*said, *other, *rest), ((len(said), len(other)),))
        assert await stage.grader.scores([(key, kept), (key, changed)]) == (1.0, None)
        first, *others = await stage.grader.replies([(key, kept), (key, changed), (key, said)])
        assert first is None
        assert isinstance(others[0], str)
        assert others[1] == told


async def test_held_out_tasks_cannot_be_completed_by_trainers(folder: Path, make_home: Callable[[], Path]) -> None:
    with pytest.raises(UsageError, match="cannot be used with this environment"):
        async with on_stage(folder, make_home, evaluation={"every": 1}):
            pass


async def test_turns_need_no_pieces_on_their_way(folder: Path, make_home: Callable[[], Path]) -> None:
    async with on_stage(folder, make_home, limits={"piece_tokens": 0}) as stage:
        _, node = await stage.office.swarm()
        lease = await node.lease(1)
        work = lease.slots[0]
        call, _, answer = stage.answer(work.prompt_ids)
        assert await node.outcome(lease, turn(node, work, stage.said(call))) == "TURN_TAKEN"
        lease, work = await again(node, work.slot)
        assert await node.outcome(lease, turn(node, work, stage.said(answer))) == "ACCEPTED"


async def test_a_node_that_gives_up_waiting_finds_its_turn_taken(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(folder, make_home) as stage:
        _, node = await stage.office.swarm()
        lease = await node.lease(1)
        rollout = turn(node, lease.slots[0], stage.said(stage.answer(lease.slots[0].prompt_ids)[0]))
        slow, replies, asked = asyncio.Event(), stage.grader.replies, list[int]()

        async def reply(said: Any) -> Any:
            asked.append(len(said))
            await slow.wait()
            return await replies(said)

        monkeypatch.setattr(stage.grader, "replies", reply)
        request = control_pb2.SubmitRolloutsRequest(lease_id=lease.lease_id, rollouts=[rollout_message(rollout)])
        with pytest.raises(UnreachableError):
            await typed(node.control.stub.SubmitRollouts(request, timeout=0.5))
        assert asked == [1]
        trying = asyncio.create_task(node.outcome(lease, rollout))
        await asyncio.sleep(0)
        slow.set()
        assert await trying == "DUPLICATE"
        assert asked == [1]


async def test_with_nobody_to_ask_a_turn_waits(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(folder, make_home) as stage:
        _, node = await stage.office.swarm()
        lease = await node.lease(1)
        rollout = turn(node, lease.slots[0], stage.said(stage.answer(lease.slots[0].prompt_ids)[0]))

        async def gone(said: Any) -> Any:
            raise EngineError("the grader does not start")

        with monkeypatch.context() as patch:
            patch.setattr(stage.grader, "replies", gone)
            before = stage.office.state()
            with pytest.raises(UnreachableError, match="does not start"):
                await node.control.submit(lease.lease_id, [rollout])
            assert stage.office.state() == before
        assert await node.outcome(lease, rollout) == "TURN_TAKEN"


async def test_a_template_without_tools_ends_the_start(folder: Path, make_home: Callable[[], Path]) -> None:
    (folder / "base" / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UsageError, match="tool's message"):
        async with on_stage(folder, make_home):
            pass
