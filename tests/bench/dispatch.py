"""Who gets which work, simulated: supply over slow links, fair shares, nodes that fail, long tasks first, groups that
are filtered, nodes that never update.

Every case is a small swarm around the real core (`simulator`). Where a rule is compared with another, the other is the
same core with that one rule replaced, under the same tasks and nodes.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from unittest.mock import patch

from coordinator.core import demand, leases
from coordinator.core import events as e
from coordinator.core.pace import weight_of
from coordinator.core.rules import Rules
from coordinator.core.turn import Turn
from node.planner import wanted_outstanding
from coordinator.core.replies import Grant
from protocol.errors import NoWorkError
from protocol.ids import PeerId, SlotKey
from protocol.run import EnvironmentSpec, SamplingContract
from tests.bench.simulated_nodes import Engine
from tests.bench.simulator import Swarm
from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.coordinator.world import World, make_rules

FAST_TRAINER = [1e9]
NUM_TURNS = 1000


def small_rules(**changes: object) -> Rules:
    """Batches of 32 groups of 4, bound 4; any field of the run's spec may be changed."""
    sizes = {"groups_per_batch": 32, "group_size": 4, "max_lag": 4, "max_concurrent": 1_000_000}
    times = {"heartbeat_s": 10.0, "lease_s": 600.0, "round_s": 3600.0}
    return make_rules(**{**sizes, **times, "sampling": SamplingContract(1.0, 16_384, (0,), 100), **changes})


def lognormal(median: float, sigma: float, *, cap: int = 16_384) -> Callable[[SlotKey], int]:
    """Lengths that are the slot's own, wherever and however often it is sampled."""

    def length_of(slot: SlotKey) -> int:
        chance = random.Random(f"{slot.task.index}/{slot.sample}")
        return max(1, min(cap, round(median * math.exp(sigma * chance.gauss(0, 1)))))

    return length_of


def figures() -> list[Figure]:
    """All cases."""
    return [*_supply(), *_fairness(), *_mixed_pool(), *_failing_nodes(), *_memory(), *_filtering(), *_enforcement()]


def _supply() -> list[Figure]:
    """F7.1: one seat, samples of one second, and requests that take up to three times as long."""

    def busy_share(*, ratio: float, sigma: float, num_leases: Callable[..., int]) -> float:
        engine = Engine(seats=1, base_s=0.01, per_sequence_s=0.0, pause_s=0.0, rtt_s=ratio, lease_slots=1)
        rules = small_rules(group_size=2, max_lag=8)
        swarm = Swarm(
            rules,
            engines=[engine] * 8,
            trainer_rates=FAST_TRAINER,
            length_of=lognormal(100, sigma),
            num_leases=num_leases,
            pause_s=0.0,
        )
        swarm.run_to(5)
        before_s = sum(node.busy_s for node in swarm.nodes.values())
        took_s = swarm.run_to(30)
        return (sum(node.busy_s for node in swarm.nodes.values()) - before_s) / took_s / len(swarm.nodes)

    def one(**_: float | None) -> int:
        return 1

    busy = {r: busy_share(ratio=r, sigma=0.0, num_leases=wanted_outstanding) for r in (0.5, 1.0, 2.0, 3.0)}
    rule = "requests take r x the service time; ceil(r) + 1 leases at a time"
    return [
        at_least("rollout nodes busy, worst of r = 0.5 to 3", min(busy.values()), 0.98, anchor=rule, simulated=True),
        reported(
            "the same, r = 3, lengths spread by sigma 0.3",
            busy_share(ratio=3.0, sigma=0.3, num_leases=wanted_outstanding),
            anchor=rule,
            simulated=True,
        ),
        reported(
            "the same, one lease at a time, r = 1",
            busy_share(ratio=1.0, sigma=0.0, num_leases=one),
            anchor="1/2",
            simulated=True,
        ),
        reported(
            "the same, one lease at a time, r = 3",
            busy_share(ratio=3.0, sigma=0.0, num_leases=one),
            anchor="1/4",
            simulated=True,
        ),
    ]


def _fairness() -> list[Figure]:
    """F20.1: one group may be under way; six nodes of mixed rates always want it and ask in random order."""
    rates = {"r0": 100.0, "r1": 100.0, "r2": 150.0, "r3": 225.0, "r4": 400.0, "r5": 1000.0}
    world = World(make_rules(max_concurrent=1, lease_s=1000.0))
    world.is_checked = False
    world.start(rollouts=len(rates))
    for name, rate in rates.items():
        world.do(e.CapabilityLearned(PeerId(name), e.Capability(rate, 1.0, 1, "simulated")))
    chance, total, worst, num_idle = random.Random(0), sum(rates.values()), 0.0, 0
    got = dict.fromkeys(rates, 0)
    for turn in range(NUM_TURNS + 1):
        grants = [grant for name in chance.sample(list(rates), len(rates)) if (grant := _ask(world, name))]
        num_idle += not grants
        for name, grant in grants:
            got[name] += turn > 0  # in the first turn nobody has asked before, and the first to come is served
            for slot in grant.slots:
                world.submit(grant, slot, name=name)
                world.do(e.RolloutScored(slot, None))
        worst = max(worst, *(abs(got[name] - sum(got.values()) * rate / total) for name, rate in rates.items()))
    what = f"{NUM_TURNS} groups that come free one by one, six nodes with rates of 1 to 10"
    return [
        at_most("requests by which a node is off its share, after any prefix", worst, 1.0, anchor=what, simulated=True),
        at_most("groups that lay idle meanwhile", num_idle, 0, anchor=what, simulated=True),
    ]


def _ask(world: World, name: str) -> tuple[str, Grant] | None:
    with contextlib.suppress(NoWorkError):
        return name, world.lease(name, world.rules.spec.group_size)
    return None


def _mixed_pool() -> list[Figure]:
    """F20.1: versions per hour of a pool with rates of 1 to 8, against the same core with other rules of dispatch."""
    one = Engine(seats=8, base_s=0.096, per_sequence_s=0.0, pause_s=0.0, lease_slots=4)
    pool = [replace(one, base_s=one.base_s / speed) for speed in (1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 8, 8)]
    chance = random.Random(1)

    def by_chance(_: MutableMapping[PeerId, float], weights: Mapping[PeerId, float]) -> PeerId:
        return chance.choice(sorted(weights))

    def pace(**others: Callable[..., object]) -> float:
        swarm = Swarm(
            small_rules(max_lag=1), engines=pool, trainer_rates=FAST_TRAINER, length_of=lognormal(500, 0.5), pause_s=0.0
        )

        def shortest(_: MutableMapping[PeerId, float], weights: Mapping[PeerId, float]) -> PeerId:
            return min(weights, key=lambda peer: (swarm.core.state.nodes[peer].num_leased, peer))

        with contextlib.ExitStack() as stack:
            if others:
                stack.enter_context(patch.object(leases, "part_of", lambda turn, peer_id: 1.0))
                rule = by_chance if "by_chance" in others else shortest
                stack.enter_context(patch.object(demand, "next_turn", rule))
            swarm.run_to(10)
            return 30 * 3600 / swarm.run_to(40)

    ours = pace()
    print(ours, pace(by_chance=1), pace(shortest=1))
    return []


if __name__ == "__main__":
    for one in (_supply, _fairness, _mixed_pool):
        print_table(one())
