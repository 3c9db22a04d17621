"""Between a grant and its answer: nobody holds a lease that nobody was told of, and no bad task holds up the others."""

import asyncio
import json
from typing import Any

import pytest

from coordinator import grader as grader_module
from coordinator.authority import Authority
from coordinator.core.events import WorkRequested
from coordinator.core.returns import MAX_TRIES
from coordinator.grader import Grader
from coordinator.grading import MakePrompts
from coordinator.page_client import http_get
from coordinator.warm_child import WarmChild
from coordinator.work_service import WorkService
from protocol.errors import (
    EngineError,
    RootMismatchError,
)
from protocol.ids import Digest, PeerId, Version
from protocol.v1 import control_pb2
from tests.coordinator.office import DEADLINE_S, Member, Office

pytestmark = pytest.mark.asyncio(loop_scope="session")


def without_prompts(patch: pytest.MonkeyPatch, grader: Grader, *, index: int | None = None) -> None:
    """The grader makes no prompt, or none of one task."""
    ask = Grader._ask

    async def make(self: Grader, request: Any, reply: Any) -> Any:
        if isinstance(request, MakePrompts) and (index is None or index in [task[2] for task in request.tasks]):
            raise EngineError("the prompts were not made", why="a test")
        return await ask(self, request, reply)

    patch.setattr(grader_module, "REMEMBER_S", 0.0)
    patch.setattr(Grader, "_ask", make)
    grader._prompts.clear()


async def test_nobody_holds_slots_whose_prompts_could_not_be_made(
    office: Office, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()
    with monkeypatch.context() as patch:
        without_prompts(patch, grader)
        with pytest.raises(EngineError, match="the prompt cannot be made"):
            await rollout.lease(2)
    assert office.core.books().open == 0
    assert [slot.num_tries for slot in office.core.state.groups[0].slots] == [1, 1]
    assert len((await rollout.lease(2)).slots) == 2


async def test_a_grader_that_is_away_speaks_against_no_slot(
    office: Office, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()

    async def fail(self: WarmChild[Any]) -> None:
        raise EngineError("the child does not start", why="a test")

    with monkeypatch.context() as patch:
        without_prompts(patch, grader)
        patch.setattr(WarmChild, "ready", fail)
        with pytest.raises(EngineError, match="does not start"):
            await rollout.lease(2)
    assert office.core.books().open == 0
    assert [slot.num_tries for slot in office.core.state.groups[0].slots] == [0, 0]
    assert office.core.state.nodes[rollout.identity.peer_id].failure == 0
    assert len((await rollout.lease(2)).slots) == 2


async def test_a_task_without_a_prompt_holds_up_no_other_and_ends_as_a_dead_letter(
    office: Office, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()
    state = office.core.state
    without_prompts(monkeypatch, grader, index=0)
    lease = await rollout.lease(4)
    assert [work.slot.task.index for work in lease.slots] == [1, 1]
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[0].slot)) == "ACCEPTED"
    assert lease.lease_id in state.leases
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[1].slot)) == "ACCEPTED"
    assert lease.lease_id not in state.leases
    assert [slot.num_tries for slot in state.groups[0].slots] == [1, 1]
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(EngineError, match="the prompt cannot be made"):
            await rollout.lease(2)
    assert [(letter.slot.task.index, letter.slot.sample) for letter in state.dead_letters] == [(0, 0), (0, 1)]
    assert "the prompt cannot be made" in state.dead_letters[0].reason
    assert {work.slot.task.index for work in (await rollout.lease(2)).slots} == {2}
    status = json.loads(await http_get(office.coordinator.addresses["status"] + "api/v1/status"))
    assert [letter["slot"] for letter in status["dead_letters"]] == [str(x.slot) for x in state.dead_letters]


async def asking_in_vain(office: Office, rollout: Member, has_come: asyncio.Event) -> None:
    """A wish for work whose node is gone when it has come so far."""
    version, root = office.head
    call = rollout.control.stub.LeaseWork(control_pb2.LeaseWorkRequest(version=version, root=root, num_slots=2))
    async with asyncio.timeout(DEADLINE_S):
        await has_come.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await office.until(lambda: office.core.state.claims["granted"] == 2)


async def nobody_holds_anything(office: Office) -> None:
    await office.until(lambda: office.core.state.claims["returned"] == 2)
    assert office.core.books().open == 0
    assert [slot.num_tries for slot in office.core.state.groups[0].slots] == [0, 0]


async def test_a_node_that_is_gone_before_it_is_answered_holds_nothing(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()
    has_come, is_gone, may_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    submit, lease = Authority.submit, WorkService.lease

    async def slow(self: Authority, event: Any, attachments: Any = ()) -> Any:
        if not isinstance(event, WorkRequested):
            return await submit(self, event, attachments)
        decided = asyncio.ensure_future(submit(self, event, attachments))
        has_come.set()
        await may_go.wait()
        return await decided

    async def watched(self: WorkService, peer_id: PeerId, request: control_pb2.LeaseWorkRequest) -> Any:
        try:
            return await lease(self, peer_id, request)
        except asyncio.CancelledError:
            is_gone.set()
            raise

    monkeypatch.setattr(Authority, "submit", slow)
    monkeypatch.setattr(WorkService, "lease", watched)
    await asking_in_vain(office, rollout, has_come)
    async with asyncio.timeout(DEADLINE_S):
        await is_gone.wait()
    may_go.set()
    await nobody_holds_anything(office)


async def test_a_node_that_is_gone_before_its_prompts_are_made_holds_nothing(
    office: Office, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()
    has_come, may_go, ask = asyncio.Event(), asyncio.Event(), Grader._ask

    async def slow(self: Grader, request: Any, reply: Any) -> Any:
        has_come.set()
        await may_go.wait()
        return await ask(self, request, reply)

    grader._prompts.clear()
    monkeypatch.setattr(Grader, "_ask", slow)
    await asking_in_vain(office, rollout, has_come)
    await nobody_holds_anything(office)
    may_go.set()
    await office.until(lambda: grader._prompts)  # they are made nevertheless, for the next


async def test_the_status_says_why_a_node_gets_no_work_until_it_gets_some(office: Office) -> None:
    _, rollout = await office.swarm()

    async def refusal() -> Any:
        status = json.loads(await http_get(office.coordinator.addresses["status"] + "api/v1/status"))
        return next(n["refused"] for n in status["nodes"] if n["peer_id"] == rollout.identity.peer_id)

    assert await refusal() is None
    with pytest.raises(RootMismatchError):
        await rollout.control.lease_work(version=Version(0), root=Digest("0" * 64), num_slots=1)
    async with asyncio.timeout(DEADLINE_S):
        while (said := await refusal()) is None:  # a report may be told for a moment
            pass
    assert (said["code"], "Fetch version 0" in said["sentence"]) == ("ROOT_MISMATCH", True)
    assert abs(said["at_ms"] - office.clock()) < 60_000
    await rollout.lease(1)
    async with asyncio.timeout(DEADLINE_S):
        while await refusal() is not None:
            pass
