"""The watch that keeps to the owner's limits: before the first look no work, every change with its reason."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime

from structlog.testing import capture_logs

from node.limits import Limits, parse_hours
from node.owner import NOT_LOOKED, OwnerWatch
from node.state import NodeState
from tests.node.fakes import until
from tests.node.test_limits import NOON
from tests.node.test_surroundings import Machine

NIGHT = Limits(hours=parse_hours("22:00-07:00"), hours_text="22:00-07:00")


class Watched:
    """A node's state under a watch; `now` is the local time, `memory_bytes` what the node takes."""

    def __init__(self, limits: Limits, *, memory_limit_bytes: int = 0) -> None:
        self.state, self.machine = NodeState(), Machine()
        self.now: datetime = NOON
        self.memory_bytes, self.num_changes = 0, 0
        self.watch = OwnerWatch(
            self.state,
            self.machine.surroundings(limits),
            memory_bytes=memory_limit_bytes,
            on_change=self.note,
            now=lambda: self.now,
            own_memory=lambda: self.memory_bytes,
            every_s=0.001,
            look_deadline_s=0.05,
        )

    def note(self) -> None:
        self.num_changes += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watch.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_without_limits_there_is_nothing_to_look_at() -> None:
    watched = Watched(Limits())
    assert watched.state.unwilling == ""
    await watched.watch.run()
    assert watched.num_changes == 0


async def test_hours_hold_work_back_and_let_it_go_on_with_a_word_each_time() -> None:
    watched = Watched(NIGHT)
    assert watched.state.unwilling == f"paused: {NOT_LOOKED}", "no work before the first look"
    with capture_logs() as said:
        async with watched.running():
            await until(lambda: watched.state.limited != NOT_LOOKED)
            assert watched.state.unwilling == "paused: outside its hours (22:00-07:00)"
            watched.now = NOON.replace(hour=23)
            await until(lambda: not watched.state.unwilling)
            watched.now = NOON.replace(hour=7)
            await until(lambda: bool(watched.state.unwilling))
    told = [(entry["event"], entry["why"]) for entry in said]
    assert told == [
        ("work is held back", "outside its hours (22:00-07:00)"),
        ("work is allowed", "within its owner's limits"),
        ("work is held back", "outside its hours (22:00-07:00)"),
    ]
    assert watched.num_changes == 2, "the coordinator hears of it at once"


async def test_a_limit_that_is_not_available_is_in_the_log_and_in_the_state() -> None:
    watched = Watched(Limits(power_cap_w=200))
    watched.machine.nvml.may_set = False
    with capture_logs() as said:
        async with watched.running():
            await until(lambda: bool(watched.state.not_available))
    assert "only an administrator may" in watched.state.not_available[0]
    assert [entry["event"] for entry in said].count("limit not available") == 1
    assert watched.state.unwilling == ""


async def test_power_is_given_back_at_the_end() -> None:
    watched = Watched(Limits(power_cap_w=200))
    async with watched.running():
        await until(lambda: watched.machine.nvml.caps_mw == {0: 200_000})
    assert watched.machine.nvml.caps_mw == {0: 300_000}


async def test_too_much_memory_is_told() -> None:
    watched = Watched(Limits(), memory_limit_bytes=2_000_000_000)
    async with watched.running():
        watched.memory_bytes = 2_500_000_000
        await until(lambda: bool(watched.state.memory_trouble))
        assert watched.state.memory_trouble == "2.50 GB of memory are in use, its owner allows 2.00 GB"
        watched.memory_bytes = 2_000_000_000
        await until(lambda: not watched.state.memory_trouble)
    assert watched.state.unwilling == "", "it is a failure of the job, not a pause"


async def test_a_driver_that_hangs_stops_nothing_else() -> None:
    watched = Watched(replace(NIGHT, pause_on_gpu_use=True))
    released, num_looks = threading.Event(), 0

    def hang() -> bool:
        nonlocal num_looks
        num_looks += 1
        return released.wait(20)

    watched.watch._surroundings.sees_gpu = hang
    try:
        async with watched.running():
            await until(lambda: bool(watched.state.not_available))
            assert "did not say" in watched.state.not_available[0]
            assert "outside its hours" in watched.state.unwilling
            watched.now = NOON.replace(hour=23)
            await until(lambda: not watched.state.unwilling)
            assert num_looks == 1
            released.set()
            await until(lambda: not watched.state.not_available)
    finally:
        released.set()
