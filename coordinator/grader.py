"""The coordinator's side of the grading child: prompts and rewards on request, whatever happens to the child.

Invariant: each completion handed in gets exactly one answer, and an answer that could not be had is None (missing).
The child is started again when it dies or hangs; a child that dies on the same batch twice makes that batch missing.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from coordinator import grading
from protocol.child import ChildProcess
from protocol.errors import EngineError, UnreachableError
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec

START_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 60.0
MAX_CACHED_PROMPTS = 65_536

PromptIds = tuple[int, ...]


def _wire(keys: Sequence[TaskKey]) -> tuple[tuple[str, int, int], ...]:
    return tuple((key.environment, key.seed, key.index) for key in keys)


class Grader:
    """One grading child; use as `async with Grader(...)`. Prompts are cached, since each is asked for three times."""

    def __init__(self, environment: EnvironmentSpec, *, model_dir: Path, run_dir: Path, log_path: Path) -> None:
        self._open = grading.Open(environment, str(model_dir))
        self._run_dir, self._log_path = run_dir, log_path
        self._child: ChildProcess | None = None
        self._starting = asyncio.Lock()
        self._prompts: OrderedDict[TaskKey, PromptIds] = OrderedDict()

    async def __aenter__(self) -> "Grader":
        await self._ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await self._child.terminate()

    async def prompts(self, keys: Sequence[TaskKey]) -> tuple[PromptIds, ...]:
        """The canonical prompt of each task. Raises `EngineError` when the environment cannot make one."""
        unknown = [key for key in dict.fromkeys(keys) if key not in self._prompts]
        if unknown:
            child = await self._ready()
            request = grading.MakePrompts(_wire(unknown))
            made = await child.request(request, grading.Prompts, deadline_s=ANSWER_DEADLINE_S)
            self._prompts.update(zip(unknown, made.prompt_ids, strict=True))
        found = tuple(self._prompts[key] for key in keys)
        while len(self._prompts) > MAX_CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return found

    async def held_out(self, limit: int) -> list[tuple[TaskKey, PromptIds]]:
        """At most `limit` held-out tasks with their prompts."""
        child = await self._ready()
        made = await child.request(grading.HeldOut(limit), grading.Prompts, deadline_s=ANSWER_DEADLINE_S)
        return [(TaskKey(*task), ids) for task, ids in zip(made.tasks, made.prompt_ids, strict=True)]

    async def scores(self, pairs: Sequence[tuple[TaskKey, PromptIds]]) -> tuple[float | None, ...]:
        """The reward of each completion, in order; None where it could not be had."""
        request = grading.Score(_wire([key for key, _ in pairs]), tuple(ids for _, ids in pairs))
        for _ in range(2):
            child = await self._ready()
            try:
                scores = await child.request(request, grading.Scores, deadline_s=ANSWER_DEADLINE_S)
                return scores.rewards
            except UnreachableError:
                await child.terminate()
            except EngineError:
                if not child.is_closed:
                    break
        return (None,) * len(pairs)

    async def _ready(self) -> ChildProcess:
        async with self._starting:
            if self._child is None or self._child.is_closed:
                self._child = await ChildProcess.start(
                    "coordinator.grader_worker",
                    run_dir=self._run_dir,
                    log_path=self._log_path,
                    deadline_s=START_DEADLINE_S,
                )
                await self._child.request(self._open, grading.Opened, deadline_s=START_DEADLINE_S)
            return self._child
