"""Tasks of the organizer's own `MODULE:FUNCTION`. Impure: imports his code, which runs in the grading child.

The function takes `params` as keywords and returns a `TaskObject`. Invariant: the same task comes each time that it is
asked for; an object that fails this at the start is refused. Whatever the code raises leaves as an error of the tree.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from coordinator.tasks.prompts import draft_of, is_the_answer
from protocol.chat import Message
from protocol.errors import EngineError, HexcombError, UsageError
from protocol.gym_tasks import quiet_and_seeded
from protocol.ids import Digest
from protocol.run import PoolSpec
from protocol.tasks import Split, Task, checked_score, distinct_held_out, draw, first_in_split, key_of
from protocol.tokens import Tokenizer

PROBES = tuple((seed, index) for seed in (0, 1) for index in range(8))
"""Tasks that are asked for twice at the start."""

T = TypeVar("T")


class TaskObject(Protocol):
    """What the function returns. It may also have `score(row, completion) -> float` in [0, 1], where `row` is what
    `task` gave without its prompt (else a completion must be the answer, white space around it aside), and `digest`, a
    text that changes when the data behind the tasks does. With `reply(row, messages) -> str | None` its tasks are
    conversations: it gives a tool's message to the model's turn, or None at the end; `score` gets the messages too, all
    after the prompt. It must reply alike to like turns: it is asked for each of them again and again."""

    def task(self, seed: int, index: int) -> Mapping[str, Any]:
        """The columns of one task, always the same for the same numbers, among them `prompt` (a text, or messages) and
        `answer`. `random` and `numpy.random` are seeded before each call."""
        ...


class FunctionEnvironment:
    """The object's tasks. Where `task(seed, index)` is of the other split, numbers drawn from both are tried."""

    def __init__(self, name: str, pool: PoolSpec, *, folder: Path, num_tasks: int = 0) -> None:
        self.name, self._pool, self._num_tasks = name, pool, num_tasks
        module, function = import_function(pool.source, folder)
        made: Any = _guarded(f"{pool.source}()", UsageError, lambda: function(**pool.params))
        if not callable(getattr(made, "task", None)):
            raise UsageError(
                f"{pool.source} gives no tasks",
                why=f"it returned {type(made).__name__}, which has no task(seed, index)",
                remedy="Return an object with that method.",
            )
        self._object: TaskObject = made
        self.digest = self._digest(module)

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The task for these numbers. Raises `EngineError` where the object fails, `UsageError` where it gives no
        prompt, or none of the split."""
        key = key_of(self.name, seed, index, split)
        place = index % self._num_tasks if self._num_tasks and split == "train" else index

        def make(attempt: int) -> Task:
            if attempt == 0:
                row = self._row(seed, place)
            else:
                row = self._row(draw(seed, place, attempt), draw(place, seed, attempt))
            where = f"task({seed}, {place}) of {self._pool.source}"
            made = draft_of(row, prompt=self._pool.prompt_column, answer=self._pool.answer_column, where=where)
            return Task(key, made.prompt, made.answer, made.entry, made.messages)

        return first_in_split(key, make)

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The chat as the model's template writes it, or the plain text."""
        return tokenizer.encode_chat(task.messages) if task.messages else tokenizer.encode(task.prompt)

    def score(self, task: Task, completion: str) -> float:
        """The completion's reward, in [0, 1]. Raises `EngineError` when there is none."""
        score = getattr(self._object, "score", None)
        if score is None:
            return is_the_answer(task, completion)
        what = f"score() of {self._pool.source}"
        value = _guarded(what, EngineError, lambda: float(score(task.entry, completion)))
        return checked_score(self.name, task.key, value)

    @property
    def is_multi_turn(self) -> bool:
        """Whether the object has a `reply`."""
        return callable(getattr(self._object, "reply", None))

    def reply(self, task: Task, said: Sequence[Message]) -> str | None:
        """What the object says to these turns. Raises `EngineError` where it fails, or says what is no text."""
        if not self.is_multi_turn:
            return None
        what, object_ = f"reply() of {self._pool.source}", self._object
        with quiet_and_seeded(draw(task.key.seed, task.key.index, len(said))):
            reply: Any = _guarded(what, EngineError, lambda: object_.reply(task.entry, _messages(said)))  # type: ignore[attr-defined]
        if reply is not None and not isinstance(reply, str):
            raise EngineError(f"{what} gave {type(reply).__name__}", why="a reply is a text, or None at the end")
        return reply

    def score_turns(self, task: Task, said: Sequence[Message]) -> float:
        """The conversation's reward, in [0, 1]; without a `score` the last message must be the answer. Raises
        `EngineError` when there is none."""
        score = getattr(self._object, "score", None)
        if score is None or not self.is_multi_turn:
            return self.score(task, said[-1].content)
        what = f"score() of {self._pool.source}"
        value = _guarded(what, EngineError, lambda: float(score(task.entry, _messages(said))))
        return checked_score(self.name, task.key, value)

    def held_out(self, limit: int) -> list[Task]:
        """At most `limit` held-out tasks with distinct prompts, always the same ones."""
        return distinct_held_out(self, limit)

    def _row(self, seed: int, index: int) -> Mapping[str, Any]:
        with quiet_and_seeded(draw(seed, index, 0)):
            what = f"task({seed}, {index}) of {self._pool.source}"
            row: Any = _guarded(what, EngineError, lambda: self._object.task(seed, index))
        if not isinstance(row, Mapping):
            raise EngineError(f"{what} gave {type(row).__name__}", why="a task is a mapping of columns")
        return row

    def _digest(self, module: Any) -> Digest:
        """Of the module's source, the object's own digest and a sample of tasks. Raises `UsageError` where these are
        not the same when asked for again."""
        first = {probe: _text(self._row(*probe)) for probe in PROBES}
        changed = [probe for probe in reversed(PROBES) if _text(self._row(*probe)) != first[probe]]
        if changed:
            raise UsageError(
                f"{self._pool.source} is refused",
                why=f"task{changed[0]} was another when asked for again",
                remedy="Make each task from seed and index alone.",
            )
        source = inspect.getsourcefile(module)
        content = [
            "function",
            self.name,
            self._num_tasks,
            self._pool.source,
            self._pool.params,
            [self._pool.prompt_column, self._pool.answer_column],
            Path(source).read_bytes().hex() if source else "",
            str(getattr(self._object, "digest", "")),
            list(first.values()),
        ]
        return Digest(blake3(json.dumps(content, sort_keys=True).encode()).hexdigest())


def import_function(source: str, folder: Path) -> tuple[Any, Callable[..., Any]]:
    """The module and the function that `MODULE:FUNCTION` names; the run file's folder is looked in after all others.
    Raises `UsageError`."""
    name, _, attribute = source.partition(":")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = _guarded(f"the module {name!r}", UsageError, lambda: importlib.import_module(name))
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(
            f"there is no function {attribute!r} in {name}",
            why=f"{getattr(module, '__file__', name)} does not define it",
            remedy="Write MODULE:FUNCTION in the run file.",
        )
    return module, function


def _messages(said: Sequence[Message]) -> list[dict[str, str]]:
    return [asdict(message) for message in said]


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def _guarded(what: str, kind: type[HexcombError], call: Callable[[], T]) -> T:
    """What the organizer's code gives; whatever it raises becomes an error of the tree, and leaving is refused."""
    try:
        return call()
    except HexcombError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(
            f"{what} failed", why=f"{type(error).__name__}: {error}", remedy="Mend the code that the run file names."
        ) from error
