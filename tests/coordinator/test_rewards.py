"""Reward functions: the sum that they make, and bad citizens, whose samples are missing while others get theirs."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from coordinator import rewards as rewards_module
from coordinator.grader import Grader
from coordinator.grading import RewardPlan, RewardSpec, Sample, Values
from coordinator.reward_worker import values_of
from coordinator.rewards import FAULT, Rewards, Value, total
from node.tokenizer import vocabulary_of, write_tokenizer
from protocol.errors import UsageError
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec
from protocol.tokens import load_tokenizer
from tests.coordinator import toy_grader
from tests.coordinator.office import SUMS
from tests.house.tree import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="session")

CITIZENS = Path(__file__).with_name("citizens")
KEY = TaskKey("toy", 0, 1)
TIMEOUT_S = 0.5
MEMORY_BYTES = 1 << 30
PATIENCE_S = 20.0


def plan_of(*functions: str | RewardSpec, **changes: Any) -> RewardPlan:
    specs = tuple(one if isinstance(one, RewardSpec) else RewardSpec(one) for one in functions)
    limits = {"timeout_s": TIMEOUT_S, "memory_bytes": MEMORY_BYTES, "folder": str(CITIZENS)}
    return RewardPlan(specs, **{**limits, **changes})


@asynccontextmanager
async def grading(folder: Path, plan: RewardPlan) -> AsyncIterator[Grader]:
    """A grader of the toy environment with these rewards."""
    write_tokenizer(folder, vocabulary_of(toy_grader.WORDS), max_length=64)
    toy, log_path = EnvironmentSpec("toy"), folder / "grader.log"
    worker = "tests.coordinator.toy_grader"
    async with Grader(toy, model_dir=folder, run_dir=folder, log_path=log_path, plan=plan, worker=worker) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hx")
    made.chmod(0o700)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def obedient(folder: Path) -> AsyncIterator[Grader]:
    """One grader for all bad citizens: each must leave it to the next as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards_module, "GRACE_S", 0.5)
        async with grading(folder, plan_of("obedient:obey")) as running:
            yield running


async def scores(grader: Grader, *texts: str) -> list[float | None]:
    async with asyncio.timeout(PATIENCE_S):
        return list(await grader.scores([(KEY, text) for text in texts]))


# The sum


@pytest.mark.parametrize(
    ("weights", "values", "expected"),
    [
        ([1.0], [0.5], 0.5),
        ([1.0, 0.5], [1.0, -1.0], 0.5),
        ([1.0, 0.5], [None, 1.0], 0.5),
        ([1.0, 0.5], [None, None], None),
        ([1.0, 0.5], [1.0, FAULT], None),
        ([1.0, 0.0], [1.0, FAULT], None),
        ([1.0, 2.0], [0.0, None], 0.0),
        ([], [], None),
    ],
)
async def test_the_weighted_sum_leaves_out_none_and_is_missing_after_a_fault(
    weights: list[float], values: list[Value], expected: float | None
) -> None:
    assert total(weights, values) == expected


async def test_what_is_no_number_is_a_fault_of_its_place_alone() -> None:
    returned = [1, True, 0.25, None, float("nan"), float("-inf"), "1", [1.0], 1j]
    assert values_of(returned, 9) == Values((1.0, 1.0, 0.25, None, None, None, None, None, None), (4, 5, 6, 7, 8))
    for wrong in (returned, None, 1.0, {"0": 1.0}, (1.0,)):
        with pytest.raises(ValueError, match="for 8 completions"):
            values_of(wrong, 8)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Values((1.0, None), ()), [1.0, None]),
        (Values((1.0, 0.5), (1,)), [1.0, FAULT]),
        (Values((float("inf"), float("nan")), ()), [FAULT, FAULT]),
        (Values((1e7, -1e7), ()), [FAULT, FAULT]),
        (Values((1.0, 1.0, 1.0), ()), [FAULT, FAULT]),
    ],
)
async def test_the_word_of_the_process_is_checked_again(
    make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, answer: Values, expected: list[Value]
) -> None:
    async def say(*_: object, **__: object) -> Values:
        return answer

    folder = make_home()
    rewards = Rewards(plan_of("graders:exact"), run_dir=folder, log_path=folder / "log")
    monkeypatch.setattr(rewards.warm, "request", say)
    assert await rewards.values(0, [Sample("", "", (), "{}")] * 2) == expected


async def test_several_rewards_are_weighed_sync_and_async_text_and_chat(make_home: Callable[[], Path]) -> None:
    plan = plan_of(
        RewardSpec("environment", 1.0),
        RewardSpec("graders:has_tags", 0.5, is_chat=True),
        RewardSpec("graders:short", 0.25),
    )
    folder = make_home()
    async with grading(folder, plan) as grader:
        assert await scores(grader, "right", "") == [1.0 - 0.25, 0.0]
        assert await grader.scores([(KEY, (7, 8))]) == (0.0 - 0.5,)
        num_tokens = len(load_tokenizer(folder).encode("<answer>"))
        assert await scores(grader, "<answer>") == [0.5 - 0.25 * num_tokens]


async def test_columns_of_the_task_arrive_as_lists(base: Path, make_home: Callable[[], Path]) -> None:
    folder = make_home()
    plan, log_path = plan_of("graders:columns"), folder / "log"
    async with Grader(SUMS, model_dir=base, run_dir=folder, log_path=log_path, plan=plan) as grader:
        keys = [TaskKey(SUMS.name, 0, index) for index in range(70)]
        assert await grader.scores([(key, (7,)) for key in keys]) == (2.0,) * 70


# Bad citizens


@pytest.mark.parametrize(
    "word",
    [
        *("loop", "stubborn", "freeze", "raise", "alien", "recurse", "exit", "leave", "crash", "allocate", "hoard"),
        *("print", "spill", "fork", "bomb", "threads", "kill", "murder", "massacre", "notice", "throttle", "replace"),
        *("network", "socket", "file", "garbage", "flood", "too many", "nan", "inf", "string", "huge"),
        *("read /etc/shadow", "read /proc/self/environ", "list /root", "chmod .", "write here"),
    ],
)
async def test_a_bad_citizen_is_missing_and_its_neighbours_are_graded(obedient: Grader, word: str) -> None:
    assert await scores(obedient, "right", word, "wrong", "right") == [1.0, None, 0.0, 1.0]
    assert await scores(obedient, "wrong", "right", "ignore") == [0.0, 1.0, None]


async def test_functions_see_nothing_of_the_coordinators_environment(obedient: Grader) -> None:
    assert await scores(obedient, "environment") == [0.0]


async def test_the_log_of_bad_citizens_stays_small(obedient: Grader, folder: Path) -> None:
    before = (folder / "rewards.log").stat().st_size if (folder / "rewards.log").exists() else 0
    assert await scores(obedient, *["print", "spill", "right"] * 3) == [None, None, 1.0] * 3
    assert (folder / "rewards.log").stat().st_size < before + (2 << 20)


async def test_a_function_that_sleeps_or_blocks_in_a_coroutine_is_missing(
    make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_module, "GRACE_S", 0.5)
    async with grading(make_home(), plan_of("obedient:obey_later")) as grader:
        for word in ("sleep", "block"):
            assert await scores(grader, "right", word, "wrong") == [1.0, None, 0.0]
        assert await scores(grader, "right", "linger", "wrong") == [1.0, 1.0, 0.0]


async def test_prompts_come_while_a_function_hangs(obedient: Grader) -> None:
    hanging = asyncio.create_task(scores(obedient, "stubborn"))
    async with asyncio.timeout(PATIENCE_S):
        prompts = await obedient.prompts([TaskKey("toy", 0, 900), TaskKey("toy", 0, 901)])
    assert [ids[-1] for ids in prompts] == [900, 901]
    assert not hanging.done()
    assert await hanging == [None]


async def test_without_the_sandbox_the_same_words_succeed(
    make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_module, "WORKER", "tests.coordinator.loose_rewards")
    folder = make_home()
    secret = folder / "secret"
    secret.write_text("s")
    words = [f"read {secret}", f"list {folder}", f"chmod {secret}", f"write {secret}", "fork", "notice", "socket"]
    with capture_logs() as logs:
        async with grading(folder, plan_of("obedient:obey")) as grader:
            assert await scores(grader, *words) == [1.0] * len(words)
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warning["lacks"]) == 4


@pytest.mark.parametrize("name", ["no_such_module:reward", "graders:no_such_function", "graders:NOTHING"])
async def test_a_function_that_cannot_be_had_ends_the_start(make_home: Callable[[], Path], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        async with grading(make_home(), plan_of(name)):
            raise AssertionError


async def test_a_replay_needs_no_reward() -> None:
    code = (
        "import sys, coordinator.replay; print(*[name for name in sys.modules if 'reward' in name or 'grad' in name])"
    )
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await done.communicate()
    assert (done.returncode, out.strip()) == (0, b"")


# math-verify


async def test_math_verify_compares_by_meaning_and_keeps_our_limits(base: Path, make_home: Callable[[], Path]) -> None:
    folder = make_home()
    plan, log_path = plan_of("math-verify", timeout_s=3.0), folder / "log"
    async with Grader(SUMS, model_dir=base, run_dir=folder, log_path=log_path, plan=plan) as grader:
        key = TaskKey(SUMS.name, 0, 3)
        answer = (await grader.columns([key]))[0].columns.partition('"answer": "')[2].partition('"')[0]
        right = [answer, f"\\boxed{{{answer}.0}}", f"\\boxed{{\\frac{{{2 * int(answer)}}}{{2}}}}"]
        texts = [*right, f"{int(answer) + 1}", "", "\\boxed{9^{9^{9^{9}}}}", answer]
        marks = await grader.scores([(key, text) for text in texts])
        assert marks == (1.0, 1.0, 1.0, 0.0, 0.0, None, 1.0)
