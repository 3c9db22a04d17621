"""Accepted rollouts on their way through the grader, in batches. Impure: asyncio.

Invariant: each slot that is added comes back to the core as one `RolloutScored`; what is lost with the process is
asked for again by the core after a restart.
"""

import asyncio

from coordinator.authority import Authority
from coordinator.core.events import RolloutScored
from coordinator.grader import Grader
from protocol.ids import SlotKey
from protocol.wire import completion_in

MAX_WAITING = 65_536
MAX_BATCH = 64


class Scoring:
    """The queue, and the one task that empties it."""

    def __init__(self, authority: Authority, grader: Grader) -> None:
        self._authority, self._grader = authority, grader
        self._waiting: asyncio.Queue[SlotKey] = asyncio.Queue(MAX_WAITING)

    async def add(self, slot: SlotKey) -> None:
        """Waits while too many are under way already."""
        await self._waiting.put(slot)

    async def run(self) -> None:
        """Scores until cancelled."""
        while True:
            slots = [await self._waiting.get()]
            while len(slots) < MAX_BATCH and not self._waiting.empty():
                slots.append(self._waiting.get_nowait())
            bodies = await self._authority.rollout_bodies(slots)
            pairs = [(slot.task, completion_in(body)) for slot, body in zip(slots, bodies, strict=True)]
            rewards = await self._grader.scores(pairs)
            events = [RolloutScored(slot, reward) for slot, reward in zip(slots, rewards, strict=True)]
            await self._authority.submit_all([(event, ()) for event in events])
