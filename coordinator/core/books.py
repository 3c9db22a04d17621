"""The books: where every slot and every claim under a lease is, and the proof that they balance. Pure.

Slots: issued = running + queued + in_round + trained + dropped + filtered + failed. *Running* are those under a lease
or waiting for a node; *queued* are accepted ones that no batch has reserved. Leases are counted in slots too, since
one lease may end in several ways: granted = open + filled + expired + returned. `books` reads counters and is cheap;
`check` counts everything again.
"""

from dataclasses import dataclass
from typing import get_args

from coordinator.core.shares import share_of
from coordinator.core.state import State, Status
from protocol.lag import lag


@dataclass(frozen=True, slots=True)
class Books:
    """Both books, all in slots. `waiting` is the part of `running` that no node has; `unscored` the part of `queued`
    that has no reward yet."""

    issued: int
    running: int
    waiting: int
    queued: int
    unscored: int
    in_round: int
    trained: int
    dropped: int
    filtered: int
    failed: int
    granted: int
    open: int
    filled: int
    expired: int
    returned: int

    @property
    def is_balanced(self) -> bool:
        """Whether both sums hold."""
        ends = self.trained + self.dropped + self.filtered + self.failed
        slots_hold = self.issued == self.running + self.queued + self.in_round + ends
        return slots_hold and self.granted == self.open + self.filled + self.expired + self.returned


def books(state: State) -> Books:
    """The books as the counters have them."""
    tally, claims = state.tally, state.claims
    return Books(
        issued=state.num_issued,
        running=tally["waiting"] + tally["leased"],
        waiting=tally["waiting"],
        queued=tally["accepted"] + tally["scored"],
        unscored=tally["accepted"],
        in_round=tally["in_round"],
        trained=tally["trained"],
        dropped=tally["dropped"],
        filtered=tally["filtered"],
        failed=tally["failed"],
        granted=claims["granted"],
        open=claims["open"],
        filled=claims["filled"],
        expired=claims["expired"],
        returned=claims["returned"],
    )


def check(state: State) -> None:
    """Counts everything anew; raises `AssertionError` at the first thing that cannot be."""
    assert books(state).is_balanced, f"the books do not balance: {books(state)}"
    _check_tally(state)
    _check_places(state)
    _check_leases(state)
    _check_versions(state)
    _check_round(state)


def _check_tally(state: State) -> None:
    counted: dict[Status, int] = dict.fromkeys(get_args(Status), 0)
    for group in state.groups.values():
        for slot in group.slots:
            counted[slot.status] += 1
    for status, number in counted.items():
        total = number + state.retired_tally[status]
        assert state.tally[status] == total, f"{status}: the book says {state.tally[status]}, there are {total}"


def _check_places(state: State) -> None:
    """A slot is in exactly one of: the waiting list, one lease, a complete or reserved group, an open group."""
    waiting = {(i, s) for i, g in state.groups.items() for s, slot in enumerate(g.slots) if slot.status == "waiting"}
    assert state.waiting == sorted(waiting), "the waiting list is not the waiting slots"
    reserved = state.batch.groups if state.batch else ()
    assert not set(reserved) & set(state.complete), "a group is both reserved and complete"
    complete = {index for index, group in state.groups.items() if group.is_complete}
    assert complete == {*reserved, *state.complete}, "a complete group is in no queue"
    in_round = {
        group.key(sample)
        for group in state.groups.values()
        for sample, slot in enumerate(group.slots)
        if slot.status == "in_round"
    }
    shared = [key for _, keys in state.round.shares for key in keys] if state.round else sorted(in_round)
    assert sorted(shared) == sorted(in_round), "the shares are not the reserved slots, each once"
    assert not set(state.groups) & set(state.retired), "a group is both open and finished"
    assert set(state.moved) <= set(state.groups), "a slot of a finished group counts as moved"


def _check_leases(state: State) -> None:
    claimed = [place for lease in state.leases.values() for place in lease.slots]
    assert len(claimed) == len(set(claimed)) == state.claims["open"], "a slot is under two leases"
    for lease_id, lease in state.leases.items():
        for index, sample in lease.slots:
            slot = state.groups[index].slots[sample]
            assert (slot.status, slot.lease_id) == ("leased", lease_id), "a lease claims a slot that is not its own"
    for peer_id, node in state.nodes.items():
        held = sum(len(lease.slots) for lease in state.leases.values() if lease.peer_id == peer_id)
        assert node.num_leased == held, f"node {peer_id} holds {held} slots, the book says {node.num_leased}"
    assert state.tally["leased"] == len(claimed), "a leased slot has no lease"


def _check_versions(state: State) -> None:
    numbers = [record.version for record in state.versions]
    assert not numbers or numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a version was skipped"
    head = state.head
    if head is not None and state.head_body is not None:
        assert state.head_body.version == head.version, "the head's body is another version's"
        assert state.head_body.root == head.root == state.roots[head.version], "the head has two roots"


def _check_round(state: State) -> None:
    if state.batch is None:
        assert state.round is None, "a round is open without a batch"
        return
    head = state.head
    assert head is not None, "a batch was cut before version 0"
    assert state.batch.base_version == head.version, "the batch is not for the head"
    if state.round is None:
        return
    num_tokens = 0
    for peer_id in state.round.peer_ids:
        for item in share_of(state, state.round.round_id, peer_id):
            versions = [version for version, length in item.segments for _ in range(length)]
            live = [version for version, alive in zip(versions, item.mask, strict=True) if alive]
            assert live, f"slot {item.slot} has no live token"
            for version in live:
                age = lag(v_train=head.version, v_token=version)
                assert 0 <= age <= state.batch.max_lag, f"a token of lag {age} is live in slot {item.slot}"
            num_tokens += len(live)
    assert num_tokens == state.batch.num_tokens, "the divisor is not the number of live tokens"
