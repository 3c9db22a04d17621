"""What is seen of others on a machine: never this node's own load, and nothing in silence."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from node.gpu import Gpus, NvmlGpus
from node.limits import Limits, may_work, not_available
from node.surroundings import (
    REOPEN_S,
    CpuReading,
    Surroundings,
    others_share,
    own_memory_bytes,
    own_pids,
    read_cpu,
)
from protocol.errors import MachineUnfitError
from tests.node.fake_gpus import FakeNvml
from tests.node.test_limits import NOON

NAMES = {1: "hexcomb", 2: "engine", 50: "blender"}


@dataclass
class Machine:
    """Four cores on a clock of its own; `others` is the share of them that other programs have."""

    now_s: float = 0.0
    busy_s: float = 0.0
    own_s: float = 0.0
    typed_quiet_s: float | None = None
    own: set[int] = field(default_factory=lambda: {1})
    nvml: FakeNvml = field(default_factory=FakeNvml)
    num_opened: int = 0

    def surroundings(self, limits: Limits, *, opener: Callable[[], Gpus] | None = None) -> Surroundings:
        return Surroundings(
            limits,
            0.2,
            opener=opener or self.open,
            sees_gpu=lambda: True,
            cpu=lambda: CpuReading(self.now_s, self.busy_s, self.own_s, 4),
            typed_quiet_s=lambda: self.typed_quiet_s,
            own=lambda: self.own,
            name_of=NAMES.get,
            clock=lambda: self.now_s,
        )

    def open(self) -> Gpus:
        self.num_opened += 1
        return NvmlGpus(self.nvml)

    def pass_time(self, seconds: float, *, others: float = 0.0, own: float = 0.0) -> None:
        self.now_s += seconds
        self.own_s += 4 * seconds * own
        self.busy_s += 4 * seconds * (own + others)


IDLE_ONLY = Limits(idle_only_s=60)


def test_idle_counts_from_the_last_use_by_others() -> None:
    machine = Machine()
    watched = machine.surroundings(IDLE_ONLY)
    assert watched.look().quiet_s == 0.0, "what was before the first look is not known"
    machine.pass_time(30, others=0.1, own=0.9)
    assert watched.look().quiet_s == 30.0
    machine.pass_time(10, others=0.5)
    busy = watched.look()
    assert (busy.quiet_s, busy.busy_with) == (0.0, "others use 50% of the processor")
    assert may_work(IDLE_ONLY, busy, NOON) == (
        False,
        "the machine is idle for 0 of 60 s: others use 50% of the processor",
    )
    machine.pass_time(60)
    assert may_work(IDLE_ONLY, watched.look(), NOON)[0]
    machine.typed_quiet_s = 2.0
    assert watched.look().quiet_s == 2.0


def test_own_load_that_counted_as_others_would_stop_the_node_for_ever() -> None:
    """The negative control: without what is its own taken off, a node that works is never alone."""
    before, after = CpuReading(0, 0, 0, 4), CpuReading(10, 40, 38, 4)
    assert others_share(before, after) == pytest.approx(0.05)
    assert others_share(before, CpuReading(10, 40, 0, 4)) == 1.0
    assert others_share(before, CpuReading(0, 0, 0, 4)) == 0.0


def test_gpu_use_by_others_is_seen_and_by_oneself_is_not() -> None:
    machine = Machine(own={1, 2})
    watched = machine.surroundings(Limits(pause_on_gpu_use=True))
    machine.nvml.users[0] = [2]
    assert watched.look().gpu_users == ()
    machine.nvml.users[0] = [2, 50]
    assert watched.look().gpu_users == ("blender",)
    machine.nvml.users[0] = [2]
    machine.pass_time(5)
    assert watched.look().gpu_quiet_s == 5.0


def test_process_numbers_of_another_world_are_somebody_elses_or_said_to_be_unknown() -> None:
    limits = Limits(pause_on_gpu_use=True)
    machine = Machine()
    watched = machine.surroundings(limits)
    machine.nvml.users[0] = [40_000]
    assert watched.look().gpu_users == ("process 40000",)
    machine.own = {1, 2}  # with an engine of its own it cannot tell
    unknown = watched.look()
    assert unknown.gpu_users == ()
    assert not_available(limits, unknown) == (
        "pause_on_gpu_use: the driver's process numbers mean nothing here, as in a container",
    )


def test_absent_gpus_are_stated_and_looked_for_again() -> None:
    limits = Limits(pause_on_gpu_use=True, power_cap_w=200, power_cap_required=True)
    machine = Machine()
    num_tried = 0

    def absent() -> Gpus:
        nonlocal num_tried
        num_tried += 1
        raise MachineUnfitError("NVIDIA's library for Python is not installed")

    watched = machine.surroundings(limits, opener=absent)
    for _ in range(3):
        facts = watched.look()
        assert [what.partition(":")[0] for what in not_available(limits, facts)] == ["pause_on_gpu_use", "power_cap_w"]
        assert not may_work(limits, facts, NOON)[0], "a GPU is there, and its cap is not"
        machine.pass_time(1)
    assert num_tried == 1
    machine.pass_time(REOPEN_S)
    watched.opener = machine.open
    facts = watched.look()
    assert not_available(limits, facts) == ()
    assert may_work(limits, facts, NOON)[0]
    assert machine.nvml.caps_mw == {0: 200_000}
    watched.leave()
    assert machine.nvml.caps_mw == {0: 300_000}


def test_a_cap_that_may_not_be_set_holds_work_back_only_where_it_is_required() -> None:
    machine = Machine(nvml=FakeNvml(may_set=False))
    for is_required in (True, False):
        limits = Limits(power_cap_w=200, power_cap_required=is_required)
        facts = machine.surroundings(limits).look()
        assert may_work(limits, facts, NOON)[0] is not is_required
        assert "only an administrator may" in not_available(limits, facts)[0]


def test_a_driver_that_fails_later_is_stated() -> None:
    limits = Limits(pause_on_gpu_use=True)
    machine = Machine()
    watched = machine.surroundings(limits)
    assert not_available(limits, watched.look()) == ()
    machine.nvml.is_broken = True
    assert "GPU is lost" in not_available(limits, watched.look())[0]
    machine.nvml.is_broken = False
    machine.pass_time(REOPEN_S)
    assert not_available(limits, watched.look()) == ()
    assert machine.num_opened == 2


def test_the_real_machine_knows_this_process_and_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert own_pids() >= {os.getpid(), child.pid}
        child.communicate(b"\n")
    before = read_cpu()
    total = sum(number * number for number in range(2_000_000))
    after = read_cpu()
    assert total > 0
    assert after.own_s > before.own_s
    assert 0.0 <= others_share(before, after) <= 1.0
    assert 10_000_000 < own_memory_bytes() < 10_000_000_000
