"""The coordinator's side of grading: prompts and rewards on request, whatever happens to the children.

Invariant: each completion handed in gets exactly one answer, and an answer that could not be had is None (missing).
A child is started again when it dies or hangs. A batch on which that happened is asked for again one by one, so that
a completion which kills the grader takes no other with it. Impure: child processes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from coordinator import grading
from coordinator.rewards import FAULT, Fault, Rewards, Value, one_by_one, total
from coordinator.warm_child import WarmChild, over_losses
from protocol.errors import HexcombError, UsageError
from protocol.ids import Digest, TaskKey
from protocol.run import EnvironmentSpec

WORKER = "coordinator.grader_worker"
ANSWER_DEADLINE_S = 60.0
ONE_DEADLINE_S = 15.0
"""For a single task or completion: three times what the child itself allows."""

STOP_DEADLINE_S = 2.0
MAX_BATCH = 64
MAX_REPLIES = 2
"""In a request: together they hold up others, prompts among them, for less time than a node waits for its lease."""

REPLY_LOST = "the grading child was lost over it"
MAX_CACHED_PROMPTS = 65_536
REMEMBER_S = 10.0
"""For so long a prompt that could not be made is not asked for again: whoever asked may have given up waiting."""

PromptIds = tuple[int, ...]
Pair = tuple[TaskKey, PromptIds]
Graded = tuple[TaskKey, grading.Completion]
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

log = structlog.get_logger()


def _wire(keys: Sequence[TaskKey]) -> tuple[tuple[str, int, int], ...]:
    return tuple((key.environment, key.seed, key.index) for key in keys)


class Grader:
    """One child with the environment, and one with the reward functions if the plan has any; use as
    `async with Grader(...)`. Prompts are cached, since each is asked for three times."""

    def __init__(
        self,
        environment: EnvironmentSpec,
        *,
        model_dir: Path,
        run_dir: Path,
        log_path: Path,
        plan: grading.RewardPlan | None = None,
        worker: str = WORKER,
        deadline_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self.plan, self._deadline_s = plan or grading.RewardPlan(), deadline_s
        self.digest = Digest("")
        """Names what the prompts are made from, as the last child that was started found it."""
        self._warm = WarmChild(
            worker,
            grading.Open(environment, str(model_dir)),
            grading.Opened,
            run_dir=run_dir,
            log_path=log_path,
            stop_deadline_s=STOP_DEADLINE_S,
            check=self._check,
        )
        rewards_log = log_path.with_name("rewards.log")
        self._rewards = Rewards(self.plan, run_dir=run_dir, log_path=rewards_log) if self.plan.functions else None
        self._prompts: OrderedDict[TaskKey, PromptIds] = OrderedDict()
        self._failures: dict[TaskKey, tuple[HexcombError, float]] = {}
        self._making: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Grader":
        try:
            await over_losses(self._warm.ready)
            if self._rewards is not None:
                await over_losses(self._rewards.start)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._making:
            task.cancel()
        await self._warm.close()
        if self._rewards is not None:
            await self._rewards.close()

    @property
    def environment_name(self) -> str:
        """What task keys call the environment; known once the grader has started."""
        assert self._warm.opened is not None
        return self._warm.opened.name

    @property
    def is_multi_turn(self) -> bool:
        """Whether the environment may reply; known once the grader has started."""
        assert self._warm.opened is not None
        return self._warm.opened.is_multi_turn

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
            await self._warm.ready()  # with no child to be had it is not the tasks' fault
            if len(keys) == 1:
                self._failures[keys[0]] = (error, asyncio.get_running_loop().time() + REMEMBER_S)
                return
            log.error("prompts were not made", num_tasks=len(keys), why=error.sentence())
            for key in keys:
                await self._make_some([key])

    async def held_out(self, limit: int) -> list[Pair]:
        """At most `limit` held-out tasks with their prompts. Raises as `prompts` does."""
        made = await over_losses(lambda: self._ask(grading.HeldOut(limit), grading.Prompts))
        return [(TaskKey(*task), ids) for task, ids in zip(made.tasks, made.prompt_ids, strict=True)]

    async def replies(self, graded: Sequence[Graded]) -> list[PromptIds | str | None]:
        """What the environment says to each completion: token ids, None where the conversation is over, or why nobody
        can know; one that ends the child takes no other with it. Raises as `try_prompts` does."""
        replies: list[PromptIds | str | None] = []
        for start in range(0, len(graded), MAX_REPLIES):
            some = graded[start : start + MAX_REPLIES]
            answers = await one_by_one(some, self._replies, what="the environment's reply")
            if FAULT in answers:
                await self._warm.ready()  # with no child to be had it is nobody's fault
            replies += [REPLY_LOST if isinstance(answer, Fault) else answer for answer in answers]
        return replies

    async def scores(self, graded: Sequence[Graded]) -> tuple[float | None, ...]:
        """The reward of each completion, in order; None where it could not be had."""
        rewards: list[float | None] = []
        for start in range(0, len(graded), MAX_BATCH):
            rewards += await self._totals(graded[start : start + MAX_BATCH])
        return tuple(rewards)

    async def columns(self, keys: Sequence[TaskKey]) -> list[grading.Sample]:
        """What reward functions are told of an empty completion of each task. Raises as `prompts` does."""
        return list(await self._describe([(key, "") for key in keys]))

    async def _totals(self, graded: Sequence[Graded]) -> list[float | None]:
        by_reward: list[list[Value]] = []
        samples = await self._samples(graded) if self.plan.functions else []
        number = 0
        for spec in self.plan.rewards:
            if spec.function == grading.ENVIRONMENT:
                scores = await one_by_one(graded, self._scores, what="the environment's score")
                by_reward.append(scores)
            else:
                by_reward.append(await self._values(number, samples))
                number += 1
        weights = [spec.weight for spec in self.plan.rewards]
        return [total(weights, values) for values in zip(*by_reward, strict=True)]

    async def _samples(self, graded: Sequence[Graded]) -> list[grading.Sample | Fault]:
        return await one_by_one(graded, self._describe, what="what rewards are told")

    async def _values(self, number: int, samples: Sequence[grading.Sample | Fault]) -> list[Value]:
        """What function `number` says of each sample; of one that could not be had it says nothing."""
        assert self._rewards is not None
        known = [sample for sample in samples if not isinstance(sample, Fault)]
        values = iter(await self._rewards.values(number, known) if known else [])
        return [FAULT if isinstance(sample, Fault) else next(values) for sample in samples]

    async def _scores(self, graded: Sequence[Graded]) -> Sequence[Value]:
        request = grading.Score(_wire([key for key, _ in graded]), tuple(completion for _, completion in graded))
        return [FAULT if reward is None else reward for reward in (await self._ask(request, grading.Scores)).rewards]

    async def _replies(self, graded: Sequence[Graded]) -> Sequence[PromptIds | str | None]:
        request = grading.Reply(_wire([key for key, _ in graded]), tuple(completion for _, completion in graded))
        return (await self._ask(request, grading.Replies)).replies

    async def _describe(self, graded: Sequence[Graded]) -> Sequence[grading.Sample]:
        request = grading.Describe(_wire([key for key, _ in graded]), tuple(completion for _, completion in graded))
        return (await self._ask(request, grading.Samples)).samples

    async def _ask(self, request: grading.Request, reply: type[ReplyT]) -> ReplyT:
        """The child's answer, for which a single task or completion has less time."""
        is_many = isinstance(request, grading.Open | grading.HeldOut) or len(request.tasks) != 1
        deadline_s = self._deadline_s if is_many else min(self._deadline_s, ONE_DEADLINE_S)
        return await self._warm.request(request, reply, deadline_s=deadline_s)

    def _check(self, opened: grading.Opened) -> None:
        """Raises `UsageError` where a child that is started anew would give other prompts than the one before it."""
        digest = Digest(opened.digest)
        if self.digest not in ("", digest):
            raise UsageError(
                "the task's files are not those with which the run began",
                why="they were changed while it ran, and its slots would get other prompts",
                remedy="Put them back as they were.",
            )
        self.digest = digest
