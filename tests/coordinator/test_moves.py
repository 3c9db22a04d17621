"""Slots that change nodes: what was received goes with them, leases that make progress last, and trying has an end."""

import contextlib

import pytest

from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core import returns
from coordinator.core.effects import CancelSlots
from coordinator.core.replies import Grant
from protocol.errors import NoWorkError, RolloutMalformedError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from tests.coordinator.world import World, make_rules

EDGE = Digest("edge of the prefix")


@pytest.fixture
def world() -> World:
    world = World(make_rules(lease_s=120.0))
    world.start(rollouts=2)
    return world


def received(grant: Grant, slot: SlotKey, num_tokens: int, *, name: str = "r0", version: int = 0) -> e.PiecesReceived:
    progress = e.SlotProgress(PeerId(name), grant.lease_id, slot, ((Version(version), num_tokens),), EDGE)
    return e.PiecesReceived((progress,))


def submit(world: World, grant: Grant, slot: SlotKey, *, edges: tuple[str, ...], name: str = "r1") -> None:
    segments = ((Version(0), 9),)
    event = e.RolloutSubmitted(
        PeerId(name), grant.lease_id, slot, Digest(f"of {slot}"), segments, tuple(map(Digest, edges))
    )
    world.do(event)


def hold(world: World, num_versions: int) -> None:
    """Versions are made of other groups, while what waits is held by a node that gives it back."""
    for _ in range(num_versions):
        held = world.lease("r0", 1)
        world.make_version()
        world.do(e.LeaseReturned(PeerId("r0"), held.lease_id))


def live_for(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.tick(1.0)
        world.see_all()


def lose(world: World, name: str) -> None:
    for _ in range(4):
        world.tick(1.0)
        world.see_all(but=(name,))


def test_what_was_received_moves_with_the_slot(world: World) -> None:
    grant = world.lease("r0", 2)
    slot, other = grant.slots
    world.do(received(grant, slot, 5))
    lose(world, "r0")
    moved = [fact for fact in world.facts if isinstance(fact, f.SlotMoved)]
    assert moved == [f.SlotMoved(slot, ((Version(0), 5),), EDGE)]
    again = world.lease("r1", 2)
    assert set(again.slots) == {slot, other}
    with pytest.raises(RolloutMalformedError, match="does not go on from the pieces"):
        submit(world, again, slot, edges=("of something else",))
    submit(world, again, slot, edges=("first", EDGE, "last"))
    submit(world, again, other, edges=())
    assert world.core.books().filled == 2


def test_progress_of_a_lease_that_is_not_the_nodes_is_ignored(world: World) -> None:
    grant = world.lease("r0", 1)
    world.do(received(grant, grant.slots[0], 5, name="r1"))
    assert not world.core.soft.progress
    world.do(received(grant, grant.slots[0], 5))
    world.do(received(grant, grant.slots[0], 3))
    assert [p.said.segments for p in world.core.soft.progress.values()] == [((Version(0), 5),)], "it never goes back"


def test_a_prefix_that_is_lost_or_too_old_is_not_asked_for(world: World) -> None:
    grant = world.lease("r0", 2)
    for slot in grant.slots:
        world.do(received(grant, slot, 5))
    world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id))
    world.do(e.PrefixLost(grant.slots[0], "its signature does not hold"))
    again = world.lease("r1", 1)
    submit(world, again, grant.slots[0], edges=())
    hold(world, 3)
    late = world.lease("r1", 1)
    assert late.slots == (grant.slots[1],)
    dropped = [fact.slot for fact in world.facts if isinstance(fact, f.PrefixDropped)]
    assert dropped == list(grant.slots)


def test_a_node_with_older_weights_does_not_go_on_from_newer_tokens(world: World) -> None:
    grant = world.lease("r0", 2)
    world.make_version()
    world.do(received(grant, grant.slots[0], 5, version=1))
    world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id))
    with contextlib.suppress(NoWorkError):
        assert grant.slots[0] not in world.lease("r1", 8, version=0).slots
    assert grant.slots[0] in world.lease("r1", 1, version=1).slots


def test_progress_prolongs_a_lease_up_to_the_bound_on_all(world: World) -> None:
    for _ in range(3):
        grant = world.lease("r0", 2)
        world.tick(3.0)
        world.see_all()
        for slot in grant.slots:
            world.submit(grant, slot)
    grant = world.lease("r0", 2)
    granted_ms = world.now_ms
    assert grant.deadline_ms < granted_ms + 120_000, "the deadline comes from the measured rate"
    for tokens in range(1, 500):
        world.tick(1.0)
        world.see_all()
        if grant.lease_id not in world.core.state.leases:
            break
        world.do(received(grant, grant.slots[0], tokens))
    assert any(isinstance(fact, f.LeaseExtended) for fact in world.facts)
    assert world.now_ms - granted_ms == pytest.approx(120_000, abs=2_000)


def test_without_progress_it_ends_at_its_deadline(world: World) -> None:
    test = world.lease("r0", 2)
    world.tick(3.0)
    world.see_all()
    for slot in test.slots:
        world.submit(test, slot)
    grant = world.lease("r0", 2)
    while grant.lease_id in world.core.state.leases:
        world.tick(0.5)
        world.see_all()
    assert abs(world.now_ms - grant.deadline_ms) <= 500


def test_a_slot_that_everybody_fails_is_a_dead_letter(world: World) -> None:
    """And its group goes on without it."""
    for turn in range(returns.MAX_TRIES):
        name = f"r{turn % 2}"
        grant = world.lease(name, 1)
        assert grant.slots[0].sample == 0
        assert world.core.books().failed == 0
        world.do(e.LeaseReturned(PeerId(name), grant.lease_id, "token out of range", is_fault=True))
        live_for(world, 61)
    (letter,) = world.core.state.dead_letters
    assert letter.slot == grant.slots[0]
    assert "token out of range" in letter.reason
    assert world.core.books().failed == 1
    assert not world.core.soft.failed_ms, "nothing is remembered of a slot that has ended"


def test_giving_back_in_good_order_is_no_fault(world: World) -> None:
    for _ in range(2 * returns.MAX_TRIES):
        grant = world.lease("r0", 1)
        world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id, "paused by its owner"))
    assert not world.core.state.dead_letters
    assert world.core.state.nodes[PeerId("r0")].failure == 0


def test_a_slot_goes_to_another_node_than_the_one_that_failed_it(world: World) -> None:
    first = world.lease("r0", 1)
    other = world.lease("r1", 1)
    world.do(e.LeaseReturned(PeerId("r0"), first.lease_id, "the engine failed", is_fault=True))
    assert first.slots[0] not in world.lease("r0", 2).slots
    assert first.slots[0] in world.lease("r1", 1).slots
    assert LeaseId(other.lease_id) in world.core.state.leases


def test_alone_it_gets_it_again(world: World) -> None:
    first = world.lease("r0", 1)
    world.do(e.LeaseReturned(PeerId("r0"), first.lease_id, "the engine failed", is_fault=True))
    assert first.slots[0] in world.lease("r0", 1).slots


def test_a_slot_that_nobody_could_fill_ends_without_blame(world: World) -> None:
    for _ in range(returns.MAX_TRIES):
        grant = world.lease("r0", 1)
        world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id, "the prompt cannot be made", is_try=True))
    assert [letter.slot for letter in world.core.state.dead_letters] == [grant.slots[0]]
    assert world.core.state.nodes[PeerId("r0")].failure == 0


def test_a_slot_that_stands_still_while_its_neighbours_come_on_moves(world: World) -> None:
    grant = world.lease("r0", 2)
    lost, other = grant.slots
    world.do(received(grant, lost, 5))
    for tokens in range(1, 30):
        world.tick(1.0)
        world.see_all()
        world.do(received(grant, other, tokens))
    assert world.asked(CancelSlots) == [CancelSlots(PeerId("r0"), (lost,))]
    assert world.core.state.leases[grant.lease_id].slots == [(other.task.index, other.sample)]
    slot = world.core.state.find(lost)
    assert slot is not None
    assert slot.prefix is not None
    assert slot.prefix.num_tokens == 5


def test_slots_that_all_stand_still_are_left_to_the_deadline(world: World) -> None:
    grant = world.lease("r0", 2)
    for slot in grant.slots:
        world.do(received(grant, slot, 5))
    for _ in range(30):
        world.tick(1.0)
        world.see_all()
    assert not world.asked(CancelSlots)


def test_a_node_that_fails_again_and_again_is_given_time_to_think(world: World) -> None:
    """So that it cannot burn through the tasks; one slot that it fills is enough to go on at once."""
    for _ in range(2):
        grant = world.lease("r0", 1)
        world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id, "the engine failed", is_fault=True))
    with pytest.raises(NoWorkError, match="failed its last 2 leases"):
        world.lease("r0", 1)
    live_for(world, 3)
    grant = world.lease("r0", 1)
    world.submit(grant, grant.slots[0])
    assert world.lease("r0", 1)
