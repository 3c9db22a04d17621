"""A node that its owner stops: leases or the round end first, for a bounded time; then no job runs until it may."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node import work as working
from node.state import NodeState
from node.work import Work
from protocol.ids import Version
from protocol.run import Role
from tests.node.fakes import SPEC, until


class Job:
    """A job that runs until it is cancelled; `has_work` is the test's."""

    def __init__(self) -> None:
        self.has_work, self.is_running = False, False
        self.num_leases = 0

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False


class Bench:
    """A node whose jobs do nothing; `jobs` are those that were begun."""

    def __init__(self, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = NodeState(role=role, spec=SPEC)
        self.jobs: list[Job] = []
        self.num_beats = self.num_ended = 0
        self.begins_with_work = False
        node = SimpleNamespace(
            state=self.state,
            spec=SPEC,
            versions=SimpleNamespace(head=Version(1), held=[Version(1)]),
            session=SimpleNamespace(beat_now=self._beat),
            start_compute=self._start,
        )
        self.work = Work(cast(Any, node))
        monkeypatch.setattr(working, "RolloutWork", self._job)
        monkeypatch.setattr(working, "TrainingSession", self._job)

        async def nothing() -> None:
            return

        monkeypatch.setattr(self.work, "_measure", nothing)

    def _beat(self) -> None:
        self.num_beats += 1

    async def _start(self) -> Any:
        async def terminate() -> None:
            self.num_ended += 1

        return SimpleNamespace(terminate=terminate)

    def _job(self, *_: Any) -> Job:
        self.jobs.append(Job())
        self.jobs[-1].has_work = self.begins_with_work
        return self.jobs[-1]

    def say(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.state, name, value)
        self.state.changed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.work._follow_roles())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("role", ["rollout", "trainer"])
async def test_a_paused_node_ends_its_job_when_nobody_counts_on_it(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(role, monkeypatch)
    bench.begins_with_work = True
    async with bench.running():
        await until(lambda: len(bench.jobs) == 1 and bench.jobs[0].is_running)
        bench.say(paused="by its owner")
        for _ in range(50):
            await asyncio.sleep(0)
        assert bench.jobs[0].is_running, "leases and rounds end first"
        assert bench.state.acting_role == role
        bench.jobs[0].has_work = False
        bench.state.changed()
        await until(lambda: bench.state.resting)
        assert not bench.jobs[0].is_running
        assert bench.num_ended == 1
        assert bench.state.acting_role == "idle"
        await until(lambda: bench.state.activity == "paused: by its owner")
        assert bench.num_beats > 0, "the coordinator hears of it at once"
        bench.say(paused="")
        await until(lambda: len(bench.jobs) == 2 and bench.jobs[1].is_running)
        assert bench.state.acting_role == role


async def test_what_does_not_end_in_time_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "LEASES_END_S", 0.05)
    bench = Bench("rollout", monkeypatch)
    bench.begins_with_work = True
    async with bench.running():
        await until(lambda: len(bench.jobs) == 1 and bench.jobs[0].is_running)
        begun_s = time.monotonic()
        bench.say(limited="outside its hours (22:00-07:00)")
        await until(lambda: bench.state.resting)
        assert 0.04 < time.monotonic() - begun_s < 10
        assert not bench.jobs[0].is_running


async def test_a_node_that_may_go_on_meanwhile_keeps_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("rollout", monkeypatch)
    bench.begins_with_work = True
    async with bench.running():
        await until(lambda: len(bench.jobs) == 1 and bench.jobs[0].is_running)
        bench.say(paused="by its owner")
        await asyncio.sleep(0)
        bench.say(paused="")
        for _ in range(50):
            await asyncio.sleep(0)
        bench.jobs[0].has_work = False
        bench.state.changed()
        for _ in range(50):
            await asyncio.sleep(0)
        assert bench.jobs[0].is_running
        assert len(bench.jobs) == 1


async def test_a_node_that_may_not_work_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("rollout", monkeypatch)
    bench.state.limited = "its owner's limits are being looked at"
    async with bench.running():
        await until(lambda: bench.state.resting)
        assert bench.jobs == []
        bench.say(role="trainer")
        for _ in range(50):
            await asyncio.sleep(0)
        assert bench.jobs == []
        bench.say(limited="")
        await until(lambda: len(bench.jobs) == 1)


async def test_finishing_waits_for_the_work_or_for_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("rollout", monkeypatch)
    bench.begins_with_work = True
    async with bench.running():
        await until(lambda: len(bench.jobs) == 1 and bench.jobs[0].is_running)
        bench.say(finishing=True)
        begun_s = time.monotonic()
        await bench.work.wait_until_idle(lambda: begun_s + 0.05)
        assert time.monotonic() - begun_s >= 0.05
        assert bench.work.has_work
        waiting = asyncio.create_task(bench.work.wait_until_idle(lambda: None))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        bench.jobs[0].has_work = False
        bench.state.changed()
        async with asyncio.timeout(10):
            await waiting


async def test_too_much_memory_ends_the_job_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("rollout", monkeypatch)
    async with bench.running():
        await until(lambda: len(bench.jobs) == 1 and bench.jobs[0].is_running)
        bench.say(memory_trouble="2.50 GB of memory are in use, its owner allows 2.00 GB")
        await until(lambda: bench.state.counts["jobs failed"] == 1)
        assert "its owner allows 2.00 GB" in bench.state.trouble
        assert not bench.jobs[0].is_running
        assert bench.num_ended == 1
