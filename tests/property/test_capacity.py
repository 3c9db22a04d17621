"""How much may be under way, through the real core: the capacity table, and no more than it after any crash."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import events as e
from coordinator.core import leases
from coordinator.core.facts import LeaseGranted
from coordinator.core.replies import Grant
from coordinator.core.turn import Turn
from protocol.errors import NoWorkError
from protocol.ids import LeaseId, PeerId, Version
from tests.coordinator.world import World, make_rules

# max_lag, version, groups per batch, accepted, running, max concurrent -> capacity. These are the rows of the formula's
# table that can come to be (`tests/protocol/test_lag.py` has all). Accepted counts what was trained.
TABLE = [
    (0, 0, 8, 0, 0, 64, 8),
    (0, 0, 8, 0, 8, 64, 0),
    (2, 0, 8, 0, 0, 64, 24),
    (2, 0, 8, 0, 0, 16, 16),
    (2, 0, 8, 10, 14, 64, 0),
    (2, 1, 8, 10, 14, 64, 8),
    (2, 5, 8, 48, 0, 64, 16),
    (2, 5, 8, 40, 0, 64, 24),
]


def swarm(*, max_lag: int, batch: int, version: int, concurrent: int = 64) -> World:
    """A run at a version, with rollout nodes enough to take all the work that there is."""
    world = World(make_rules(max_lag=max_lag, groups_per_batch=batch, max_concurrent=concurrent, lease_s=600.0))
    world.start(rollouts=1 + (max_lag + 1) * batch // 4)
    world.is_checked = False  # the books have tests of their own
    for _ in range(version):
        world.make_version()
    return world


def capacity_of(world: World) -> int:
    """Groups that a node with the head loaded may open."""
    head = world.core.state.head
    assert head is not None
    turn = Turn(world.rules, world.core.state, world.core.soft, world.now_ms)
    return leases.spare_groups(turn, version=Version(head.version))


def take(world: World, num_groups: int, *, is_filled: bool) -> int:
    """Has nodes take the slots of so many new groups, if they get them, and fill them or not; how many there were."""
    size, num_slots, num_idle = world.rules.spec.group_size, 0, 0
    head = world.core.state.head
    assert head is not None
    while num_slots < num_groups * size and num_idle < 4:
        num_before = num_slots
        for name in [name for name in world.core.state.nodes if name.startswith("r")]:
            num_wanted = min(num_groups * size - num_slots, 4 * size)
            ask = e.WorkRequested(PeerId(name), head.version, head.root, num_wanted, LeaseId(f"{len(world.facts)}"))
            try:
                grant = world.do(ask).reply if num_wanted else None
            except NoWorkError:
                continue
            if isinstance(grant, Grant):
                num_slots += len(grant.slots)
                for slot in grant.slots if is_filled else ():
                    world.submit(grant, slot, name=name)
                    world.score(slot)
        world.tick(3.0)  # who got all of its wish is not kept more
        world.see_all(but=("t0",))
        num_idle = 0 if num_slots > num_before else num_idle + 1
    assert num_slots % size == 0
    return num_slots // size


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_capacity_table(row: tuple[int, int, int, int, int, int, int]) -> None:
    max_lag, version, batch, accepted, running, concurrent, expected = row
    world = swarm(max_lag=max_lag, batch=batch, version=version, concurrent=concurrent)
    world.see("t0", version=-1)  # no batch is cut meanwhile
    num_complete = accepted - version * batch
    assert take(world, num_complete, is_filled=True) == num_complete
    assert take(world, running, is_filled=False) == running
    assert capacity_of(world) == expected
    world.crash()
    assert capacity_of(world) == expected, "a restart changes it"
    world.see_all()


@given(
    max_lag=st.integers(0, 3),
    batch=st.integers(1, 3),
    version=st.integers(0, 4),
    num_complete=st.integers(0, 4),
    num_crashes=st.integers(1, 3),
)
@settings(max_examples=20)
def test_a_restarted_coordinator_grants_no_more_than_the_bound(
    max_lag: int, batch: int, version: int, num_complete: int, num_crashes: int
) -> None:
    """The recovery rule: what was trained counts as accepted, whatever was forgotten in between."""
    world = swarm(max_lag=max_lag, batch=batch, version=version)
    world.see("t0", version=-1)
    num_complete = take(world, min(num_complete, (max_lag + 1) * batch), is_filled=True)
    for _ in range(num_crashes):
        world.crash()
        world.see_all(but=("t0",))
        for name in world.core.state.nodes:
            if name != "t0":
                world.see(name)
                world.do(e.CapabilityLearned(PeerId(name), e.Capability(100.0, 100.0, 1, "cpu")))
    num_granted = take(world, 10**6, is_filled=False)
    assert num_granted == (max_lag + 1) * batch - num_complete
    opened = [group for fact in world.facts if isinstance(fact, LeaseGranted) for group in fact.opened]
    assert len(opened) == (max_lag + 1 + version) * batch, "over its whole life it opened what the bound allows"


def test_forgetting_what_was_trained_would_be_seen() -> None:
    """Negative control: the recovery bug of the table, 64 groups where there may be 24."""
    world = swarm(max_lag=2, batch=8, version=5)
    world.core.state.num_groups_trained = 0
    assert capacity_of(world) == 64
