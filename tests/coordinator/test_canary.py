"""The canary: rewards that can be fooled are found out, sound ones are not, and a coordinator refuses the former."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator import canary
from coordinator.canary import Trial, Verdict, judge, wrong_answers
from coordinator.grader import Grader
from coordinator.grading import RewardPlan, RewardSpec
from protocol.errors import GraderFooledError
from protocol.run import EnvironmentSpec
from tests.coordinator.office import SUMS

pytestmark = pytest.mark.asyncio(loop_scope="session")

CITIZENS = Path(__file__).with_name("citizens")
DEADLINE_S = 20.0


@asynccontextmanager
async def grading(
    base: Path, folder: Path, *specs: RewardSpec, environment: EnvironmentSpec = SUMS
) -> AsyncIterator[Grader]:
    plan = RewardPlan(specs, folder=str(CITIZENS))
    async with Grader(environment, model_dir=base, run_dir=folder, log_path=folder / "log", plan=plan) as running:
        yield running


# The verdict


def trial(right: float | None = 1.0, is_known: bool = True, **wrong: float | None) -> Trial:
    return Trial(wrong, right, is_known)


@pytest.mark.parametrize(
    ("trials", "fooled_by", "refuses"),
    [
        ([trial(a=0.0, b=None)], (), False),
        ([trial(a=0.99), trial(a=0.0)], (), False),
        ([trial(a=1.0, b=0.0), trial(a=0.0, b=0.0)], ("a",), False),
        ([trial(a=1.0), trial(a=0.0), trial(a=0.0)], (), False),
        ([trial(a=1.0), trial(b=0.0), trial(b=0.0)], ("a",), False),
        ([trial(right=None, a=0.0)], (), True),
        ([trial(right=0.0, a=0.0)], (), True),
        ([trial(right=0.7, a=0.7)], ("a",), True),
        ([trial(right=0.7, a=0.6)], (), True),
        ([trial(right=3.0, a=1.0)], ("a",), False),
        ([trial(right=None, is_known=False, a=0.9)], (), False),
        ([trial(right=None, is_known=False, a=1.0)], ("a",), False),
        ([], (), False),
    ],
)
async def test_the_verdict(trials: list[Trial], fooled_by: tuple[str, ...], refuses: bool) -> None:
    verdict = judge(trials, 1.0)
    assert (verdict.fooled_by, verdict.refuses_right) == (fooled_by, refuses)
    assert verdict.is_sound == (not fooled_by and not refuses)


async def test_an_answer_that_happens_to_be_right_is_no_canary() -> None:
    assert canary.THE_PROMPT in wrong_answers("2+2=", "4")
    assert canary.THE_PROMPT not in wrong_answers("4 ", "4")
    assert "nothing" in wrong_answers("write nothing", "")
    longest = max(map(len, wrong_answers("2+2=", "4").values()))
    assert longest == canary.LONG_CHARS


# Real rewards


async def test_sound_rewards_are_left_alone(grader: Grader, base: Path, make_home: Callable[[], Path]) -> None:
    await canary.check(grader, is_allowed=False)
    specs = RewardSpec("graders:exact"), RewardSpec("graders:short", 0.0)
    async with grading(base, make_home(), *specs) as running:
        await canary.check(running, is_allowed=False)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (RewardSpec("graders:contains"), {"all numbers from 0 to 999"}),
        (RewardSpec("graders:always"), {*canary.WRONG, canary.THE_PROMPT}),
        (RewardSpec("graders:has_tags", is_chat=True), {"an empty <answer>", "an empty <think> and <answer>"}),
    ],
)
async def test_rewards_that_can_be_fooled_are_found_out(
    base: Path, make_home: Callable[[], Path], spec: RewardSpec, names: set[str]
) -> None:
    async with grading(base, make_home(), spec) as running:
        verdict = await canary.ask(running, range(canary.NUM_TASKS))
        assert set(verdict.fooled_by) == names
        with pytest.raises(GraderFooledError, match="full marks"):
            await canary.check(running, is_allowed=False)
        with capture_logs() as logs:
            await canary.check(running, is_allowed=True)
        assert [entry["why"] for entry in logs] == [verdict.sentence]


async def test_a_prompt_that_states_the_answer_fools_comparison_by_meaning(
    base: Path, make_home: Callable[[], Path]
) -> None:
    wordy = EnvironmentSpec("chain_sum")  # "... of the following arithmetic problem: 4 - 1 ="
    async with grading(base, make_home(), RewardSpec("math-verify"), environment=wordy) as running:
        assert (await canary.ask(running, range(canary.NUM_TASKS))).fooled_by == (canary.THE_PROMPT,)


async def test_a_task_without_a_known_answer_has_no_right_canary(base: Path, make_home: Callable[[], Path]) -> None:
    async with grading(base, make_home(), RewardSpec(), environment=EnvironmentSpec("graph_color")) as running:
        verdict = await canary.ask(running, range(2))
    assert (verdict.is_sound, verdict.num_known) == (True, 0)


async def test_rewards_that_refuse_right_answers_are_found_out(base: Path, make_home: Callable[[], Path]) -> None:
    async with grading(base, make_home(), RewardSpec("graders:never")) as running:
        assert await canary.ask(running, range(4)) == Verdict((), 4, 4)
        with pytest.raises(GraderFooledError, match="right answer"):
            await canary.check(running, is_allowed=False)


async def test_the_watch_asks_again(base: Path, make_home: Callable[[], Path]) -> None:
    async with grading(base, make_home(), RewardSpec("graders:contains")) as running:
        with capture_logs() as logs:
            watching = asyncio.create_task(canary.watch(running, period_s=0.01))
            async with asyncio.timeout(DEADLINE_S):
                while len(logs) < 2:  # noqa: ASYNC110 - it only logs
                    await asyncio.sleep(0.01)
            watching.cancel()
    assert all("all numbers" in entry["why"] for entry in logs)
