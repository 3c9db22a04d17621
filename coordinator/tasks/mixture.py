"""Environments made of others: several pools in one, and questions as chats. Pure.

Invariants: which pool a task comes from follows from seed and index alone, so that a restart, or an auditor with the
same files, finds the same, also where a curriculum decides which indices are opened (`core.curriculum`); a prompt's
split is decided by its text, whatever the pool and whether it is a chat.
"""

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

from blake3 import blake3

from protocol.chat import Message
from protocol.ids import Digest, TaskKey
from protocol.tasks import Environment, Split, Task, distinct_held_out, draw, key_of, split_of
from protocol.tokens import Tokenizer

POOL = "pool"
"""The column of a task's entry that names its pool."""


class MixtureEnvironment:
    """Each task comes from one of the pools, chosen by the hash of seed and index in proportion to their weights, which
    do not change while the run lives. With `by_index` training task i is task i // P of pool i mod P, of P pools;
    held-out ones are chosen by the hash all the same."""

    def __init__(
        self,
        name: str,
        pools: Sequence[Environment],
        weights: Sequence[float],
        *,
        num_tasks: int = 0,
        by_index: bool = False,
    ) -> None:
        self.name, self._num_tasks, self._by_index = name, num_tasks, by_index
        self._pools = {pool.name: pool for pool in pools}
        self._names = [pool.name for pool in pools]
        self._bounds = [bound / sum(weights) for bound in itertools.accumulate(weights)]
        content = [name, num_tasks, [[pool.digest, weight] for pool, weight in zip(pools, weights, strict=True)]]
        content += ["by index"] if by_index else []
        self.digest = Digest(blake3(json.dumps(content).encode()).hexdigest())

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The task of the pool that has this index. Raises as the pool does."""
        key = key_of(self.name, seed, index, split)
        name, place = self._source_of(seed, index, split)
        task = self._pools[name].task(seed, place, split)
        return replace(task, key=key, entry={**task.entry, POOL: name})

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        """As the task's pool makes them."""
        return self._pools[task.entry[POOL]].prompt_ids(task, tokenizer)

    def score(self, task: Task, completion: str) -> float:
        """As the task's pool scores it, by what it gave itself."""
        return self._pools[task.entry[POOL]].score(self._own(task), completion)

    @property
    def is_multi_turn(self) -> bool:
        """Whether one of the pools may reply."""
        return any(pool.is_multi_turn for pool in self._pools.values())

    def reply(self, task: Task, said: Sequence[Message]) -> str | None:
        """As the task's pool replies."""
        return self._pools[task.entry[POOL]].reply(self._own(task), said)

    def score_turns(self, task: Task, said: Sequence[Message]) -> float:
        """As the task's pool scores them."""
        return self._pools[task.entry[POOL]].score_turns(self._own(task), said)

    def held_out(self, limit: int) -> list[Task]:
        """At most `limit` held-out tasks with distinct prompts, of the pools in proportion to their weights."""
        return distinct_held_out(self, limit)

    def _own(self, task: Task) -> Task:
        """The task as its pool knows it."""
        own = {column: value for column, value in task.entry.items() if column != POOL}
        _, place = self._source_of(task.key.seed, task.key.index, split_of(task.key))
        return replace(task, key=TaskKey(task.entry[POOL], task.key.seed, place), entry=own)

    def _source_of(self, seed: int, index: int, split: Split) -> tuple[str, int]:
        """The pool that a task comes from, and its index there."""
        if split == "train":
            index = index % self._num_tasks if self._num_tasks else index
            if self._by_index:
                place, number = divmod(index, len(self._names))
                return self._names[number], place
        share = draw(seed, index, -1) / 2**31
        return self._names[min(bisect.bisect_right(self._bounds, share), len(self._names) - 1)], index


class ChatEnvironment:
    """Another environment's tasks as chats: a plain prompt becomes the user's message, and `system` opens each chat
    that has no system message of its own."""

    def __init__(self, inner: Environment, *, is_wrapped: bool, system: str = "") -> None:
        self.name, self._inner, self._is_wrapped, self._system = inner.name, inner, is_wrapped, system
        content = ["chat", inner.digest, is_wrapped, system]
        self.digest = Digest(blake3(json.dumps(content).encode()).hexdigest())

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        """The other's task, with messages."""
        task = self._inner.task(seed, index, split)
        messages = task.messages
        if not messages and self._is_wrapped:
            messages = (Message("user", task.prompt),)
        if messages and self._system and messages[0].role != "system":
            messages = (Message("system", self._system), *messages)
        return replace(task, messages=messages)

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The chat as the model's template writes it, or the plain text."""
        return tokenizer.encode_chat(task.messages) if task.messages else self._inner.prompt_ids(task, tokenizer)

    def score(self, task: Task, completion: str) -> float:
        """As the other scores it."""
        return self._inner.score(task, completion)

    @property
    def is_multi_turn(self) -> bool:
        """As the other is."""
        return self._inner.is_multi_turn

    def reply(self, task: Task, said: Sequence[Message]) -> str | None:
        """As the other replies."""
        return self._inner.reply(task, said)

    def score_turns(self, task: Task, said: Sequence[Message]) -> float:
        """As the other scores them."""
        return self._inner.score_turns(task, said)

    def held_out(self, limit: int) -> list[Task]:
        """At most `limit` held-out tasks with distinct prompts, always the same ones."""
        return distinct_held_out(self, limit)
