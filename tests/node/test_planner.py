"""The rollout node's planner: one action for each situation, and none that starves another."""

import math
from dataclasses import replace

import pytest

import node.planner
from node.planner import (
    MAX_OUTSTANDING,
    Action,
    AskForWork,
    FetchVersion,
    LoadVersion,
    RolloutView,
    Wait,
    next_action,
    next_lease_slots,
    wanted_outstanding,
)
from protocol.ids import Version

READY = RolloutView(
    now_s=100.0,
    head=Version(7),
    version_ready=Version(7),
    version_loaded=Version(7),
    num_outstanding=0,
    num_slots=32,
)
BUSY = replace(READY, num_outstanding=2)


@pytest.mark.parametrize(
    ("view", "action"),
    [
        (READY, AskForWork(32)),
        (replace(READY, num_outstanding=1), AskForWork(32)),
        (BUSY, Wait("generating")),
        (replace(READY, num_asking=1), AskForWork(32)),
        (replace(READY, num_asking=2), Wait("waiting for a lease")),
        (replace(READY, num_outstanding=1, num_asking=1), Wait("generating")),
        (replace(READY, no_work_until_s=99.0, num_asking=1), Wait("waiting for a lease")),
        (replace(BUSY, head=Version(8)), FetchVersion(Version(8))),
        (replace(READY, head=Version(8), fetching=Version(8)), AskForWork(32)),
        (replace(BUSY, head=Version(8), version_ready=Version(8)), LoadVersion(Version(8))),
        (
            replace(BUSY, head=Version(8), version_ready=Version(8), loading=Version(8)),
            Wait("generating"),
        ),
        (replace(READY, head=None, version_ready=None), Wait("no version exists yet")),
        (replace(READY, no_work_until_s=101.0), Wait("the coordinator has no work", 101.0)),
        (replace(READY, no_work_until_s=99.0), AskForWork(32)),
        (replace(READY, paused="by its owner"), Wait("by its owner")),
        (replace(READY, engine_ready=False), Wait("the engine is starting")),
    ],
)
def test_next_action(view: RolloutView, action: Action) -> None:
    assert next_action(view) == action


def test_leases_grow_while_they_are_short_and_shrink_when_they_are_long() -> None:
    assert next_lease_slots(32, took_s=0.1, asked=32) == 64
    assert next_lease_slots(32, took_s=1.0, asked=32) == 32
    assert next_lease_slots(32, took_s=30.0, asked=32) == 16
    assert next_lease_slots(8, took_s=0.1, asked=32) == 32  # the coordinator had no more
    assert next_lease_slots(256, took_s=0.1, asked=256) == 256
    assert next_lease_slots(4, took_s=30.0, asked=4) == 4


def test_failed_fetch_is_held_back_while_work_goes_on() -> None:
    behind = replace(BUSY, head=Version(8), failed_until_s=105.0)
    assert next_action(behind) == Wait("generating", 105.0)
    assert next_action(replace(behind, now_s=105.0)) == FetchVersion(Version(8))


def test_without_interrupt_running_samples_finish_first() -> None:
    behind = replace(BUSY, head=Version(8), version_ready=Version(8), interrupt=False)
    assert isinstance(next_action(behind), Wait)
    assert isinstance(next_action(replace(behind, num_outstanding=1)), Wait)
    assert next_action(replace(behind, num_outstanding=0)) == LoadVersion(Version(8))


def test_paused_node_still_fetches_and_loads() -> None:
    paused = replace(READY, paused="by its owner", head=Version(8))
    assert next_action(paused) == FetchVersion(Version(8))
    assert next_action(replace(paused, version_ready=Version(8))) == LoadVersion(Version(8))


def test_carrying_out_every_action_ends_in_a_wait() -> None:
    """Whatever the planner asks for, once it is marked as under way the planner moves on and comes to rest."""
    view = replace(READY, head=Version(9), version_ready=Version(8))
    for _ in range(8):
        match next_action(view):
            case FetchVersion(version):
                view = replace(view, fetching=version)
            case LoadVersion(version):
                view = replace(view, loading=version)
            case AskForWork():
                view = replace(view, num_asking=view.num_asking + 1)
            case Wait():
                return
    raise AssertionError("the planner does not come to rest")


@pytest.mark.parametrize(
    ("rtt_s", "service_s", "wanted"),
    [(0.0, None, 2), (0.1, None, 2), (0.0, 5.0, 2), (0.1, 5.0, 2), (10.0, 5.0, 3), (11.0, 5.0, 4)],
)
def test_wanted_outstanding(rtt_s: float, service_s: float | None, wanted: int) -> None:
    assert wanted_outstanding(rtt_s=rtt_s, service_s=service_s) == wanted


def test_wanted_outstanding_is_bounded() -> None:
    assert wanted_outstanding(rtt_s=1000.0, service_s=0.001) == MAX_OUTSTANDING


def busy_share(*, rtt_s: float, service_s: float, num_leases: int = 400) -> float:
    """How much of the time an engine is busy that works on its leases one after the other, each for `service_s`, when
    the planner asks for them and every call takes `rtt_s`; on a virtual clock, without the start."""
    arrivals: list[float] = []  # of calls under way, soonest first
    queue = num_served = 0
    now_s, busy_s, free_s = 0.0, 0.0, math.inf  # `free_s`: when the lease at work is done
    begun_s = math.inf
    while num_served < num_leases:
        view = replace(
            READY,
            now_s=now_s,
            num_outstanding=queue + (free_s < math.inf),
            num_asking=len(arrivals),
            rtt_s=rtt_s,
            service_s=service_s,
        )
        if isinstance(next_action(view), AskForWork):
            arrivals.append(now_s + rtt_s)
            continue
        now_s = min(arrivals[0] if arrivals else math.inf, free_s)
        if free_s <= now_s:
            num_served, free_s = num_served + 1, math.inf
            busy_s += service_s if begun_s < math.inf else 0.0
            begun_s = now_s if num_served == 10 else begun_s
        else:
            arrivals.pop(0)
            queue += 1
        if queue and free_s == math.inf:
            queue, free_s = queue - 1, now_s + service_s
    return busy_s / (now_s - begun_s)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0])
@pytest.mark.parametrize("service_s", [0.2, 1.0, 20.0])
def test_the_engine_is_busy_however_far_the_coordinator_is(ratio: float, service_s: float) -> None:
    assert busy_share(rtt_s=ratio * service_s, service_s=service_s) >= 0.98


def test_with_one_lease_at_a_time_half_the_time_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.planner, "wanted_outstanding", lambda **_: 1)
    assert busy_share(rtt_s=1.0, service_s=1.0) == pytest.approx(0.5)
    assert busy_share(rtt_s=3.0, service_s=1.0) == pytest.approx(0.25)


def test_seats_that_long_leases_leave_free_are_filled() -> None:
    """Two leases of four slots with one long sample each would else keep an engine of 64 seats nearly empty."""
    long = replace(READY, num_outstanding=2, num_slots=4, service_s=50.0, num_running=8)
    assert next_action(long) == AskForWork(56)
    assert not isinstance(next_action(replace(long, num_running=62)), AskForWork)
    assert not isinstance(next_action(replace(long, num_asking=1)), AskForWork), "one call at a time"
    assert not isinstance(next_action(replace(long, service_s=0.5)), AskForWork), "short leases end soon enough"
    assert not isinstance(next_action(replace(long, num_outstanding=32)), AskForWork)
