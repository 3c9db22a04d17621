"""Sharing of scarce work: after any number of turns nobody is a whole turn from its exact share."""

from collections import Counter
from collections.abc import Callable, MutableMapping
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import events as e
from coordinator.core.fair import next_turn
from coordinator.core.replies import Grant
from protocol.errors import NoWorkError
from protocol.ids import LeaseId, PeerId, Version
from tests.coordinator.world import World, make_rules

Rule = Callable[[MutableMapping[PeerId, float], dict[PeerId, float]], PeerId]
NUM_TURNS = 200
weights_of_nodes = st.lists(st.one_of(st.integers(1, 1000), st.floats(0.01, 1000.0)), min_size=1, max_size=20).map(
    lambda values: {PeerId(f"n{index:02}"): float(value) for index, value in enumerate(values)}
)


def worst_deviation(rule: Rule, weights: dict[PeerId, float], *, num_turns: int = NUM_TURNS) -> Fraction:
    """The largest distance of any node's turns from its exact share of them, after any number of turns."""
    total = sum(map(Fraction, weights.values()))
    shares = {peer: Fraction(weight) / total for peer, weight in weights.items()}
    credits: dict[PeerId, float] = {}
    had: Counter[PeerId] = Counter()
    worst = Fraction(0)
    for turn in range(1, num_turns + 1):
        had[rule(credits, weights)] += 1
        worst = max(worst, *(abs(had[peer] - turn * share) for peer, share in shares.items()))
    return worst


@given(weights_of_nodes)
@settings(max_examples=200)
def test_deviation_is_under_a_turn_for_every_prefix(weights: dict[PeerId, float]) -> None:
    num_nodes = len(weights)
    bound = 1 - Fraction(1, max(1, 2 * num_nodes - 2)) if num_nodes > 1 else Fraction(0)
    assert worst_deviation(next_turn, weights) <= bound + Fraction(1, 10**6)


def heaviest(credits: MutableMapping[PeerId, float], weights: dict[PeerId, float]) -> PeerId:
    """No sharing at all."""
    return max(weights, key=lambda peer: weights[peer])


def by_smooth_credit(credits: MutableMapping[PeerId, float], weights: dict[PeerId, float]) -> PeerId:
    """The usual "smooth" weighted round robin: whoever is due most."""
    total = sum(weights.values())
    for peer, weight in weights.items():
        credits[peer] = credits.get(peer, 0.0) + weight / total
    chosen = max(weights, key=lambda peer: credits[peer])
    credits[chosen] -= 1.0
    return chosen


@pytest.mark.parametrize("rule", [heaviest, by_smooth_credit])
def test_other_rules_would_be_seen(rule: Rule) -> None:
    """Negative control: two rules that let somebody be a whole turn from its share."""
    weights = {PeerId(f"n{index}"): weight for index, weight in enumerate([4.0, 1, 32, 32, 4, 1, 2, 32, 4])}
    assert worst_deviation(rule, weights) >= 1


@given(weights_of_nodes, st.data())
@settings(max_examples=100)
def test_turns_go_only_to_who_is_there(weights: dict[PeerId, float], data: st.DataObject) -> None:
    """Nodes come and go; those that are away keep their credit, and nobody waits for ever."""
    credits: dict[PeerId, float] = {}
    for _ in range(20):
        here = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
        chosen = next_turn(credits, {peer: weights[peer] for peer in here})
        assert chosen in here
        assert here <= set(credits)
    equal = dict.fromkeys(weights, 1.0)
    seen = {next_turn(credits, equal) for _ in range(4 * len(weights))}
    assert seen == set(weights)


@given(st.dictionaries(st.sampled_from([PeerId(name) for name in "abc"]), st.sampled_from([0.0, -1.0]), min_size=1))
def test_weights_that_are_not_positive_still_get_turns(weights: dict[PeerId, float]) -> None:
    credits: dict[PeerId, float] = {}
    assert {next_turn(credits, weights) for _ in range(6)} == set(weights)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_core_shares_what_is_scarce_to_within_a_group(rates: list[int], chance: Random) -> None:
    """Trainers are the bottleneck: each version makes room for one group, and every node asks, in any order."""
    world = World(make_rules(groups_per_batch=1, group_size=2, max_lag=9, expected_nodes=1))
    world.start(rollouts=0)
    names = [world.join(f"n{index}", allowed="rollout", rate=100.0 * rate) for index, rate in enumerate(rates)]
    world.see_all()
    for name in names:
        while fill(world, name):
            pass
    had: Counter[PeerId] = Counter()
    for turn in range(1, 41):
        world.finish_round()
        world.see_all()
        chance.shuffle(names)
        served = [name for name in names if fill(world, name)]
        assert len(served) == 1
        had[served[0]] += 1
        fill(world, served[0])  # it wants more at once
        for name, rate in ((PeerId(f"n{index}"), rate) for index, rate in enumerate(rates)):
            assert abs(had[name] - turn * rate / sum(rates)) < 1, f"{name} had {had[name]} of {turn} turns"


def fill(world: World, name: PeerId) -> bool:
    """A node asks for as much as it can get, and fills it; whether there was anything."""
    head = world.core.state.head
    assert head is not None
    lease_id = LeaseId(f"{len(world.facts)}")
    try:
        grant = world.do(e.WorkRequested(name, Version(head.version), head.root, 100, lease_id)).reply
    except NoWorkError:
        return False
    assert isinstance(grant, Grant)
    for slot in grant.slots:
        world.submit(grant, slot, name=name)
        world.score(slot)
    return True
