"""Tasks: what a prompt is, where it comes from, and what a completion of it is worth. Pure.

Invariants: a task is a pure function of `(environment, seed, index, split)`, the same in every process; a prompt of
the held-out split (one fifth of the distinct prompts, chosen by the hash of their text) is never a prompt of the
training split. A score lies in [0, 1]. reasoning-gym is imported inside functions alone.
"""

import contextlib
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal, Protocol

from blake3 import blake3

from protocol.errors import EngineError, UsageError
from protocol.ids import Digest, TaskKey
from protocol.run import EnvironmentSpec
from protocol.tokens import Tokenizer, load_tokenizer

__all__ = [
    "Environment",
    "ReasoningGymEnvironment",
    "Split",
    "Task",
    "Tokenizer",
    "load_tokenizer",
    "make_environment",
    "prompt_digest",
    "regenerate",
    "split_of",
]

Split = Literal["train", "held-out"]
PromptForm = Literal["question", "expression"]

HELD_OUT_MARK = "#held-out"
HELD_OUT_SHARE = 5
"""One in so many distinct prompts is held out."""

HELD_OUT_SEED = 0
MAX_ATTEMPTS = 400
"""Draws before a split counts as empty; a fair split fails so with a chance under 1e-38."""

MAX_REPEATS = 600
"""Repeats in a row after which the distinct held-out prompts count as exhausted."""

PAGE = 1024
"""Tasks drawn from one reasoning-gym dataset object; word lists are loaded once a page."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with what grading needs. `entry` is the environment's own record and never leaves the process."""

    key: TaskKey
    prompt: str
    answer: str
    entry: Mapping[str, Any] = field(repr=False)


class Environment(Protocol):
    """A source of tasks and their grader; deterministic, without state that anyone can see."""

    @property
    def name(self) -> str:
        """What task keys call it; the held-out split is `<name>#held-out`."""
        ...

    @property
    def digest(self) -> Digest:
        """Content hash of name, parameters and package version: equal digests mean equal prompts."""
        ...

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The `index`-th task of `seed`. Raises `UsageError` when the split has no prompt."""
        ...

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The canonical token ids of the task's prompt."""
        ...

    def score(self, task: Task, completion: str) -> float:
        """The completion's reward, in [0, 1]. Raises `EngineError` when the grader answers something else."""
        ...

    def held_out(self, limit: int) -> list[Task]:
        """At most `limit` held-out tasks with distinct prompts, always the same ones."""
        ...


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the fifth that is never trained on; decided by its text alone."""
    return int.from_bytes(blake3(b"held-out/" + prompt.encode()).digest(length=8), "little") % HELD_OUT_SHARE == 0


def split_of(key: TaskKey) -> Split:
    """The split that a task key names."""
    return "held-out" if key.environment.endswith(HELD_OUT_MARK) else "train"


def environment_name(key: TaskKey) -> str:
    """The name of the environment that a task key names, without its split."""
    return key.environment.removesuffix(HELD_OUT_MARK)


def regenerate(environment: Environment, key: TaskKey) -> Task:
    """The task that `key` names. Raises `UsageError` when the key is another environment's."""
    if environment_name(key) != environment.name:
        raise UsageError(
            f"task {key} is not of environment {environment.name!r}",
            remedy="Ask the environment that the key names.",
        )
    return environment.task(key.seed, key.index, split_of(key))


def prompt_digest(prompt_ids: tuple[int, ...]) -> Digest:
    """BLAKE3 over the prompt's token ids, each as 4 little-endian bytes."""
    return Digest(blake3(b"".join(token.to_bytes(4, "little") for token in prompt_ids)).hexdigest())


def make_environment(spec: EnvironmentSpec) -> Environment:
    """The environment that a run names. Raises `UsageError` when there is none like it."""
    return ReasoningGymEnvironment(spec.name, params=spec.params, prompt=spec.prompt, num_tasks=spec.num_tasks)


class ReasoningGymEnvironment:
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
        self._name = name or dataset
        if not self._name or set("#:/") & set(self._name):
            raise UsageError(
                f"environment name {self._name!r} is refused",
                why="task keys use '#', ':' and '/' as marks",
                remedy="Choose letters, digits, '_' and '-'.",
            )
        self._page = lru_cache(maxsize=16)(self._open_page)
        try:
            with _quiet_and_seeded(0):
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
        if index < 0:
            raise UsageError(f"task index {index} is negative", remedy="Count tasks from 0.")
        mark = HELD_OUT_MARK if split == "held-out" else ""
        key = TaskKey(self._name + mark, seed, index)
        if self._num_tasks and split == "train":
            index %= self._num_tasks
        for attempt in range(MAX_ATTEMPTS):
            with _quiet_and_seeded(_draw(seed, index, attempt)):
                entry = self._entry(seed, index, attempt)
            prompt = self._prompt(entry)
            if is_held_out(prompt) == (split == "held-out"):
                return Task(key, prompt, str(entry["answer"]), entry)
        raise UsageError(
            f"environment {self._name!r} has no {split} prompts",
            why=f"{MAX_ATTEMPTS} draws gave none",
            remedy="Choose parameters that give more distinct prompts.",
        )

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        return tokenizer.encode(task.prompt)

    def score(self, task: Task, completion: str) -> float:
        with _quiet_and_seeded(0):
            score = float(self._page(0, 0, 0).score_answer(completion.strip(), dict(task.entry)))
        if not math.isfinite(score) or not 0.0 <= score <= 1.0:
            raise EngineError(
                f"the grader of {self._name!r} answered {score} for task {task.key}",
                why="a score lies in [0, 1]",
                remedy="Leave this task out, or mend the grader.",
            )
        return score if self._partial_credit or score == 1.0 else 0.0

    def held_out(self, limit: int) -> list[Task]:
        found: dict[str, Task] = {}
        index = repeats = 0
        while len(found) < limit and repeats < MAX_REPEATS:
            task = self.task(HELD_OUT_SEED, index, "held-out")
            repeats = repeats + 1 if task.prompt in found else 0
            found.setdefault(task.prompt, task)
            index += 1
        return list(found.values())

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
        return reasoning_gym.create_dataset(self._dataset, seed=_draw(seed, page, attempt), size=PAGE, **self._params)


def _draw(seed: int, index: int, attempt: int) -> int:
    """31 bits that depend on all three numbers; datasets add small offsets to their seeds, so neighbours lie apart."""
    return int.from_bytes(blake3(f"{seed}:{index}:{attempt}".encode()).digest(length=8), "little") >> 33


@contextlib.contextmanager
def _quiet_and_seeded(seed: int) -> Iterator[None]:
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
