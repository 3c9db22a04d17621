"""Accepted rollouts on their way through the grader, a few batches at once. Impure: asyncio.

Invariant: each slot that is added comes back to the core as one `RolloutScored`, unless its group ended meanwhile; what
is lost with the process is asked for again by the core after a restart.
"""

import asyncio

from coordinator.authority import Authority
from coordinator.core.events import RolloutScored
from coordinator.grader import Grader
from coordinator.grading import Completion, Conversation
from protocol.errors import JournalError
from protocol.ids import SlotKey
from protocol.wire import completion_in

MAX_BATCH = 64
AT_ONCE = 8
"""Batches on their way: while one is graded, others are read and written down."""


class Scoring:
    """The queue, and the tasks that empty it."""

    def __init__(self, authority: Authority, grader: Grader) -> None:
        self._authority, self._grader = authority, grader
        self._waiting: asyncio.Queue[SlotKey] = asyncio.Queue()

    def add(self, slot: SlotKey) -> None:
        """Never waits: who calls carries out all effects, and plans and cancels must not stand behind a slow grader.
        The queue needs no limit: a slot is asked for once, and the core opens no more than may be under way at once."""
        self._waiting.put_nowait(slot)

    async def run(self) -> None:
        """Scores until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._score_batches())

    async def _score_batches(self) -> None:
        while True:
            slots = [await self._waiting.get()]
            while len(slots) < MAX_BATCH and not self._waiting.empty():
                slots.append(self._waiting.get_nowait())
            slots, bodies = await self._read(slots)
            pairs = [(slot.task, _completion(body)) for slot, body in zip(slots, bodies, strict=True)]
            rewards = await self._grader.scores(pairs)
            events = [RolloutScored(slot, reward) for slot, reward in zip(slots, rewards, strict=True)]
            await self._authority.submit_all([(event, ()) for event in events])

    async def _read(self, slots: list[SlotKey]) -> tuple[list[SlotKey], list[bytes]]:
        """The slots that still wait for a reward, and what was handed in for them. A group that ends takes its bodies
        along, which may be while they are read. Raises `JournalError` where one is missing that is waited for."""
        while True:
            waited_for = [slot for slot in slots if self._is_waited_for(slot)]
            try:
                return waited_for, await self._authority.rollout_bodies(waited_for)
            except JournalError:
                if all(map(self._is_waited_for, waited_for)):
                    raise

    def _is_waited_for(self, key: SlotKey) -> bool:
        slot = self._authority.core.state.find(key)
        return slot is not None and slot.status == "accepted"


def _completion(body: bytes) -> Completion:
    token_ids, given = completion_in(body)
    return Conversation(token_ids, given) if given else token_ids
