"""Tasks: what a prompt is, where it comes from, and what a completion of it is worth. Pure.

Invariants: a task is a pure function of `(environment, seed, index, split)`, the same in every process; a prompt of
the held-out split (one fifth of the distinct prompts, chosen by the hash of their text) is never a prompt of the
training split. A score lies in [0, 1]. What makes tasks stands elsewhere: `gym_tasks` for what every node may have, and
the coordinator's own package for what the organizer alone has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from blake3 import blake3

from protocol.chat import Message
from protocol.errors import EngineError, UsageError
from protocol.ids import Digest, TaskKey
from protocol.tokens import Tokenizer, load_tokenizer

__all__ = [
    "Environment",
    "Split",
    "Task",
    "Tokenizer",
    "load_tokenizer",
    "prompt_digest",
    "regenerate",
    "split_of",
]

Split = Literal["train", "held-out"]

HELD_OUT_MARK = "#held-out"
HELD_OUT_SHARE = 5
"""One in so many distinct prompts is held out."""

HELD_OUT_SEED = 0
MAX_ATTEMPTS = 400
"""Draws before a split counts as empty; a fair split fails so with a chance under 1e-38."""

MAX_REPEATS = 600
"""Repeats in a row after which the distinct held-out prompts count as exhausted."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with what grading needs. `messages` is the prompt as a chat, where it is one; `prompt` is its text all
    the same. `entry` holds whatever else the source knows of the task, by column, and never leaves the process."""

    key: TaskKey
    prompt: str
    answer: str
    entry: Mapping[str, Any] = field(repr=False)
    messages: tuple[Message, ...] = ()


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

    @property
    def is_multi_turn(self) -> bool:
        """As in `SingleTurn`, like the two below."""
        ...

    def reply(self, task: Task, said: Sequence[Message]) -> str | None: ...

    def score_turns(self, task: Task, said: Sequence[Message]) -> float: ...


class SingleTurn:
    """What every environment has for conversations: those that begin here end with the model's first turn."""

    @property
    def is_multi_turn(self) -> bool:
        """Whether the environment may reply to turns."""
        return False

    def reply(self, task: Task, said: Sequence[Message]) -> str | None:
        """A tool's message to the last of `said`, which is all after the prompt; None = the conversation is over.
        Always the same for the same turns. Raises `EngineError`."""
        return None

    def score_turns(self: Environment, task: Task, said: Sequence[Message]) -> float:
        """The conversation's reward, in [0, 1]. Raises `EngineError` when there is none."""
        return self.score(task, said[-1].content)


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


def check_name(name: str) -> str:
    """The name of an environment. Raises `UsageError` where task keys could not hold it."""
    if not name or set("#:/") & set(name):
        raise UsageError(
            f"environment name {name!r} is refused",
            why="task keys use '#', ':' and '/' as marks",
            remedy="Choose letters, digits, '_' and '-'.",
        )
    return name


def key_of(name: str, seed: int, index: int, split: Split) -> TaskKey:
    """The key of a task. Raises `UsageError` on a negative index."""
    if index < 0:
        raise UsageError(f"task index {index} is negative", remedy="Count tasks from 0.")
    return TaskKey(name + (HELD_OUT_MARK if split == "held-out" else ""), seed, index)


def first_in_split(key: TaskKey, make: Callable[[int], Task]) -> Task:
    """What `make` gives at the first attempt (0, 1, ...) whose prompt lies in the key's split. Raises `UsageError` when
    none does."""
    split = split_of(key)
    for attempt in range(MAX_ATTEMPTS):
        task = make(attempt)
        if is_held_out(task.prompt) == (split == "held-out"):
            return task
    raise UsageError(
        f"environment {environment_name(key)!r} has no {split} prompts",
        why=f"{MAX_ATTEMPTS} draws gave none",
        remedy="Choose parameters that give more distinct prompts.",
    )


def distinct_held_out(environment: Environment, limit: int) -> list[Task]:
    """At most `limit` held-out tasks with distinct prompts, always the same ones."""
    found: dict[str, Task] = {}
    index = repeats = 0
    while len(found) < limit and repeats < MAX_REPEATS:
        task = environment.task(HELD_OUT_SEED, index, "held-out")
        repeats = repeats + 1 if task.prompt in found else 0
        found.setdefault(task.prompt, task)
        index += 1
    return list(found.values())


def checked_score(name: str, key: TaskKey, score: float) -> float:
    """The score. Raises `EngineError` unless it lies in [0, 1]."""
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        raise EngineError(
            f"the grader of {name!r} answered {score} for task {key}",
            why="a score lies in [0, 1]",
            remedy="Leave this task out, or mend the grader.",
        )
    return score


def prompt_digest(prompt_ids: tuple[int, ...]) -> Digest:
    """BLAKE3 over the prompt's token ids, each as 4 little-endian bytes."""
    return Digest(blake3(b"".join(token.to_bytes(4, "little") for token in prompt_ids)).hexdigest())


def prompts_digest(environment: Environment, tokenizer: Tokenizer) -> Digest:
    """Names the environment together with how its chats are written, where the model has a template for them."""
    if tokenizer.chat_template is None:
        return environment.digest
    return Digest(blake3(f"{environment.digest}{tokenizer.chat_template.text}".encode()).hexdigest())


def draw(seed: int, index: int, attempt: int) -> int:
    """31 bits that depend on all three numbers; datasets add small offsets to their seeds, so neighbours lie apart."""
    return int.from_bytes(blake3(f"{seed}:{index}:{attempt}".encode()).digest(length=8), "little") >> 33
