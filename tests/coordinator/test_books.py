"""The books, and that their check finds what it is there to find."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.core.books import check
from coordinator.core.state import State
from tests.coordinator.world import World


def busy() -> World:
    """A swarm with slots everywhere: waiting, leased, accepted, scored, in a round, trained, failed."""
    world = World()
    world.start(trainers=1, rollouts=2)
    world.make_version()
    world.fill_batch()
    first = world.lease("r0", 3)
    world.submit(first, first.slots[0])
    world.submit(first, first.slots[1])
    world.score(first.slots[0])
    return world


def test_every_slot_is_somewhere() -> None:
    books = busy().core.books()
    assert books.is_balanced
    assert (books.issued, books.running, books.queued, books.in_round, books.trained) == (12, 2, 2, 4, 4)
    assert (books.waiting, books.unscored, books.open, books.filled) == (1, 1, 1, 10)


def test_lost_slot_unbalances() -> None:
    books = busy().core.books()
    assert not replace(books, running=books.running - 1).is_balanced
    assert not replace(books, filled=books.filled + 1).is_balanced


def forget_waiting(state: State) -> None:
    state.waiting.pop()


def forget_group(state: State) -> None:
    state.groups.pop(max(state.groups))


def forget_lease(state: State) -> None:
    state.leases.clear()


def count_twice(state: State) -> None:
    state.tally["trained"] += 1
    state.num_issued += 1


def train_a_queued_slot(state: State) -> None:
    slot = next(s for group in state.groups.values() for s in group.slots if s.status == "scored")
    slot.status = "trained"


def queue_a_reserved_group(state: State) -> None:
    state.complete.append(next(iter(state.groups)))


def skip_a_version(state: State) -> None:
    state.versions[-1].version += 1  # type: ignore[assignment]


def swap_the_head(state: State) -> None:
    state.versions[-1].root = state.versions[0].root


def move_the_head_under_the_batch(state: State) -> None:
    assert state.batch is not None
    state.batch.base_version -= 1  # type: ignore[assignment]


def change_the_divisor(state: State) -> None:
    assert state.batch is not None
    state.batch.num_tokens += 1


def hold_more(state: State) -> None:
    next(iter(state.nodes.values())).num_leased += 1


@pytest.mark.parametrize(
    "damage",
    [
        forget_waiting,
        forget_group,
        forget_lease,
        count_twice,
        train_a_queued_slot,
        queue_a_reserved_group,
        skip_a_version,
        swap_the_head,
        move_the_head_under_the_batch,
        change_the_divisor,
        hold_more,
    ],
)
def test_damage_is_found(damage: Callable[[State], None]) -> None:
    world = busy()
    check(world.core.state)
    damage(world.core.state)
    with pytest.raises((AssertionError, KeyError)):
        check(world.core.state)
