"""Who gets scarce work, and which tasks: fair shares by measured rates, longest first where lengths are known."""

import contextlib

import pytest

from coordinator.core import events as e
from coordinator.core.demand import HUNGER_MS
from coordinator.core.pace import rate_of
from coordinator.core.replies import Grant
from protocol.errors import NoWorkError
from protocol.ids import PeerId
from protocol.run import EnvironmentSpec
from tests.coordinator.world import World, make_rules


def ask(world: World, name: str, num_slots: int) -> int:
    """How many slots the node gets."""
    try:
        return len(world.lease(name, num_slots).slots)
    except NoWorkError:
        return 0


def one_at_a_time(rollouts: int) -> World:
    """A run in which one group may be under way."""
    world = World(make_rules(max_concurrent=1, lease_s=1000.0))
    world.start(rollouts=rollouts)
    return world


def finish_group(world: World) -> None:
    """The group that is under way ends without rewards, and its capacity returns."""
    for lease_id, lease in list(world.core.state.leases.items()):
        for index, sample in list(lease.slots):
            slot = world.core.state.groups[index].key(sample)
            grant = Grant(lease_id, (slot,), lease.deadline_ms)
            world.submit(grant, slot, name=lease.peer_id)
            world.do(e.RolloutScored(slot, None))


def test_scarce_work_is_shared_by_rate() -> None:
    """After any number of turns nobody is a whole group off its share."""
    world = one_at_a_time(3)
    rates = {"r0": 100.0, "r1": 200.0, "r2": 400.0}
    for name, rate in rates.items():
        world.do(e.CapabilityLearned(PeerId(name), e.Capability(rate, 1.0, 1, "cpu")))
    got = dict.fromkeys(rates, 0)
    for name in rates:
        ask(world, name, 2)
    for turn in range(1, 60):
        finish_group(world)
        for name in rates:
            got[name] += ask(world, name, 2) // 2
        assert sum(got.values()) == turn, "work lies idle"
        worst = max(abs(got[name] - turn * rate / 700) for name, rate in rates.items())
        assert worst < 1, f"after {turn} turns {got}"


def test_a_node_that_does_not_come_back_is_waited_for_only_briefly() -> None:
    world = one_at_a_time(2)
    assert ask(world, "r0", 2) == 2
    assert ask(world, "r1", 2) == 0
    assert ask(world, "r0", 2) == 0
    finish_group(world)
    assert ask(world, "r0", 2) == 2, "the turn of the first by name"
    finish_group(world)
    assert ask(world, "r0", 2) == 0, "it is the turn of the other, which does not come"
    world.tick((HUNGER_MS + 100) / 1000)
    world.see_all()
    assert ask(world, "r0", 2) == 2


def test_a_node_that_fails_is_served_after_the_others() -> None:
    world = one_at_a_time(2)
    for _ in range(2):
        grant = world.lease("r0", 2)
        world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id, "the engine failed", is_fault=True))
    for _ in range(3):
        world.tick(1.0)
        world.see_all()
    assert ask(world, "r1", 2) == 2
    for turn in range(5):
        assert ask(world, "r0", 2) == ask(world, "r1", 2) == 0
        finish_group(world)
        assert ask(world, "r0", 2) == 0, f"turn {turn}"
        assert ask(world, "r1", 2) == 2


def epochs(num_tasks: int = 4) -> World:
    environment = EnvironmentSpec("sums", num_tasks=num_tasks)
    world = World(make_rules(max_lag=0, groups_per_batch=4, environment=environment))
    world.start(rollouts=2)
    return world


def test_the_longest_tasks_of_the_last_epoch_come_first_and_slow_nodes_get_the_shortest() -> None:
    world = epochs()
    lengths = [5, 40, 10, 20]
    for _ in range(4):
        grant = world.lease("r0", 2)
        for slot in grant.slots:
            world.submit(grant, slot, segments=((0, lengths[slot.task.index]),))
            world.score(slot)
    world.finish_round()
    world.see_all()
    world.do(e.CapabilityLearned(PeerId("r1"), e.Capability(1.0, 1.0, 1, "cpu")))
    order = [world.lease("r0", 2).slots[0].task.index for _ in range(2)]
    assert [index % 4 for index in order] == [1, 3]
    assert world.lease("r1", 2).slots[0].task.index % 4 == 0


def test_the_memory_of_a_task_is_four_bytes() -> None:
    world = epochs(num_tasks=1000)
    for _ in range(2):
        world.make_version()
    assert 0 < len(world.core.state.lengths) <= 4 * 1000
    with pytest.raises(OverflowError):
        (2**32).to_bytes(4, "little")


def test_nothing_is_kept_for_a_node_that_asks_with_older_weights_than_it_says() -> None:
    """It says that it has the head, and asks with the version before, for which there is no room."""
    world = World(make_rules(max_lag=1, groups_per_batch=2))
    world.start(rollouts=2)
    world.do(e.CapabilityLearned(PeerId("r1"), e.Capability(1e12, 1.0, 1, "liar")))
    for _ in range(3):
        world.make_version()
    assert world.core.state.head is not None
    for _ in range(80):
        with contextlib.suppress(NoWorkError):
            world.lease("r1", 8, version=world.core.state.head.version - 1)
        with contextlib.suppress(NoWorkError):
            grant = world.lease("r0", 4)
            for slot in grant.slots:
                world.submit(grant, slot)
                world.score(slot)
        world.tick(0.5)
        world.see_all()
        if world.core.state.round is not None:
            world.finish_round()
            world.see_all()
    assert world.core.state.head.version >= 10


def test_a_failed_slot_is_kept_from_its_node_only_for_a_while() -> None:
    """Another node asks all the time and can never take it."""
    world = World(make_rules(max_lag=2))
    world.start(rollouts=2)
    world.make_version()
    first = world.lease("r0", 1)
    world.do(e.LeaseReturned(PeerId("r0"), first.lease_id, "the engine failed", is_fault=True))
    for _ in range(12):
        with contextlib.suppress(NoWorkError):
            held = world.lease("r1", 1, version=0)
            world.do(e.LeaseReturned(PeerId("r1"), held.lease_id))
        world.tick(1.0)
        world.see_all()
    assert world.lease("r0", 1).slots == first.slots


def test_a_claim_counts_for_no_more_than_what_was_measured() -> None:
    world = World(make_rules(groups_per_batch=16))
    world.start(rollouts=2)
    grant = world.lease("r0", 4)
    world.tick(2.0)
    for slot in grant.slots:
        world.submit(grant, slot)
    world.see_all()
    world.do(e.CapabilityLearned(PeerId("r1"), e.Capability(1e12, 1.0, 1, "liar")))
    turn = world.core._turn(world.now_ms)
    assert rate_of(turn, PeerId("r1")) == rate_of(turn, PeerId("r0")) > 0


def test_a_node_that_fills_nothing_has_less_and_less_time() -> None:
    world = World(make_rules(lease_s=600.0))
    world.start(rollouts=1)
    first = world.lease("r0", 2)
    assert first.deadline_ms - world.now_ms == 600_000
    world.do(e.LeaseReturned(PeerId("r0"), first.lease_id, "the engine failed", is_fault=True))
    assert world.lease("r0", 2).deadline_ms - world.now_ms < 300_000
