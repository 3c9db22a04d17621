"""The grading child: right rewards, and one answer for each completion whatever happens to the child."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator import grader as grader_module
from coordinator.grader import Grader
from coordinator.grader_worker import MAX_WRITTEN_BYTES
from coordinator.warm_child import MAX_LOSSES, over_losses
from node.tokenizer import vocabulary_of, write_tokenizer
from protocol.errors import EngineError, HexcombError, ModelMissingError, UnreachableError, UsageError
from protocol.gym_tasks import make_environment
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec
from protocol.tasks import prompt_digest, regenerate
from protocol.tokens import Tokenizer, load_tokenizer
from tests.coordinator import toy_grader
from tests.coordinator.office import SUMS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOY = EnvironmentSpec("toy")
KEY = TaskKey("toy", 0, 1)
DEADLINE_S = 1.5


class ToyGrader(Grader):
    """A grader of the toy environment; completions are words."""

    tokenizer: Tokenizer

    async def rewards(self, *words: str) -> list[float | None]:
        pairs = [(KEY, self.tokenizer.encode(word)) for word in words]
        return list(await self.scores(pairs))

    @property
    def pid(self) -> int:
        assert self._warm.child is not None
        return self._warm.child.pid


def toy_on(folder: Path, *, worker: str = "tests.coordinator.toy_grader") -> ToyGrader:
    """A grader that has not started; its files lie in the folder, which is private."""
    write_tokenizer(folder, vocabulary_of(toy_grader.WORDS), max_length=64)
    log_path = folder / "grader.log"
    grader = ToyGrader(TOY, model_dir=folder, run_dir=folder, log_path=log_path, worker=worker, deadline_s=DEADLINE_S)
    grader.tokenizer = load_tokenizer(folder)
    return grader


@pytest_asyncio.fixture(loop_scope="session")
async def toy(make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToyGrader]:
    monkeypatch.setattr(grader_module, "STOP_DEADLINE_S", 0.2)
    async with toy_on(make_home()) as running:
        yield running


# The real environment


async def test_right_and_wrong_answers_of_the_real_environment(grader: Grader, base: Path) -> None:
    environment, tokenizer = make_environment(SUMS), load_tokenizer(base)
    keys = [TaskKey("chain_sum", 7, index) for index in range(100)]
    answers = [regenerate(environment, key).answer for key in keys]
    right = [(key, (*tokenizer.encode(answer), 1)) for key, answer in zip(keys, answers, strict=True)]
    wrong = [(key, tokenizer.encode(f"{int(answer) + 1}")) for key, answer in zip(keys, answers, strict=True)]
    assert set(await grader.scores(right)) == {1.0}
    assert set(await grader.scores(wrong)) == {0.0}
    odd = [(keys[0], ()), (keys[0], (1,)), (keys[0], (2,) * 1000), (keys[0], tokenizer.encode(answers[0] + "+"))]
    assert await grader.scores(odd) == (0.0,) * 4
    assert await grader.scores([]) == ()


async def test_prompts_are_the_canonical_ones_and_the_same_again(grader: Grader, base: Path) -> None:
    environment, tokenizer = make_environment(SUMS), load_tokenizer(base)
    keys = [TaskKey("chain_sum", 3, index % 5) for index in range(12)]
    expected = tuple(environment.prompt_ids(regenerate(environment, key), tokenizer) for key in keys)
    assert await grader.prompts(keys) == expected == await grader.prompts(keys)
    assert prompt_digest(expected[0]) != prompt_digest(expected[1])
    held_out = await grader.held_out(6)
    assert [key.environment for key, _ in held_out] == ["chain_sum#held-out"] * 6
    assert len({ids for _, ids in held_out}) == 6
    assert held_out == await grader.held_out(6)


async def test_the_cache_of_prompts_is_bounded(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader_module, "MAX_CACHED_PROMPTS", 8)
    batches = [[TaskKey("chain_sum", 5, index) for index in range(start, start + 20)] for start in (0, 10, 5)]
    results = await asyncio.gather(*(grader.prompts(batch) for batch in batches))
    assert results[0][10:] == results[1][:10]
    assert results[2] == (*results[0][5:], *results[1][10:15])
    assert len(grader._prompts) == 8


async def test_a_task_of_another_environment_is_refused_and_the_child_lives(grader: Grader) -> None:
    before = grader._warm.child
    for key in (TaskKey("other", 0, 0), TaskKey("chain_sum", 0, -1)):
        with pytest.raises(UsageError):
            await grader.prompts([key])
    assert await grader.scores([(TaskKey("other", 0, 0), (7,))]) == (None,)
    assert grader._warm.child is before


async def test_a_grader_that_cannot_open_says_why_and_leaves_no_child(
    base: Path, make_home: Callable[[], Path]
) -> None:
    cases: list[tuple[EnvironmentSpec, Path, type[HexcombError]]] = [
        (EnvironmentSpec("no_such_environment"), base, UsageError),
        (EnvironmentSpec("chain_sum", {"min_terms": -1}), base, UsageError),
        (SUMS, base / "nowhere", ModelMissingError),
    ]
    run_dir = make_home()
    graders = [Grader(spec, model_dir=path, run_dir=run_dir, log_path=run_dir / "log") for spec, path, _ in cases]
    errors = await asyncio.gather(*(grader.__aenter__() for grader in graders), return_exceptions=True)
    assert [type(error) for error in errors] == [kind for _, _, kind in cases]
    assert [grader._warm.child for grader in graders] == [None] * 3


# Faults


async def test_a_fault_is_missing_and_takes_no_other_with_it(toy: ToyGrader) -> None:
    pid = toy.pid
    words = ("right", "fault", "wrong", "odd", "leave", "memory", "write", "print", "right")
    assert await toy.rewards(*words) == [1.0, None, 0.0, None, None, None, None, 1.0, 1.0]
    assert toy.pid == pid


async def test_a_hang_is_missing_within_its_limit(toy: ToyGrader) -> None:
    pid = toy.pid
    async with asyncio.timeout(10 * DEADLINE_S):
        assert await toy.rewards("right", "hang", "stubborn", "wrong") == [1.0, None, None, 0.0]
    assert toy.pid == pid


async def test_a_child_that_freezes_is_replaced_and_the_others_get_their_rewards(toy: ToyGrader) -> None:
    pid = toy.pid
    async with asyncio.timeout(10 * DEADLINE_S):
        assert await toy.rewards("right", "freeze", "wrong", "right") == [1.0, None, 0.0, 1.0]
    assert toy.pid != pid


async def test_a_completion_that_kills_the_child_takes_no_other_with_it(toy: ToyGrader) -> None:
    assert await toy.rewards("right", "die", "right", "die", "wrong") == [1.0, None, 1.0, None, 0.0]
    assert await toy.rewards("right") == [1.0]


async def test_a_child_killed_in_mid_batch_still_gives_one_answer_for_each(toy: ToyGrader) -> None:
    pid = toy.pid
    scoring = asyncio.create_task(toy.rewards("hang", *["right"] * 40, "wrong"))
    await asyncio.sleep(0)
    while toy._warm.child is None or not toy._warm.child._pending:  # noqa: ASYNC110 - the request is on its way to the child
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert await scoring == [None, *[1.0] * 40, 0.0]
    assert toy.pid != pid


async def test_prompts_that_kill_or_freeze_the_child_are_errors_and_the_next_ones_come(toy: ToyGrader) -> None:
    with pytest.raises(EngineError, match="SIGKILL"):
        await toy.prompts([TaskKey("toy", 0, 13)])
    with pytest.raises(UnreachableError):
        await toy.prompts([TaskKey("toy", 0, 14)])
    (prompt,) = await toy.prompts([TaskKey("toy", 0, 12)])
    assert prompt[-1] == 12


async def test_a_child_lost_while_the_coordinator_starts_is_asked_again(toy: ToyGrader) -> None:
    before = toy.pid
    os.kill(before, signal.SIGSTOP)
    asking = asyncio.create_task(toy.held_out(3))
    await asyncio.sleep(0)  # it has asked
    os.kill(before, signal.SIGKILL)
    assert [key.index for key, _ in await asking] == [0, 1, 2]
    assert toy.pid != before
    with pytest.raises(EngineError):
        await toy.held_out(14)  # the last of them ends the child, however often it is asked


@pytest.mark.parametrize("num_losses", [MAX_LOSSES - 1, MAX_LOSSES])
async def test_several_children_may_be_lost_one_after_the_other(num_losses: int) -> None:
    outcomes: list[str | EngineError] = [EngineError("the child was lost")] * num_losses + ["made"]

    async def ask() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    if num_losses < MAX_LOSSES:
        assert await over_losses(ask) == "made"
    else:
        with pytest.raises(EngineError):
            await over_losses(ask)
        assert outcomes == ["made"], "it was asked no more"


async def test_a_child_that_cannot_start_leaves_rewards_missing(toy: ToyGrader) -> None:
    os.kill(toy.pid, signal.SIGKILL)
    toy._warm.worker = "tests.coordinator.no_such_module"
    assert await toy.rewards("right", "wrong") == [None, None]
    toy._warm.worker = "tests.coordinator.toy_grader"
    assert await toy.rewards("right", "wrong") == [1.0, 0.0]


# Limits


async def test_the_child_is_confined(toy: ToyGrader) -> None:
    (prompt,) = await toy.prompts([KEY])
    memory, written, core, num_variables, _ = prompt
    assert (memory, written, core) == (toy_grader.MEMORY_BYTES, MAX_WRITTEN_BYTES, 0)
    assert num_variables <= 7


async def test_without_the_limits_the_same_code_gets_its_memory(make_home: Callable[[], Path]) -> None:
    async with toy_on(make_home(), worker="tests.coordinator.loose_grader") as loose:
        (prompt,) = await loose.prompts([KEY])
        assert prompt[0] == -1 or prompt[0] > 2 * toy_grader.MEMORY_BYTES
        assert await loose.rewards("memory", "right") == [1.0, 1.0]


async def test_what_the_environment_prints_does_not_fill_the_disk(make_home: Callable[[], Path]) -> None:
    folder = make_home()
    async with toy_on(folder) as toy:
        assert await toy.rewards(*["print"] * 4, "right") == [1.0] * 5
    assert (folder / "grader.log").stat().st_size < 2 << 20
