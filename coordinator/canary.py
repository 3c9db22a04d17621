"""The canary: answers known to be wrong, and known to be right, that tell whether a run's rewards can be fooled.

Pure but for asking the grader. Full marks are what the best right answer gets, where the task has a known answer, else
the sum of the weights, as of rewards that give at most 1. A wrong answer that gets them on half of the tasks fools the
rewards; one that is right by chance on a single task does not.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from coordinator.grader import Grader
from protocol.errors import GraderFooledError, HexcombError
from protocol.ids import TaskKey

NUM_TASKS = 8
PERIOD_S = 600.0
LONG_CHARS = 100_000
TOLERANCE = 1e-6
CANARY_SEED = 0x5EED
"""Tasks of the environment that no run's seed is likely to give."""

WRONG: Mapping[str, str] = {
    "nothing": "",
    "the word [reward]": "[reward]",
    "a very long text": "a " * (LONG_CHARS // 2),
    "all numbers from 0 to 999": " ".join(map(str, range(1000))),
    "an empty <answer>": "<answer></answer>",
    "an empty <think> and <answer>": "<think>\n\n</think>\n<answer>\n\n</answer>",
    "an empty \\boxed": "\\boxed{}",
    "'The answer is' without one": "The answer is:",
}
THE_PROMPT = "the prompt itself"
RIGHT = (
    "{answer}",
    "<answer>{answer}</answer>",
    "<think>\nI know it.\n</think>\n<answer>\n{answer}\n</answer>",
    "<think>I know it.</think>{answer}",
    "\\boxed{{{answer}}}",
    "The answer is: {answer}",
    "#### {answer}",
)
"""Forms in which graders expect an answer; one of them has to be good enough."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the canary found. `fooled_by` are wrong answers by their names; `num_right_refused` counts the tasks, of
    `num_known` whose answer is known, on which no right answer got the sum of the weights."""

    fooled_by: tuple[str, ...] = ()
    num_right_refused: int = 0
    num_known: int = 0

    @property
    def refuses_right(self) -> bool:
        """Whether right answers do not get full marks, on half of the tasks or more."""
        return self.num_known > 0 and 2 * self.num_right_refused >= self.num_known

    @property
    def is_sound(self) -> bool:
        """Whether the rewards may be trained on."""
        return not self.fooled_by and not self.refuses_right

    @property
    def sentence(self) -> str:
        """What is wrong."""
        parts = [f"{name} gets full marks" for name in self.fooled_by]
        if self.refuses_right:
            parts.append(f"the right answer gets no full marks on {self.num_right_refused} of {self.num_known} tasks")
        return "; ".join(parts) or "no wrong answer gets full marks"


@dataclass(frozen=True, slots=True)
class Trial:
    """The marks of one task's canaries."""

    wrong: Mapping[str, float | None]
    right: float | None
    is_known: bool


def wrong_answers(prompt: str, answer: str) -> dict[str, str]:
    """Completions that are wrong, by name; those left out that happen to be the answer."""
    found = {**WRONG, THE_PROMPT: prompt}
    return {name: text for name, text in found.items() if not answer or text.strip() != answer.strip()}


def judge(trials: Sequence[Trial], full: float) -> Verdict:
    """The verdict on marks; `full` is the sum of the weights."""
    fooled: dict[str, list[bool]] = defaultdict(list)
    for trial in trials:
        enough = full if trial.right is None else min(full, trial.right) if trial.right > 0 else full
        for name, mark in trial.wrong.items():
            fooled[name].append(mark is not None and mark >= enough - TOLERANCE)
    known = [trial for trial in trials if trial.is_known]
    refused = [trial for trial in known if trial.right is None or trial.right < full - TOLERANCE]
    by = tuple(name for name, wins in fooled.items() if 2 * sum(wins) >= len(wins))
    return Verdict(by, len(refused), len(known))


async def ask(grader: Grader, indices: Iterable[int]) -> Verdict:
    """Has the tasks with these indices graded. Raises as `Grader.prompts` does."""
    full = sum(max(spec.weight, 0.0) for spec in grader.plan.rewards)
    keys = [TaskKey(grader.environment_name, CANARY_SEED, index) for index in indices]
    samples = zip(keys, await grader.columns(keys), strict=True)
    trials = [await _try(grader, key, sample.prompt, json.loads(sample.columns)["answer"]) for key, sample in samples]
    return judge(trials, full)


async def _try(grader: Grader, key: TaskKey, prompt: str, answer: str | None) -> Trial:
    wrong = wrong_answers(prompt, answer or "")
    right = [form.format(answer=answer) for form in RIGHT] if answer else []
    marks = await grader.scores([(key, text) for text in (*wrong.values(), *right)])
    good = [mark for mark in marks[len(wrong) :] if mark is not None]
    return Trial(dict(zip(wrong, marks, strict=False)), max(good, default=None), bool(answer))


async def check(grader: Grader, *, is_allowed: bool) -> None:
    """What a coordinator does before it serves. Raises `GraderFooledError` unless the run allows such rewards."""
    verdict = await ask(grader, range(NUM_TASKS))
    if verdict.is_sound:
        return
    log.error("the canary found the rewards unsound", why=verdict.sentence)
    if not is_allowed:
        raise GraderFooledError(
            "the rewards of this run are refused",
            why=verdict.sentence,
            remedy="Mend them, or set `task.allow_fooled_grader = true` in the run file.",
        )


async def watch(grader: Grader, *, period_s: float = PERIOD_S) -> None:
    """Asks again from time to time, about other tasks, and logs what it finds; until cancelled."""
    start = NUM_TASKS
    while True:
        await asyncio.sleep(period_s)
        try:
            verdict = await ask(grader, range(start, start + NUM_TASKS))
        except HexcombError as error:
            log.error("the canary got no answer", why=error.sentence())
            start = 0  # there may be no more tasks
            continue
        start += NUM_TASKS
        if not verdict.is_sound:
            log.error("the canary found the rewards unsound", why=verdict.sentence)
