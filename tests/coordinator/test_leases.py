"""Gates 1 and 2: who gets slots, how slots return, which rollouts are accepted."""

from collections.abc import Callable

import pytest

from coordinator.core import events as e
from coordinator.core import leases, ledger
from coordinator.core.books import check
from coordinator.core.effects import CancelLeases
from coordinator.core.state import encode_state
from coordinator.core.turn import Turn
from protocol.errors import (
    HexcombError,
    LeaseUnknownError,
    NoWorkError,
    RolloutConflictError,
    RolloutMalformedError,
    RootMismatchError,
    VersionFromFutureError,
    VersionTooOldError,
    WorkRefusedError,
)
from protocol.ids import Digest, LeaseId, PeerId, Version
from tests.coordinator.world import BASE, World, make_rules


@pytest.fixture
def world() -> World:
    world = World()
    world.start(rollouts=2)
    return world


def refused(world: World, event: e.Event, error: type[HexcombError]) -> HexcombError:
    """The refusal of an event, which must leave the state as it was."""
    before = encode_state(world.core.state)
    with pytest.raises(error) as caught:
        world.do(event)
    assert encode_state(world.core.state) == before
    return caught.value


def test_a_group_has_one_task_and_one_version(world: World) -> None:
    grant = world.lease(num_slots=3)
    assert [str(slot) for slot in grant.slots] == ["v0/sums:7:0/0", "v0/sums:7:0/1", "v0/sums:7:1/0"]
    assert grant.deadline_ms == world.now_ms + 20_000
    assert world.core.books().waiting == 1


def test_waiting_slots_go_out_before_new_groups_open(world: World) -> None:
    first = world.lease("r0", 1)
    second = world.lease("r1", 2)
    assert [str(slot) for slot in second.slots] == ["v0/sums:7:0/1", "v0/sums:7:1/0"]
    assert not set(first.slots) & set(second.slots)


def test_lease_needs_the_committed_root_of_a_fresh_version(world: World) -> None:
    for _ in range(3):
        world.make_version()
    root = world.core.state.roots[Version(3)]
    ask = {"peer_id": PeerId("r0"), "num_slots": 1, "lease_id": LeaseId("x")}
    refused(world, e.WorkRequested(version=Version(4), root=root, **ask), VersionFromFutureError)  # type: ignore[arg-type]
    error = refused(world, e.WorkRequested(version=Version(0), root=BASE.root, **ask), VersionTooOldError)  # type: ignore[arg-type]
    assert "Fetch version 3" in error.remedy
    refused(world, e.WorkRequested(version=Version(-1), root=Digest(""), **ask), VersionTooOldError)  # type: ignore[arg-type]
    refused(world, e.WorkRequested(version=Version(2), root=root, **ask), RootMismatchError)  # type: ignore[arg-type]
    assert world.lease("r0", 1, version=1).slots[0].version == 1


def test_lease_needs_a_living_rollout_node(world: World) -> None:
    refused(world, e.WorkRequested(PeerId("t0"), Version(0), BASE.root, 1, LeaseId("x")), WorkRefusedError)
    world.tick(2.0)
    world.see_all(but=("r0",))
    world.tick(1.5)
    refused(world, e.WorkRequested(PeerId("r0"), Version(0), BASE.root, 1, LeaseId("x")), WorkRefusedError)


def test_no_work_before_the_base() -> None:
    world = World()
    world.join("t0", allowed="trainer")
    world.join("r0", allowed="rollout")
    refused(world, e.WorkRequested(PeerId("r0"), Version(0), BASE.root, 1, LeaseId("x")), WorkRefusedError)


def test_one_node_cannot_sit_on_all_the_work(world: World) -> None:
    grant = world.lease("r0", 1000)
    assert len(grant.slots) == 6  # half of (max_lag + 1) * 2 groups of 2: the rates are equal
    with pytest.raises(NoWorkError):
        world.lease("r0", 1)
    assert len(world.lease("r1", 1000).slots) == 6
    with pytest.raises(NoWorkError):
        world.lease("r1", 1)


def test_a_node_that_fills_nothing_gets_less_and_less_whatever_it_claims() -> None:
    world = World(make_rules(groups_per_batch=100))
    world.start(rollouts=2)
    world.do(e.CapabilityLearned(PeerId("r0"), e.Capability(1e12, 1.0, 1, "liar")))
    sizes = []
    for _ in range(5):
        sizes.append(len(world.lease("r0", 1000).slots))
        for _ in range(20):
            world.tick(1.0)
            world.see_all()
    assert (sizes[0], sizes[-1]) == (8, 1)
    assert sizes == sorted(sizes, reverse=True)
    for _ in range(60):
        world.tick(1.0)
        world.see_all()
    for _ in range(6):
        grant = world.lease("r0", 1000)
        sizes.append(len(grant.slots))
        for slot in grant.slots:
            world.submit(grant, slot)
    assert sizes[-1] > 8, "once it fills what it takes it may have its first groups again, and more"


def test_max_concurrent_bounds_running_groups() -> None:
    world = World(make_rules(max_concurrent=1))
    world.start()
    assert len(world.lease("r0", 1000).slots) == 2


def test_sequential_mode_opens_one_batch() -> None:
    world = World(make_rules(mode="sequential"))
    world.start()
    assert len(world.lease("r0", 1000).slots) == 4
    with pytest.raises(NoWorkError):
        world.lease("r0", 1)


def test_complete_groups_count_against_the_bound() -> None:
    world = World(make_rules(mode="periodic"))
    world.start()
    world.see("t0", version=-1)
    world.fill_batch()
    with pytest.raises(NoWorkError):
        world.lease("r0", 1)


def test_expired_lease_gives_its_slots_back_once(world: World) -> None:
    grant = world.lease("r0", 2)
    world.submit(grant, grant.slots[0])
    for _ in range(20):
        world.tick(1.0)
        world.see_all()
    assert world.asked(CancelLeases) == [CancelLeases(PeerId("r0"), (grant.lease_id,))]
    books = world.core.books()
    assert (books.granted, books.open, books.filled, books.expired) == (2, 0, 1, 1)
    assert books.issued == 2, "a slot that returns issues nothing"
    late = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, grant.slots[1], Digest("d"), ((Version(0), 4),))
    refused(world, late, LeaseUnknownError)
    refused(world, e.LeaseReturned(PeerId("r0"), grant.lease_id), LeaseUnknownError)
    assert world.lease("r1", 1).slots == (grant.slots[1],), "it keeps its name on another node"


def test_lease_is_over_at_its_deadline_even_before_the_timer(world: World) -> None:
    grant = world.lease("r0", 1)
    world.now_ms = grant.deadline_ms
    late = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, grant.slots[0], Digest("d"), ((Version(0), 4),))
    refused(world, late, LeaseUnknownError)


def test_returned_lease(world: World) -> None:
    grant = world.lease("r0", 2)
    refused(world, e.LeaseReturned(PeerId("r1"), grant.lease_id), LeaseUnknownError)
    world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id))
    assert (world.core.books().returned, world.core.books().waiting) == (2, 2)


def test_lost_node_gives_its_slots_back(world: World) -> None:
    grant = world.lease("r0", 2)
    world.tick(2.0)
    world.see_all(but=("r0",))
    world.tick(1.5)
    assert world.role("r0") is None
    assert world.core.books().expired == 2
    assert world.lease("r1", 2).slots == grant.slots


def test_broken_session_is_lost_after_two_heartbeats_unless_seen(world: World) -> None:
    for name in ("r0", "r1"):
        world.do(e.SessionEnded(PeerId(name)))
    world.tick(1.0)
    world.see("r1")
    world.tick(1.1)
    assert world.role("r0") is None
    assert world.role("r1") == "rollout"


def test_same_rollout_five_times_is_accepted_once(world: World) -> None:
    grant = world.lease("r0", 1)
    outcomes = [world.submit(grant, grant.slots[0]).outcome for _ in range(5)]
    assert outcomes == ["ACCEPTED"] + ["DUPLICATE"] * 4
    assert world.core.state.leases == {}
    assert world.core.state.nodes[PeerId("r0")].num_accepted == 1


def test_duplicate_is_known_after_training_and_restart(world: World) -> None:
    grant = world.lease("r0", 2)
    for slot in grant.slots:
        world.submit(grant, slot)
        world.score(slot)
    world.fill_batch()
    world.crash()
    world.see_all()
    assert world.submit(grant, grant.slots[0]).outcome == "DUPLICATE"
    world.see("t0")
    world.finish_round()
    assert world.submit(grant, grant.slots[0]).outcome == "DUPLICATE"
    other = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, grant.slots[0], Digest("other"), ((Version(0), 4),))
    refused(world, other, RolloutConflictError)


def test_other_rollout_for_a_filled_slot_is_a_conflict(world: World) -> None:
    grant = world.lease("r0", 2)
    world.submit(grant, grant.slots[0])
    segments = ((Version(0), 4),)
    own = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, grant.slots[0], Digest("other"), segments)
    refused(world, own, RolloutConflictError)
    theirs = e.RolloutSubmitted(PeerId("r1"), grant.lease_id, grant.slots[0], Digest("x"), segments)
    refused(world, theirs, LeaseUnknownError)
    theft = e.RolloutSubmitted(PeerId("r1"), grant.lease_id, grant.slots[1], Digest("x"), segments)
    refused(world, theft, LeaseUnknownError)


@pytest.mark.parametrize(
    ("segments", "error"),
    [
        ((), RolloutMalformedError),
        (((1, 0),), RolloutMalformedError),
        (((2, 4), (1, 4)), RolloutMalformedError),
        (((0, 4),), RolloutMalformedError),
        (((1, 4), (3, 4)), VersionFromFutureError),
    ],
)
def test_versions_that_could_not_have_happened(
    world: World, segments: tuple[tuple[Version, int], ...], error: type[HexcombError]
) -> None:
    world.make_version()
    world.make_version()
    grant = world.lease("r0", 1, version=1)
    event = e.RolloutSubmitted(PeerId("r0"), grant.lease_id, grant.slots[0], Digest("d"), segments)
    refused(world, event, error)
    assert world.submit(grant, grant.slots[0], segments=((1, 3), (2, 1))).outcome == "ACCEPTED"


def test_rollout_too_old_gives_the_slot_back(world: World) -> None:
    slow = world.lease("r1", 2)
    for _ in range(3):
        world.make_version()
    receipt = world.submit(slow, slow.slots[0], name="r1", segments=((0, 4),))
    assert receipt.outcome == "VERSION_TOO_OLD"
    assert world.core.state.num_stale_returns == 1
    assert world.core.books().returned == 1
    again = world.lease("r0", 1)
    assert again.slots == (slow.slots[0],)
    assert world.submit(again, again.slots[0]).outcome == "ACCEPTED"


def test_missing_reward_is_never_a_zero(world: World) -> None:
    grant = world.lease("r0", 4)
    for slot in grant.slots:
        world.submit(grant, slot)
    first, second, third, fourth = grant.slots
    world.do(e.RolloutScored(first, None))
    world.do(e.RolloutScored(second, 1.0))
    books = world.core.books()
    assert (books.failed, books.filtered) == (1, 1), "a group with one reward is dropped"
    world.do(e.RolloutScored(third, float("nan")))
    world.do(e.RolloutScored(fourth, None))
    assert world.core.books().failed == 3
    assert world.core.state.num_groups_dropped == 2


def test_second_score_changes_nothing(world: World) -> None:
    grant = world.lease("r0", 1)
    world.submit(grant, grant.slots[0])
    world.do(e.RolloutScored(grant.slots[0], 1.0))
    assert world.do(e.RolloutScored(grant.slots[0], 0.0)).facts == ()


def test_dropped_group_returns_its_capacity_once(world: World) -> None:
    first, second = world.lease("r0", 1000), world.lease("r1", 1000)
    for grant, name in ((first, "r0"), (second, "r1")):
        for slot in grant.slots[:2]:
            world.submit(grant, slot, name=name)
            world.do(e.RolloutScored(slot, None))
    assert len(world.lease("r0", 1000).slots) + len(world.lease("r1", 1000).slots) == 4


BUGS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "stale rollouts are accepted": (ledger, "is_fresh", lambda **_: True),
    "any lease will do": (ledger, "_check_lease", lambda *_: None),
    "more groups than the bound": (leases, "capacity", lambda **_: 1000),
}


def break_it(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Plants a bug."""
    place, name, wrong = BUGS[bug]
    monkeypatch.setattr(place, name, wrong)


def test_stale_rollouts_would_be_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, "stale rollouts are accepted")
    with pytest.raises(AssertionError):
        test_rollout_too_old_gives_the_slot_back(world)


def test_foreign_leases_would_be_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, "any lease will do")
    with pytest.raises((AssertionError, KeyError, ValueError, pytest.fail.Exception)):
        test_other_rollout_for_a_filled_slot_is_a_conflict(world)


def test_too_many_groups_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, "more groups than the bound")
    with pytest.raises(pytest.fail.Exception):
        test_complete_groups_count_against_the_bound()


def test_a_slot_under_two_leases_would_be_seen(world: World) -> None:
    first = world.lease("r0", 1)
    second = world.lease("r1", 1)
    check(world.core.state)
    world.core.state.leases[second.lease_id].slots = list(world.core.state.leases[first.lease_id].slots)
    with pytest.raises(AssertionError, match="two leases"):
        check(world.core.state)


def test_node_behind_the_head_opens_fewer_groups(world: World) -> None:
    """Its tokens will be a version older when their turn comes; at the head's capacity they would be over the bound."""
    world.make_version()
    turn = Turn(world.rules, world.core.state, world.core.soft, world.now_ms)
    batch = world.rules.spec.groups_per_batch
    at_head = leases.spare_groups(turn, version=Version(1))
    assert leases.spare_groups(turn, version=Version(0)) == at_head - batch
