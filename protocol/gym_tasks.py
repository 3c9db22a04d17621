"""Tasks of reasoning-gym, which every node has: whoever knows the key of one makes the same prompt. Pure.

Invariant: equal digests mean equal prompts, in every process. reasoning-gym is imported inside functions alone.
"""

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal

from blake3 import blake3

from protocol.errors import UsageError
from protocol.ids import Digest
from protocol.run import EnvironmentSpec
from protocol.tasks import (
    Environment,
    SingleTurn,
    Split,
    Task,
    check_name,
    checked_score,
    distinct_held_out,
    draw,
    first_in_split,
    key_of,
)
from protocol.tokens import Tokenizer

PromptForm = Literal["question", "expression"]

PAGE = 1024
"""Tasks drawn from one reasoning-gym dataset object; word lists are loaded once a page."""


def make_environment(spec: EnvironmentSpec) -> Environment:
    """The environment that a run names, where every node may have it. Raises `UsageError` when there is none like it,
    and for one whose tasks the organizer alone makes."""
    if spec.origin != "reasoning-gym" or spec.prompt == "chat":
        raise UsageError(
            f"tasks of {spec.name!r} cannot be made here",
            why="the organizer alone has what they are made from",
            remedy="Take the prompts that come with the lease.",
        )
    return ReasoningGymEnvironment(spec.name, params=spec.params, prompt=spec.prompt, num_tasks=spec.num_tasks)


class ReasoningGymEnvironment(SingleTurn):
    """Any reasoning-gym dataset as an environment.

    `prompt="question"` is the dataset's own text; `"expression"` is the bare expression of an arithmetic dataset,
    `4-1=`, for models too small for English. Only full marks count unless `partial_credit`: many graders give a
    share of the mark to an answer that merely contains the right one. With `num_tasks` the tasks to train on come again
    after so many: task `index` has the prompt of `index % num_tasks`.
    """

    def __init__(
        self,
        dataset: str,
        *,
        params: Mapping[str, Any] | None = None,
        prompt: PromptForm = "question",
        name: str | None = None,
        partial_credit: bool = False,
        num_tasks: int = 0,
    ) -> None:
        self._dataset, self._params, self._form = dataset, dict(params or {}), prompt
        self._partial_credit, self._num_tasks = partial_credit, num_tasks
        self._name = check_name(name or dataset)
        self._page = lru_cache(maxsize=16)(self._open_page)
        try:
            with quiet_and_seeded(0):
                self._entry(0, 0, 0)
        except (ValueError, TypeError, AssertionError, KeyError, AttributeError) as error:
            raise UsageError(
                f"environment {self._name!r} cannot be made from reasoning-gym's {dataset!r}",
                why=str(error) or type(error).__name__,
                remedy="Check the dataset's name, its parameters and the prompt form in the run file.",
            ) from error

    @property
    def name(self) -> str:
        return self._name

    @property
    def digest(self) -> Digest:
        content = {
            "adapter": "reasoning-gym",
            "package": metadata.version("reasoning-gym"),
            "name": self._name,
            "dataset": self._dataset,
            "params": self._params,
            "prompt": self._form,
            "partial_credit": self._partial_credit,
            "num_tasks": self._num_tasks,
        }
        return Digest(blake3(json.dumps(content, sort_keys=True).encode()).hexdigest())

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The first of the deterministic draws for `(seed, index)` whose prompt lies in `split`."""
        key = key_of(self._name, seed, index, split)
        place = index % self._num_tasks if self._num_tasks and split == "train" else index

        def make(attempt: int) -> Task:
            with quiet_and_seeded(draw(seed, place, attempt)):
                entry = self._entry(seed, place, attempt)
            return Task(key, self._prompt(entry), str(entry["answer"]), entry)

        return first_in_split(key, make)

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        return tokenizer.encode(task.prompt)

    def score(self, task: Task, completion: str) -> float:
        with quiet_and_seeded(0):
            score = float(self._page(0, 0, 0).score_answer(completion.strip(), dict(task.entry)))
        checked_score(self._name, task.key, score)
        return score if self._partial_credit or score == 1.0 else 0.0

    def held_out(self, limit: int) -> list[Task]:
        return distinct_held_out(self, limit)

    def _prompt(self, entry: Mapping[str, Any]) -> str:
        if self._form == "question":
            return str(entry["question"])
        return str(entry["metadata"]["expression"]).replace(" ", "") + "="

    def _entry(self, seed: int, index: int, attempt: int) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self._page(seed, index // PAGE, attempt)[index % PAGE]
        self._prompt(entry)
        return entry

    def _open_page(self, seed: int, page: int, attempt: int) -> Any:
        import reasoning_gym

        reserved = {"seed", "size"} & set(self._params)
        if reserved:
            raise ValueError(f"{sorted(reserved)} are set by the task's own seed and index")
        return reasoning_gym.create_dataset(self._dataset, seed=draw(seed, page, attempt), size=PAGE, **self._params)


@contextlib.contextmanager
def quiet_and_seeded(seed: int) -> Iterator[None]:
    """Some datasets draw from the process-wide generators or print: gives them fixed ones, and puts all back."""
    import numpy

    before, before_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(before)
        numpy.random.set_state(before_numpy)
