"""Accepted rollouts on their way through the grader: nobody waits for it, and what ended meanwhile is passed over."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from coordinator.core.events import Event, RolloutScored
from coordinator.core.state import Group, Slot, State
from coordinator.scoring import Scoring
from protocol.errors import JournalError
from protocol.ids import SlotKey, TaskKey, Version
from protocol.v1 import control_pb2

DEADLINE_S = 10.0


class Desk:
    """Stands for the authority, the core, the journal and the grader. `bodies` are in the journal."""

    def __init__(self, num_groups: int) -> None:
        self.core = self
        self.state = State()
        for index in range(num_groups):
            self.state.groups[index] = Group(TaskKey("sums", 7, index), Version(0), [Slot("accepted")])
        self.slots = [group.key(0) for group in self.state.groups.values()]
        self.bodies = set(self.slots)
        self.ends_while_read: list[SlotKey] = []
        self.may_grade, self.scored = asyncio.Event(), list[RolloutScored]()
        self.scoring = Scoring(cast(Any, self), cast(Any, self))

    def end(self, slot: SlotKey) -> None:
        del self.state.groups[slot.task.index]
        self.bodies.discard(slot)

    async def rollout_bodies(self, slots: Sequence[SlotKey]) -> list[bytes]:
        while self.ends_while_read:
            self.end(self.ends_while_read.pop())
        if not self.bodies.issuperset(slots):
            raise JournalError("a rollout is not in the journal")
        return [control_pb2.Rollout().SerializeToString()] * len(slots)

    async def scores(self, pairs: Sequence[object]) -> tuple[float, ...]:
        await self.may_grade.wait()
        return (1.0,) * len(pairs)

    async def submit_all(self, wishes: Sequence[tuple[Event, Any]]) -> None:
        self.scored += [event for event, _ in wishes if isinstance(event, RolloutScored)]

    async def run_until_scored(self, num_slots: int) -> None:
        task = asyncio.create_task(self.scoring.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while len(self.scored) < num_slots and not task.done():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.005)
        finally:
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(outcome, asyncio.CancelledError):
            raise cast(BaseException, outcome)


async def test_who_adds_never_waits_for_the_grader() -> None:
    desk = Desk(1)
    for _ in range(70_000):
        desk.scoring.add(desk.slots[0])
    assert desk.scoring._waiting.qsize() == 70_000


async def test_each_slot_is_scored_unless_its_group_ended() -> None:
    desk = Desk(5)
    desk.may_grade.set()
    for slot in desk.slots:
        desk.scoring.add(slot)
    desk.end(desk.slots[0])
    desk.ends_while_read = [desk.slots[3]]
    await desk.run_until_scored(3)
    assert [event.slot for event in desk.scored] == [desk.slots[n] for n in (1, 2, 4)]


async def test_a_rollout_that_is_waited_for_and_missing_is_damage() -> None:
    desk = Desk(2)
    desk.bodies.discard(desk.slots[1])
    for slot in desk.slots:
        desk.scoring.add(slot)
    with pytest.raises(ExceptionGroup) as caught:
        await desk.run_until_scored(2)
    assert caught.group_contains(JournalError)
