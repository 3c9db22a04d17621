"""Keeps to the owner's limits: looks at the machine every few seconds and says whether the node may work. Impure.

The decision is `limits.may_work`, what it goes by comes from `surroundings`; this only samples, in a thread, and writes
the answer into the node's state, from where planner, work and heartbeat take it. Invariants: with limits no work begins
before the first look; every change of the answer is logged with its reason; a look that hangs stops nothing else.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime

import structlog

from node.limits import Facts, Limits, may_work, not_available
from node.state import NodeState
from node.surroundings import Surroundings, own_memory_bytes
from protocol.errors import HexcombError

LOOK_EVERY_S = 3.0
LOOK_DEADLINE_S = 20.0
NOT_LOOKED = "its owner's limits are being looked at"
HANGING = "the machine did not say how it is within 20 s"

log = structlog.get_logger("owner")


class OwnerWatch:
    """Writes `state.limited`, `state.not_available` and `state.memory_trouble`; `on_change` is called after each
    change."""

    def __init__(
        self,
        state: NodeState,
        surroundings: Surroundings,
        *,
        memory_bytes: int = 0,
        on_change: Callable[[], None],
        now: Callable[[], datetime] = datetime.now,
        own_memory: Callable[[], int] = own_memory_bytes,
        every_s: float = LOOK_EVERY_S,
        look_deadline_s: float = LOOK_DEADLINE_S,
    ) -> None:
        self._state, self._surroundings, self._memory_bytes = state, surroundings, memory_bytes
        self._on_change, self._now, self._own_memory = on_change, now, own_memory
        self._every_s, self._look_deadline_s = every_s, look_deadline_s
        self._looking: asyncio.Task[tuple[Facts, int]] | None = None
        if self._limits.is_any:
            state.limited = NOT_LOOKED

    @property
    def _limits(self) -> Limits:
        return self._surroundings.limits

    async def run(self) -> None:
        """Until cancelled; without limits there is nothing to do."""
        if not self._limits.is_any and not self._memory_bytes:
            return
        try:
            while True:
                self._note(*await self._look())
                await asyncio.sleep(self._every_s)
        finally:
            await self._leave()

    async def _look(self) -> tuple[Facts, int]:
        """What is so now; while a look hangs no second one is begun."""
        if self._looking is None:
            self._looking = asyncio.create_task(asyncio.to_thread(self._look_now))
        await asyncio.wait({self._looking}, timeout=self._look_deadline_s)
        if not self._looking.done():
            return Facts(has_gpu=True, gpu_trouble=HANGING, power_trouble=HANGING), 0
        done, self._looking = self._looking, None
        return done.result()

    def _look_now(self) -> tuple[Facts, int]:
        return self._surroundings.look(), self._own_memory() if self._memory_bytes else 0

    def _note(self, facts: Facts, memory_bytes: int) -> None:
        state = self._state
        _, reason = may_work(self._limits, facts, self._now())
        missing = not_available(self._limits, facts)
        before = (bool(state.limited), state.not_available, state.memory_trouble)
        was_limited, state.limited, state.not_available = state.limited, reason, missing
        is_over = 0 < self._memory_bytes < memory_bytes
        words = f"{_gb(memory_bytes)} of memory are in use, its owner allows {_gb(self._memory_bytes)}"
        state.memory_trouble = words if is_over else ""
        if missing != before[1]:
            for what in missing:
                log.warning("limit not available", limit=what)
        if bool(reason) != before[0] or was_limited == NOT_LOOKED:
            log.info("work is held back" if reason else "work is allowed", why=reason or "within its owner's limits")
        if (bool(reason), missing, state.memory_trouble) != before:
            self._on_change()
        if was_limited != reason or (missing, state.memory_trouble) != before[1:]:
            state.changed()

    async def _leave(self) -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(self._surroundings.leave), self._look_deadline_s)
        except (HexcombError, TimeoutError) as error:
            log.warning("power cap not given back", why=str(error))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
