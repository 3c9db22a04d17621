"""Held-out accuracy: only who was asked may answer, only what was asked counts, and the coordinator scores it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.grader import Grader, Pair
from node.orders import EvaluationRequested, RoleAssigned
from protocol.errors import EngineError, NotEnrolledError, RolloutMalformedError, UsageError, WorkRefusedError
from protocol.gym_tasks import make_environment
from protocol.ids import TaskKey, Version
from protocol.tasks import regenerate
from protocol.tokens import load_tokenizer
from tests.coordinator.office import DEADLINE_S, SUMS, Member, Office, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TASKS = 4
V0 = Version(0)


@pytest_asyncio.fixture(loop_scope="session")
async def office(grader: Grader, base: Path, make_home: Callable[[], Path]) -> AsyncIterator[Office]:
    async with serving(grader, base, make_home, evaluation={"every": 1, "tasks": NUM_TASKS}) as running:
        yield running


async def asked(office: Office) -> tuple[Member, Member, EvaluationRequested]:
    """A trainer that was asked for version 0, a node that was not, and the order."""
    trainer, rollout = await office.swarm()
    trainer.load(*office.head)
    return trainer, rollout, await trainer.wait_for(EvaluationRequested)


async def answer(member: Member, order: EvaluationRequested, completions: Sequence[tuple[int, ...]]) -> None:
    await member.control.submit_evaluation(order.version, tasks=order.tasks, completions=completions)


def answers(base: Path, tasks: Sequence[TaskKey]) -> list[tuple[int, ...]]:
    environment, tokenizer = make_environment(SUMS), load_tokenizer(base)
    return [tokenizer.encode(regenerate(environment, key).answer) for key in tasks]


def accuracy(office: Office) -> float | None:
    value: float | None = office.core.state.head.accuracy
    return value


async def test_the_accuracy_is_what_the_coordinator_scores(office: Office, base: Path) -> None:
    trainer, _, order = await asked(office)
    assert (order.version, len(order.tasks)) == (0, NUM_TASKS)
    assert all(key.environment == "chain_sum#held-out" for key in order.tasks)
    right = answers(base, order.tasks)
    await answer(trainer, order, [*right[:3], (7,)])
    assert accuracy(office) == 0.75
    assert office.core.state.head.num_tasks == NUM_TASKS
    before = office.state()
    await answer(trainer, order, right)  # as a node does that missed the answer: it is recorded once
    assert office.state() == before


async def test_nobody_else_may_answer(office: Office, base: Path) -> None:
    trainer, rollout, order = await asked(office)
    right = answers(base, order.tasks)
    with office.refuses(WorkRefusedError, match="not asked for version 0"):
        await answer(rollout, order, right)
    for version in (1, -1, 2**63 - 1):
        with office.refuses(WorkRefusedError, match=f"not asked for version {version}"):
            await trainer.control.submit_evaluation(Version(version), tasks=order.tasks, completions=right)
    await answer(trainer, order, right)
    assert accuracy(office) == 1.0


async def test_an_answer_to_other_questions_is_refused(office: Office, base: Path) -> None:
    trainer, _, order = await asked(office)
    right = answers(base, order.tasks)
    other = TaskKey("chain_sum", 7, 0)
    cases: list[tuple[Sequence[TaskKey], Sequence[tuple[int, ...]]]] = [
        ([], []),
        (order.tasks[:3], right[:3]),
        (order.tasks[::-1], right[::-1]),
        ([*order.tasks[:3], other], right),
        ([*order.tasks, other], [*right, (7,)]),
        ([order.tasks[0]] * NUM_TASKS, right),
        ([*order.tasks[:3], TaskKey("x" * 1000, 0, 0)], right),
        (order.tasks, [*right[:3], (-1,)]),
        (order.tasks, [*right[:3], (64,)]),
        (order.tasks, [*right[:3], (2**31 - 1,)]),
        (order.tasks, [*right[:3], (7,) * 5]),
    ]
    for tasks, completions in cases:
        with office.refuses(RolloutMalformedError):
            await trainer.control.submit_evaluation(V0, tasks=tasks, completions=completions)
    assert accuracy(office) is None
    await answer(trainer, order, right)
    assert accuracy(office) == 1.0


async def test_a_trainer_that_was_asked_first_may_answer_after_the_second(
    grader: Grader, base: Path, make_home: Callable[[], Path]
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "evaluation": {"every": 1, "tasks": NUM_TASKS},
        "nodes": {"trainers": 2, "expected": 3},
        "limits": {"heartbeat_s": 30.0},
    }
    async with serving(grader, base, make_home, **changes) as office:
        rollout, *trainers = [await office.join(role=role) for role in ("rollout", "trainer", "trainer")]
        for member in (rollout, *trainers):
            await member.hello()
        for trainer in trainers:
            while (await trainer.wait_for(RoleAssigned)).role != "trainer":
                pass
            trainer.load(*office.head)
        first = await office.until(lambda: office.core.soft.asked)
        trainers.sort(key=lambda trainer: trainer.identity.peer_id != first.peer_id)
        order = await trainers[0].wait_for(EvaluationRequested)
        live = office.core.soft.live
        await office.until(lambda: all(live[each.identity.peer_id].presence.version == 0 for each in trainers))
        office.clock.offset_ms = 31_000
        assert await trainers[1].wait_for(EvaluationRequested) == order
        await answer(trainers[0], order, answers(base, order.tasks))
        assert accuracy(office) == 1.0


async def test_what_the_grader_could_not_score_is_left_out(
    office: Office, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, order = await asked(office)
    rewards: list[float | None] = [None] * NUM_TASKS

    async def scores(self: Grader, pairs: Sequence[Pair]) -> tuple[float | None, ...]:
        return tuple(rewards)

    monkeypatch.setattr(Grader, "scores", scores)
    with office.refuses(EngineError, match="asks again"):
        await answer(trainer, order, answers(base, order.tasks))
    rewards[:] = [1.0, None, 0.0, None]
    await answer(trainer, order, answers(base, order.tasks))
    assert (accuracy(office), office.core.state.head.num_tasks) == (0.5, 2)


async def test_a_stranger_has_no_say(office: Office) -> None:
    trainer, _, order = await asked(office)
    del office.core.state.nodes[trainer.identity.peer_id]
    with pytest.raises(NotEnrolledError):
        await answer(trainer, order, [(7,)] * NUM_TASKS)


async def test_an_environment_without_held_out_tasks_ends_the_start(
    base: Path, make_home: Callable[[], Path], grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(self: Grader, limit: int) -> list[Pair]:
        raise UsageError("the environment has no held-out prompts")

    monkeypatch.setattr(Grader, "held_out", none)
    with pytest.raises(UsageError, match="no held-out prompts"):
        async with asyncio.timeout(DEADLINE_S), serving(grader, base, make_home, evaluation={"every": 1}):
            pass
