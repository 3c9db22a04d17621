"""The rollout node's planner: one action for each situation, and none that starves another."""

from dataclasses import replace

import pytest

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
        (replace(READY, is_asking=True), Wait("waiting for a lease")),
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
        (replace(READY, paused="by its owner"), Wait("paused: by its owner")),
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
                view = replace(view, is_asking=True)
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
