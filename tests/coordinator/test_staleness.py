"""What becomes of tokens over the bound (masked, dropped, waited for), and of groups without variance."""

import pytest

from coordinator.core import facts as f
from coordinator.core import returns
from coordinator.core.effects import CancelSlots
from coordinator.core.events import PiecesReceived, SlotProgress
from coordinator.core.replies import Grant
from protocol.ids import Digest, PeerId, SlotKey, Version
from tests.coordinator.world import World, make_rules


def started(**changes: object) -> World:
    world = World(make_rules(**{"max_lag": 1, **changes}))
    world.start(rollouts=2)
    return world


def old_lease(world: World) -> Grant:
    """Two slots of version 0, under way while two versions are made."""
    grant = world.lease("r1", 2)
    for _ in range(2):
        world.make_version()
    return grant


def train_next(world: World) -> None:
    """One more version, whatever groups wait."""
    while world.core.state.round is None:
        grant = world.lease("r0", 2)
        for slot in grant.slots:
            world.submit(grant, slot)
            world.score(slot)
        world.tick(0.1)
        world.see_all()
    world.finish_round()


def progress(grant: Grant, slot: SlotKey, *segments: tuple[int, int], name: str = "r1") -> PiecesReceived:
    pieces = tuple((Version(v), n) for v, n in segments)
    return PiecesReceived((SlotProgress(PeerId(name), grant.lease_id, slot, pieces, Digest("edge")),))


def test_masked_tokens_are_not_counted_and_the_rest_is_trained() -> None:
    world = started()
    grant = old_lease(world)
    for slot in grant.slots:
        world.submit(grant, slot, name="r1", segments=((0, 3), (2, 4)))
        world.score(slot)
    train_next(world)
    assert world.core.state.num_tokens_masked == 6
    assert world.core.books().trained == 12


def test_drop_leaves_out_whole_rollouts_and_keeps_their_rewards_in_the_mean() -> None:
    world = started(staleness="drop")
    grant = old_lease(world)
    world.submit(grant, grant.slots[0], name="r1", segments=((0, 3), (2, 4)))
    world.submit(grant, grant.slots[1], name="r1", segments=((2, 7),))
    for slot in grant.slots:
        world.score(slot)
    train_next(world)
    books = world.core.books()
    assert (books.dropped, books.trained) == (1, 11)
    assert world.core.state.num_tokens_masked == 0
    sealed = [fact for fact in world.facts if isinstance(fact, f.RoundSealed)][-1]
    assert grant.slots[1] in [slot for _, part in sealed.shares for slot in part]


def test_drop_cancels_at_the_commit_what_could_only_be_dropped() -> None:
    world = started(staleness="drop")
    grant = world.lease("r1", 2)
    world.do(progress(grant, grant.slots[0], (0, 5)))
    world.make_version()
    assert not world.asked(CancelSlots), "it would be fresh enough for the next update"
    world.make_version()
    assert world.asked(CancelSlots) == [CancelSlots(PeerId("r1"), (grant.slots[0],))]
    assert world.core.books().dropped == 1
    assert world.core.state.leases[grant.lease_id].slots == [(0, 1)], "the other slot has no token yet and goes on"


@pytest.mark.parametrize("staleness", ["mask_tokens", "wait"])
def test_the_other_policies_cancel_nothing(staleness: str) -> None:
    world = started(staleness=staleness)
    grant = world.lease("r1", 2)
    world.do(progress(grant, grant.slots[0], (0, 5)))
    world.make_version()
    world.fill_batch()
    assert not world.asked(CancelSlots)
    assert grant.lease_id in world.core.state.leases


def test_wait_holds_the_round_until_old_slots_are_done() -> None:
    world = started(staleness="wait")
    grant = world.lease("r1", 2)
    world.make_version()
    world.fill_batch()
    world.tick(0.5)
    assert world.core.state.round is None, "after this update the slots of version 0 would be over the bound"
    assert world.core.waiting_for(world.now_ms)[0] == "WAITING_FOR_OLD_SLOTS"
    for slot in grant.slots:
        world.submit(grant, slot, name="r1", segments=((0, 4),))
        world.score(slot)
    world.tick(0.1)
    round_ = world.core.state.round
    assert round_ is not None
    assert grant.slots[0] in [slot for _, part in round_.shares for slot in part], "the oldest groups come first"


def test_wait_ends_when_a_lease_could_last_no_longer() -> None:
    world = started(staleness="wait")
    world.lease("r1", 2)
    world.make_version()
    world.fill_batch()
    for _ in range(25):
        world.tick(1.0)
        world.see_all()
    assert world.core.state.round is not None, "a node that never fills its slots must not stop the run"


def equal_groups(world: World, count: int, reward: float = 1.0) -> None:
    for _ in range(count):
        grant = world.lease("r0", 2)
        for slot in grant.slots:
            world.submit(grant, slot)
            world.score(slot, reward)


def test_groups_without_variance_return_their_capacity() -> None:
    world = started(dynamic_sampling=True, max_lag=0)
    equal_groups(world, 10)
    assert world.core.state.round is None
    assert world.core.books().filtered == 20
    world.make_version()
    assert world.core.state.head is not None
    assert world.core.state.head.version == 1


def test_without_dynamic_sampling_they_are_trained_on() -> None:
    world = started(max_lag=0)
    equal_groups(world, 2)
    assert world.core.state.round is not None


def test_a_run_whose_rewards_are_all_equal_goes_on() -> None:
    world = started(dynamic_sampling=True, max_lag=0)
    equal_groups(world, 2 * returns.MAX_FILTERED_BATCHES)
    assert world.core.state.round is None
    equal_groups(world, 2)
    assert world.core.state.round is not None
    world.finish_round()
    assert world.core.state.num_filtered_in_row == 0
