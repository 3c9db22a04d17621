"""Reward functions as the coordinator sees them: calls into the sandbox, and the weighted sum. Impure: a child process.

Invariant: each sample gets from each function one finite number, a None (the function leaves it out) or a fault. A
sample with a fault has no reward: it is missing, never 0. One that fails a whole batch is found by asking one by one.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

import structlog

from coordinator import grading
from coordinator.warm_child import WarmChild
from protocol.errors import EngineError, HexcombError

WORKER = "coordinator.reward_worker"
GRACE_S = 2.0
"""From a call's own time limit, which the function may have put out, to the end of its process."""

STOP_DEADLINE_S = 0.0
MAX_REWARD = 1e6


class Fault(Enum):
    """A value that could not be had."""

    FAULT = "fault"


FAULT: Final = Fault.FAULT
Value = float | None | Fault
ItemT = TypeVar("ItemT")
T = TypeVar("T")

log = structlog.get_logger()


def total(weights: Sequence[float], values: Sequence[Value]) -> float | None:
    """The weighted sum of one sample's values, those left out that are None; None = missing: where there is a fault, or
    nothing but None."""
    if any(value is FAULT for value in values):
        return None
    terms = [weight * value for weight, value in zip(weights, values, strict=True) if isinstance(value, float)]
    return math.fsum(terms) if terms else None


async def one_by_one(
    items: Sequence[ItemT], ask: Callable[[Sequence[ItemT]], Awaitable[Sequence[T]]], *, what: str
) -> list[T | Fault]:
    """The answer for each item: all at once, and where that fails, one at a time."""
    try:
        return list(await ask(items))
    except HexcombError as error:
        log.error(f"{what} could not be had", num_completions=len(items), why=error.sentence())
    if len(items) == 1:
        return [FAULT]
    return [answer for item in items for answer in await one_by_one([item], ask, what=what)]


class Rewards:
    """The functions of a plan, in one sandboxed process, which makes one call at a time."""

    def __init__(self, plan: grading.RewardPlan, *, run_dir: Path, log_path: Path) -> None:
        self._plan, self._turn = plan, asyncio.Lock()
        self.warm = WarmChild(
            WORKER,
            grading.OpenRewards(plan),
            grading.RewardsOpened,
            run_dir=run_dir,
            log_path=log_path,
            stop_deadline_s=STOP_DEADLINE_S,
            is_trusted=False,
        )

    async def start(self) -> None:
        """Imports the functions. Raises `UsageError` where one cannot be had."""
        await self.warm.ready()
        opened = self.warm.opened
        if opened is not None and opened.lacks:
            log.warning("the sandbox of the rewards is not whole on this machine", lacks=opened.lacks)
        log.info("rewards are ready", sandbox=opened.holds if opened is not None else ())

    async def close(self) -> None:
        """Ends the process."""
        await self.warm.close()

    async def values(self, number: int, samples: Sequence[grading.Sample]) -> list[Value]:
        """What function `number` says of each sample."""

        async def ask(some: Sequence[grading.Sample]) -> Sequence[Value]:
            return await self._call(number, some)

        return await one_by_one(samples, ask, what=f"the reward {self._plan.functions[number].function!r}")

    async def _call(self, number: int, samples: Sequence[grading.Sample]) -> list[Value]:
        async with self._turn:
            deadline_s = self._plan.timeout_s + GRACE_S
            answer = await self.warm.request(
                grading.Call(number, tuple(samples)), grading.Values, deadline_s=deadline_s
            )
        if len(answer.values) != len(samples):
            raise EngineError(f"the rewards' process gave {len(answer.values)} values for {len(samples)} completions")
        faults = set(answer.faults)
        return [FAULT if place in faults else _checked(value) for place, value in enumerate(answer.values)]


def _checked(value: float | None) -> Value:
    """The process may have been taken over by what it graded: its word is checked again."""
    return value if value is None or (math.isfinite(value) and abs(value) <= MAX_REWARD) else FAULT
