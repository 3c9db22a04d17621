"""A slot that has outgrown its task goes to a node that is faster and has nothing to do, and to no other."""

from dataclasses import replace

import pytest

from coordinator.core import events as e
from coordinator.core.apply import MOVE_COST, apply
from coordinator.core.effects import CancelSlots
from coordinator.core.facts import LengthLearned, SlotMoved
from coordinator.core.outliers import take_outliers
from coordinator.core.replies import Grant
from coordinator.core.state import Prefix, State
from coordinator.core.turn import Turn
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.run import EnvironmentSpec, SamplingContract
from tests.coordinator.world import World, make_rules

SLOW, FAST = "r0", "r1"


def started(*, num_tasks: int = 4, **changes: object) -> World:
    """Two nodes, tasks that came to four tokens so far, and room for two groups."""
    spec = EnvironmentSpec("sums", num_tasks=num_tasks)
    world = World(make_rules(environment=spec, **{"max_concurrent": 2, **changes}))
    world.start(rollouts=2)
    for _ in range(8):
        world.make_version()
    return world


def come_on(world: World, name: str, grant: Grant, slot: SlotKey, num_tokens: int) -> None:
    """All tokens of a slot so far, of the version under which it was opened."""
    segments = ((Version(slot.version), num_tokens),)
    edge = Digest(f"{slot} {num_tokens}")
    world.do(e.PiecesReceived((e.SlotProgress(PeerId(name), grant.lease_id, slot, segments, edge),)))


def outgrow(world: World, *, pace: int = 10) -> SlotKey:
    """The slow node's slot comes on by a token a second to twelve, the other's by `pace`; the slow node has the last
    slot of its group, the other one has nothing more to do."""
    slow, fast = world.lease(SLOW, 2), world.lease(FAST, 2)
    for second in range(1, 13):
        world.tick(1.0)
        world.see_all()
        come_on(world, SLOW, slow, slow.slots[0], second)
        if second in (2, 3):
            come_on(world, FAST, fast, fast.slots[0], second * pace)
    world.submit(slow, slow.slots[1], name=SLOW)
    for slot in fast.slots:
        world.submit(fast, slot, name=FAST, segments=((slot.version, 30),))
    return slow.slots[0]


def test_it_moves_with_all_its_tokens() -> None:
    world = started()
    slot = outgrow(world)
    grant = world.lease(FAST, 4)
    assert grant.slots == (slot,)
    moved = SlotMoved(slot, ((Version(slot.version), 12),), Digest(f"{slot} 12"))
    assert moved in world.facts
    assert world.asked(CancelSlots) == [CancelSlots(PeerId(SLOW), (slot,))]
    known = world.core.state.find(slot)
    assert known is not None
    assert known.prefix == Prefix(moved.segments, moved.edge)
    assert world.core.books().returned == 1
    world.crash()
    assert world.core.state.moved == {slot.task.index: [slot.sample]}


def taken(world: World, name: str = FAST, *, num_slots: int = 4, version: int | None = None) -> tuple[SlotKey, ...]:
    """What a node would take over if it found no other work."""
    state = world.core.state
    loaded = Version(state.versions[-1].version if version is None else version)
    event = e.WorkRequested(PeerId(name), loaded, Digest(""), num_slots, LeaseId("x"))
    return take_outliers(Turn(world.core.rules, state, world.core.soft, world.now_ms), event, most=num_slots)


def test_it_stays_where_another_node_is_hardly_faster() -> None:
    world = started()
    outgrow(world, pace=1)
    assert not taken(world)


def test_it_stays_where_it_is_as_fast_itself() -> None:
    world = started()
    outgrow(world)
    assert not taken(world, SLOW)


def test_it_stays_while_another_sample_of_its_group_runs() -> None:
    world = started(max_lag=0)
    slot = outgrow(world)
    other = world.core.state.groups[slot.task.index].slots[1]
    other.status = "leased"
    assert not taken(world)
    other.status, world.core.soft.late_seen_ms = "accepted", 0
    assert taken(world) == (slot,)


@pytest.mark.parametrize(("num_held", "num_slots", "moves"), [(0, 1, True), (3, 4, True), (4, 4, False), (9, 4, False)])
def test_it_goes_only_where_most_places_are_free(num_held: int, num_slots: int, moves: bool) -> None:
    world = started()
    slot = outgrow(world)
    world.core.state.nodes[PeerId(FAST)].num_leased = num_held
    assert taken(world, num_slots=num_slots) == ((slot,) if moves else ())


@pytest.mark.parametrize(("version", "interrupt", "moves"), [(7, True, False), (8, False, True), (9, False, False)])
def test_it_goes_only_where_its_tokens_can_be_carried_on(version: int, interrupt: bool, moves: bool) -> None:
    """Not to older weights; and where rollouts end under the weights that they began with, only to these."""
    world = started(interrupt=interrupt)
    slot = outgrow(world)
    assert taken(world, version=version) == ((slot,) if moves else ())


def test_tokens_that_are_too_old_are_not_carried_on() -> None:
    world = started(max_lag=2)
    outgrow(world)
    world.core.rules = replace(world.core.rules, spec=replace(world.core.rules.spec, max_lag=-1))
    assert not taken(world)


def test_it_stays_where_little_may_be_left_of_it() -> None:
    """Twelve tokens of at most fourteen: computing twelve anew would take longer."""
    world = started(sampling=SamplingContract(1.0, 14, (0,), 100))
    outgrow(world)
    assert not taken(world)


def test_it_stays_where_too_few_slots_were_filled() -> None:
    world = started()
    outgrow(world)
    world.core.state.move_credit = MOVE_COST - 1
    assert not taken(world)


def test_where_nothing_is_remembered_nothing_moves() -> None:
    world = started(num_tasks=0)
    outgrow(world)
    assert not taken(world)
    assert not world.core.soft.paces


def test_it_may_move_again_after_a_node_failed_it() -> None:
    world = started()
    slot = outgrow(world)
    grant = world.lease(FAST, 4)
    world.do(e.LeaseReturned(PeerId(FAST), grant.lease_id, "out of memory", is_fault=True))
    known = world.core.state.find(slot)
    assert known is not None
    assert world.core.state.moved == {slot.task.index: []}
    assert known.prefix is not None
    assert known.prefix.num_tokens == 12


def test_growth_follows_what_three_in_four_tasks_do_not_exceed() -> None:
    """Four tasks of which one grows by half each time, and then one by a tenth."""
    state = State()
    lengths = [100.0] * 4
    for turn in range(4000):
        task = turn % 4
        lengths[task] *= 1.3 if task == 0 and turn % 8 == 0 else 1.0
        lengths[task] = lengths[task] if lengths[task] < 1e8 else 100.0
        apply(state, LengthLearned(task, 50, round(lengths[task])))
    assert 0.85 < state.growth < 1.15
    for turn in range(2000):
        apply(state, LengthLearned(0, 50, 100 if turn % 2 else 200))
    assert 1.7 < state.growth < 2.3, "half of the time it doubles"
    assert len(state.longest) == 16
