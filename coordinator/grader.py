"""The coordinator's side of the grading child: prompts and rewards on request, whatever happens to the child.

Invariant: each completion handed in gets exactly one answer, and an answer that could not be had is None (missing).
The child is started again when it dies or hangs. A batch on which that happened is asked for again one by one, so that
a completion which kills the grader takes no other with it. Impure: a child process.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from coordinator import grading
from protocol.child import ChildProcess
from protocol.errors import EngineError, HexcombError, UnreachableError
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec

WORKER = "coordinator.grader_worker"
START_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 60.0
ONE_DEADLINE_S = 15.0
"""For a single task or completion: three times what the child itself allows."""

STOP_DEADLINE_S = 2.0
MAX_BATCH = 64
MAX_CACHED_PROMPTS = 65_536
REMEMBER_S = 10.0
"""For so long a prompt that could not be made is not asked for again: whoever asked may have given up waiting."""

PromptIds = tuple[int, ...]
Pair = tuple[TaskKey, PromptIds]
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
T = TypeVar("T")

log = structlog.get_logger()


def _wire(keys: Sequence[TaskKey]) -> tuple[tuple[str, int, int], ...]:
    return tuple((key.environment, key.seed, key.index) for key in keys)


class Grader:
    """One grading child; use as `async with Grader(...)`. Prompts are cached, since each is asked for three times."""

    def __init__(
        self,
        environment: EnvironmentSpec,
        *,
        model_dir: Path,
        run_dir: Path,
        log_path: Path,
        worker: str = WORKER,
        deadline_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self._open = grading.Open(environment, str(model_dir))
        self._run_dir, self._log_path, self._worker, self._deadline_s = run_dir, log_path, worker, deadline_s
        self._child: ChildProcess | None = None
        self._starting = asyncio.Lock()
        self._prompts: OrderedDict[TaskKey, PromptIds] = OrderedDict()
        self._failures: dict[TaskKey, tuple[HexcombError, float]] = {}
        self._making: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Grader":
        await _once_more(self._ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._making:
            task.cancel()
        if self._child is not None:
            await self._child.terminate(deadline_s=STOP_DEADLINE_S)

    async def prompts(self, keys: Sequence[TaskKey]) -> tuple[PromptIds, ...]:
        """The canonical prompt of each task. Raises `EngineError` or `UnreachableError` when they cannot be had, and
        `UsageError` for a task that the environment does not have."""
        found = {key: self._prompts[key] for key in keys if key in self._prompts}
        unknown = [key for key in dict.fromkeys(keys) if key not in found]
        if unknown:
            made = await self._ask(grading.MakePrompts(_wire(unknown)), grading.Prompts)
            found.update(zip(unknown, made.prompt_ids, strict=True))
            self._prompts.update(found)
        while len(self._prompts) > MAX_CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return tuple(found[key] for key in keys)

    async def try_prompts(self, keys: Sequence[TaskKey]) -> dict[TaskKey, PromptIds | HexcombError]:
        """The canonical prompt of each task, or why it cannot be made; a task that ends the child takes no other with
        it. Goes on after a caller that does not wait. Raises `EngineError` or `UnreachableError` when no child can be
        started."""
        now_s = asyncio.get_running_loop().time()
        self._failures = {key: failed for key, failed in self._failures.items() if failed[1] > now_s}
        unknown = [key for key in dict.fromkeys(keys) if key not in self._prompts and key not in self._failures]
        if unknown:
            making = asyncio.ensure_future(self._make(unknown))
            self._making.add(making)
            making.add_done_callback(self._making.discard)
            await asyncio.shield(making)
        failures = {key: self._failures[key][0] for key in keys if key in self._failures}
        good = [key for key in dict.fromkeys(keys) if key not in failures]
        return dict(zip(good, await self.prompts(good), strict=True)) | failures

    async def _make(self, keys: Sequence[TaskKey]) -> None:
        """Gets prompts into the cache, or failures into their place: all at once, else one by one."""
        for start in range(0, len(keys), MAX_BATCH):
            await self._make_some(keys[start : start + MAX_BATCH])

    async def _make_some(self, keys: Sequence[TaskKey]) -> None:
        try:
            await self.prompts(keys)
        except HexcombError as error:
            await self._ready()  # with no child to be had it is not the tasks' fault
            if len(keys) == 1:
                self._failures[keys[0]] = (error, asyncio.get_running_loop().time() + REMEMBER_S)
                return
            log.error("prompts were not made", num_tasks=len(keys), why=error.sentence())
            for key in keys:
                await self._make_some([key])

    async def held_out(self, limit: int) -> list[Pair]:
        """At most `limit` held-out tasks with their prompts. Raises as `prompts` does."""
        made = await _once_more(lambda: self._ask(grading.HeldOut(limit), grading.Prompts))
        return [(TaskKey(*task), ids) for task, ids in zip(made.tasks, made.prompt_ids, strict=True)]

    async def scores(self, pairs: Sequence[Pair]) -> tuple[float | None, ...]:
        """The reward of each completion, in order; None where it could not be had."""
        rewards: list[float | None] = []
        for start in range(0, len(pairs), MAX_BATCH):
            rewards += await self._scores(pairs[start : start + MAX_BATCH])
        return tuple(rewards)

    async def _scores(self, pairs: Sequence[Pair]) -> Sequence[float | None]:
        request = grading.Score(_wire([key for key, _ in pairs]), tuple(ids for _, ids in pairs))
        try:
            return (await self._ask(request, grading.Scores)).rewards
        except HexcombError as error:
            log.error("a batch was not graded", num_completions=len(pairs), why=error.sentence())
        if len(pairs) == 1:
            return [None]
        return [reward for pair in pairs for reward in await self._scores([pair])]

    async def _ask(self, request: grading.Request, reply: type[ReplyT]) -> ReplyT:
        """The child's answer; a child that hangs is ended, so that the next request meets a new one."""
        child = await self._ready()
        is_one = isinstance(request, grading.Score | grading.MakePrompts) and len(request.tasks) == 1
        deadline_s = min(self._deadline_s, ONE_DEADLINE_S) if is_one else self._deadline_s
        try:
            return await child.request(request, reply, deadline_s=deadline_s)
        except UnreachableError:
            await child.terminate(deadline_s=STOP_DEADLINE_S)
            raise

    async def _ready(self) -> ChildProcess:
        async with self._starting:
            if self._child is None or self._child.is_closed:
                self._child = await self._start()
            return self._child

    async def _start(self) -> ChildProcess:
        child = await ChildProcess.start(
            self._worker, run_dir=self._run_dir, log_path=self._log_path, deadline_s=START_DEADLINE_S
        )
        try:
            await child.request(self._open, grading.Opened, deadline_s=START_DEADLINE_S)
        except BaseException:
            await child.terminate(deadline_s=STOP_DEADLINE_S)
            raise
        return child


async def _once_more(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again where the child was lost: what needs an answer when the coordinator starts must not hang on one."""
    try:
        return await ask()
    except (EngineError, UnreachableError) as error:
        log.error("the grader was lost, asking once more", why=error.sentence())
        return await ask()
