"""Held-out accuracy: the tasks, and what becomes of a trainer's greedy completions. Impure: asks the grader."""

from collections.abc import Sequence

from coordinator.authority import Authority
from coordinator.core.events import EvaluationScored
from coordinator.grader import Grader, PromptIds
from protocol.errors import RolloutMalformedError
from protocol.ids import TaskKey, Version


class Evaluations:
    """The same distinct held-out tasks for every version."""

    def __init__(self, authority: Authority, grader: Grader, *, num_tasks: int) -> None:
        self._authority, self._grader, self._num_tasks = authority, grader, num_tasks
        self._prompts: list[tuple[TaskKey, PromptIds]] = []

    async def prompts(self) -> list[tuple[TaskKey, PromptIds]]:
        """The held-out tasks with their prompts."""
        if not self._prompts:
            self._prompts = await self._grader.held_out(self._num_tasks)
        return self._prompts

    async def take(self, version: Version, completions: Sequence[tuple[TaskKey, PromptIds]]) -> None:
        """Scores a trainer's completions. Raises `RolloutMalformedError` unless there is one for each task."""
        asked = [key for key, _ in await self.prompts()]
        if [key for key, _ in completions] != asked:
            raise RolloutMalformedError("the evaluation was refused", why="it does not answer the held-out tasks")
        rewards = [reward or 0.0 for reward in await self._grader.scores(completions)]
        await self._authority.submit(EvaluationScored(version, len(rewards), sum(rewards) / len(rewards)))
