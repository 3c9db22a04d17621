"""Held-out accuracy: the tasks, who was asked for them, and what becomes of the greedy completions. Impure: asks the
grader.

Invariant: only completions of the held-out tasks, within the sampling contract, from a trainer that was asked for that
version, reach the grader; one that the grader could not score is left out of the accuracy, never counted as wrong.
"""

from collections.abc import Sequence

from coordinator.authority import Authority
from coordinator.core.events import EvaluationScored
from coordinator.grader import Grader, PromptIds
from protocol.errors import EngineError, RolloutMalformedError, WorkRefusedError
from protocol.ids import PeerId, TaskKey, Version
from protocol.run import SamplingContract

WHAT = "the evaluation was refused"


class Evaluations:
    """The same distinct held-out tasks for every version."""

    def __init__(self, authority: Authority, grader: Grader, *, num_tasks: int) -> None:
        self._authority, self._grader, self._num_tasks = authority, grader, num_tasks
        self._prompts: list[tuple[TaskKey, PromptIds]] = []
        self._asked: dict[Version, set[PeerId]] = {}

    async def prompts(self) -> list[tuple[TaskKey, PromptIds]]:
        """The held-out tasks with their prompts."""
        if not self._prompts:
            self._prompts = await self._grader.held_out(self._num_tasks)
        return self._prompts

    def note_asked(self, peer_id: PeerId, version: Version) -> None:
        """A trainer is asked; it may answer even after another one has been asked, too."""
        due = self._authority.core.state.evaluations_due
        self._asked = {known: peers for known, peers in self._asked.items() if known in due}
        self._asked.setdefault(version, set()).add(peer_id)

    async def take(self, peer_id: PeerId, version: Version, completions: Sequence[tuple[TaskKey, PromptIds]]) -> None:
        """Scores a trainer's completions, unless the version has its accuracy.

        Raises `WorkRefusedError` if nobody asked the trainer, `RolloutMalformedError` unless there is one completion
        for each task, `EngineError` if none could be scored.
        """
        self._check(peer_id, version, completions, self._authority.core.rules.spec.sampling)
        if version not in self._authority.core.state.evaluations_due:
            return
        scores = await self._grader.scores(completions)
        rewards = [reward for reward in scores if reward is not None]
        if not rewards:
            raise EngineError(
                f"version {version} was not evaluated",
                why="the grader could not score a single completion",
                remedy="Wait until the coordinator asks again.",
            )
        await self._authority.submit(EvaluationScored(version, len(rewards), sum(rewards) / len(rewards)))

    def _check(
        self,
        peer_id: PeerId,
        version: Version,
        completions: Sequence[tuple[TaskKey, PromptIds]],
        contract: SamplingContract,
    ) -> None:
        if peer_id not in self._asked.get(version, ()):
            raise WorkRefusedError(
                WHAT, why=f"this node was not asked for version {version}", remedy="Wait until the coordinator asks."
            )
        if [key for key, _ in completions] != [key for key, _ in self._prompts]:
            raise RolloutMalformedError(WHAT, why="it does not answer the held-out tasks")
        if any(len(ids) > contract.max_new_tokens for _, ids in completions):
            raise RolloutMalformedError(WHAT, why=f"a completion is longer than {contract.max_new_tokens} tokens")
        if any(not 0 <= token < contract.vocab_size for _, ids in completions for token in ids):
            raise RolloutMalformedError(WHAT, why=f"a token id is outside the vocabulary of {contract.vocab_size}")
