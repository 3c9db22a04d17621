"""A list of rows as an environment: JSONL, Hugging Face data sets, task sets of `verifiers`. Pure once read.

Invariants: index by index a seed goes through all training rows before one comes again, in an order that depends on
the seed and the epoch; a row's split is that of its prompt's text.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from blake3 import blake3

from coordinator.tasks.prompts import Draft, is_the_answer
from protocol.errors import UsageError
from protocol.ids import Digest
from protocol.manifest import digest_of
from protocol.tasks import SingleTurn, Split, Task, checked_score, distinct_held_out, is_held_out, key_of
from protocol.tokens import Tokenizer

Score = Callable[[Task, str], float]


class RowsEnvironment(SingleTurn):
    """Tasks from rows, whose content `digest` names; a completion scores 1 when it is the answer, white space around it
    aside, unless `score` judges otherwise. With `num_tasks` the tasks to train on are the first so many of the first
    epoch, again and again."""

    def __init__(
        self,
        name: str,
        rows: Sequence[Draft],
        *,
        digest: Digest,
        num_tasks: int = 0,
        score: Score | None = None,
    ) -> None:
        self.name, self.digest = name, digest_of(f"{name}:{num_tasks}:{digest}".encode())
        self._rows, self._num_tasks, self._score = rows, num_tasks, score or is_the_answer
        self._places: dict[Split, list[int]] = {"train": [], "held-out": []}
        for place, row in enumerate(rows):
            self._places["held-out" if is_held_out(row.prompt) else "train"].append(place)
        self._order = lru_cache(maxsize=4)(self._shuffled)
        self._check("train")

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The row at this place of the seed's order. Raises `UsageError` when the split has no rows."""
        key = key_of(self.name, seed, index, split)
        self._check(split)
        if self._num_tasks and split == "train":
            index %= self._num_tasks
        epoch, place = divmod(index, len(self._places[split]))
        row = self._rows[self._order(seed, epoch, split)[place]]
        return Task(key, row.prompt, row.answer, row.entry, row.messages)

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The chat as the model's template writes it, or the plain text."""
        return tokenizer.encode_chat(task.messages) if task.messages else tokenizer.encode(task.prompt)

    def score(self, task: Task, completion: str) -> float:
        """The completion's reward, in [0, 1]. Raises `EngineError` when there is none."""
        return checked_score(self.name, task.key, self._score(task, completion))

    def held_out(self, limit: int) -> list[Task]:
        """At most `limit` held-out tasks with distinct prompts, always the same ones."""
        return distinct_held_out(self, limit)

    def _shuffled(self, seed: int, epoch: int, split: Split) -> list[int]:
        return sorted(self._places[split], key=lambda place: blake3(f"{seed}:{epoch}:{place}".encode()).digest())

    def _check(self, split: Split) -> None:
        if not self._places[split]:
            raise UsageError(
                f"environment {self.name!r} has no {split} prompts",
                why=f"none of its {len(self._rows)} rows falls into that split",
                remedy="Give more rows with distinct prompts: about one in five is held out.",
            )
