"""A child process that is kept, and started again when it died or hung. Impure: a child process.

Invariant: a request meets a child that was opened, or the error that says why there is none; a child that does not
answer in time is ended, so that the next request meets a new one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import structlog

from protocol.child import ChildProcess
from protocol.errors import EngineError, UnreachableError

START_DEADLINE_S = 60.0
MAX_LOSSES = 4

OpenedT = TypeVar("OpenedT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
T = TypeVar("T")

log = structlog.get_logger()


class WarmChild(Generic[OpenedT]):
    """At most one process of the module `worker`. `opened` is the answer of the last that was started; `check` raises
    where that is not what it should be."""

    def __init__(
        self,
        worker: str,
        opening: msgspec.Struct,
        opened: type[OpenedT],
        *,
        run_dir: Path,
        log_path: Path,
        stop_deadline_s: float,
        is_trusted: bool = True,
        check: Callable[[OpenedT], None] = lambda opened: None,
    ) -> None:
        self.worker, self._opening, self._opened_type = worker, opening, opened
        self._run_dir, self._log_path, self._is_trusted = run_dir, log_path, is_trusted
        self._stop_deadline_s, self._check = stop_deadline_s, check
        self._starting = asyncio.Lock()
        self.child: ChildProcess | None = None
        self.opened: OpenedT | None = None

    async def ready(self) -> ChildProcess:
        """The child, a new one if need be. Raises the error that it ended with instead."""
        async with self._starting:
            if self.child is None or self.child.is_closed:
                self.child = await self._start()
            return self.child

    async def request(self, body: msgspec.Struct, reply: type[ReplyT], *, deadline_s: float) -> ReplyT:
        """The child's answer. Raises as `ChildProcess.request` does."""
        child = await self.ready()
        try:
            return await child.request(body, reply, deadline_s=deadline_s)
        except UnreachableError:
            await child.terminate(deadline_s=self._stop_deadline_s)
            raise

    async def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            await self.child.terminate(deadline_s=self._stop_deadline_s)

    async def _start(self) -> ChildProcess:
        child = await ChildProcess.start(
            self.worker,
            run_dir=self._run_dir,
            log_path=self._log_path,
            deadline_s=START_DEADLINE_S,
            is_trusted=self._is_trusted,
        )
        try:
            opened = await child.request(self._opening, self._opened_type, deadline_s=START_DEADLINE_S)
            self._check(opened)
            self.opened = opened
        except BaseException:
            await child.terminate(deadline_s=self._stop_deadline_s)
            raise
        return child


async def over_losses(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again where the child was lost: what needs an answer when the coordinator starts must not hang on one child.
    One that is lost `MAX_LOSSES` times is at fault itself, and its error is raised."""
    for number in range(1, MAX_LOSSES):
        try:
            return await ask()
        except (EngineError, UnreachableError) as error:
            log.error("the grader was lost, asking again", times=number, why=error.sentence())
    return await ask()
