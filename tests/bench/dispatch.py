"""Who gets which work, simulated: supply over slow links, fair shares, nodes that fail, long tasks first, groups that
are filtered, nodes that never update.

Every case is a small swarm around the real core (`simulator`). Where a rule is compared with another, the other is the
same core with that one rule replaced, under the same tasks and nodes.
"""

import contextlib
import math
import random
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Literal
from unittest.mock import patch

from coordinator.core import demand, leases
from coordinator.core import events as e
from coordinator.core.replies import Grant
from coordinator.core.rules import Rules
from coordinator.core.turn import Turn
from node.planner import wanted_outstanding
from protocol.errors import NoWorkError
from protocol.ids import PeerId, SlotKey
from protocol.run import EnvironmentSpec, SamplingContract
from tests.bench.simulated_nodes import Engine
from tests.bench.simulator import Swarm
from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.coordinator.world import World, make_rules

QUICK = [1e9]
"""A trainer whose steps take no time."""

NUM_TURNS = 1000
DEADLINE_S = 60.0

Rule = Literal["ours", "chance", "shortest queue"]
LEAST_GAIN: dict[Rule, float] = {"chance": 1.15, "shortest queue": 1.10}


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
            trainer_rates=QUICK,
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
        for name, lease in grants:
            got[name] += turn > 0  # in the first turn nobody has asked before, and the first to come is served
            for slot in lease.slots:
                world.submit(lease, slot, name=name)
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
    """F20.1: live tokens per second of a pool with speeds of 1 to 8, against the same core with other dispatch."""
    one = Engine(seats=8, base_s=0.096, per_sequence_s=0.0, pause_s=0.0, lease_slots=4)
    pool = [replace(one, base_s=one.base_s / speed) for speed in (1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 8, 8)]

    def pace(rule: Rule, *, takes_all: bool) -> float:
        length_of, chance = lognormal(500, 0.3), random.Random(1)
        ahead = (lambda **_: 1000) if takes_all else wanted_outstanding
        rules = small_rules(max_lag=1)
        swarm = Swarm(rules, engines=pool, trainer_rates=QUICK, length_of=length_of, num_leases=ahead, pause_s=0.0)

        def next_turn(_: MutableMapping[PeerId, float], weights: Mapping[PeerId, float]) -> PeerId:
            nodes, hungry = swarm.core.state.nodes, swarm.core.soft.hungry
            by_load = min(weights, key=lambda peer: (nodes[peer].num_leased + hungry[peer].num_allotted, peer))
            return by_load if rule == "shortest queue" else chance.choice(sorted(weights))

        with contextlib.ExitStack() as patches:
            if rule != "ours":
                patches.enter_context(patch.object(leases, "part_of", lambda turn, peer_id: 1.0))
                patches.enter_context(patch.object(demand, "next_turn", next_turn))
            swarm.run_to(10)
            num_before = len(swarm.rounds)
            took_s = swarm.run_to(40)
        return sum(batch.num_live for batch in swarm.rounds[num_before:]) / took_s

    all_rules: list[Rule] = ["ours", *LEAST_GAIN]
    pushed = {rule: pace(rule, takes_all=True) for rule in all_rules}
    pulled = {rule: pace(rule, takes_all=False) for rule in all_rules}
    what = "bound 1, nodes that take whatever they are given, so that dispatch alone decides"
    asks = "bound 1, nodes that ask when seats come free, as ours do: then hardly any rule matters"
    return [
        at_least(
            f"fair shares over {rule}, live tokens/s",
            pushed["ours"] / pushed[rule],
            least,
            anchor=f"the same core whose turns {rule} decides; {what}",
            simulated=True,
        )
        for rule, least in LEAST_GAIN.items()
    ] + [
        reported(f"the same over {rule}, pulled", pulled["ours"] / pulled[rule], anchor=asks, simulated=True)
        for rule in LEAST_GAIN
    ]


def _failing_nodes() -> list[Figure]:
    """F6.1: a quarter of the nodes fails half of its samples, somewhere in their length."""

    def on_time(*, load: float, is_honest: bool) -> float:
        good = Engine(seats=4, base_s=0.02, per_sequence_s=0.0, pause_s=1.0, lease_slots=1)
        pool = [replace(good, loss=0.5, is_honest=is_honest)] * 4 + [good] * 12
        swarm = Swarm(
            small_rules(lease_s=DEADLINE_S),
            engines=pool,
            trainer_rates=[load * sum(engine.tokens_per_s for engine in pool)],
            length_of=lognormal(500, 0.5),
            pause_s=1.0,
            all_every=1,
        )
        swarm.run_to(5)
        swarm.waits_s.clear()
        swarm.run_to(50)
        late = sum(wait_s > DEADLINE_S for wait_s in [*swarm.waits_s, *swarm.waiting_s()])
        return 1 - (late + swarm.core.books().failed) / (len(swarm.waits_s) + late)

    loads = (0.3, 0.5, 0.65)
    what = (
        f"filled within {DEADLINE_S:.0f} s, six times the median service, at a load of 30 to 65 %; 4 of 16 nodes fail"
    )
    told = min(on_time(load=load, is_honest=True) for load in loads)
    silent = min(on_time(load=load, is_honest=False) for load in loads)
    return [
        at_least("slots filled on time, nodes that say that they failed", told, 0.98, anchor=what, simulated=True),
        reported("the same, nodes that fall silent", silent, anchor=what, simulated=True),
    ]


def _memory() -> list[Figure]:
    """F9.1: tasks come again; their lengths differ by a factor of sigma 1.0, those of one task by sigma 0.2."""
    fast = Engine(seats=16)
    slow = replace(fast, base_s=3 * fast.base_s, per_sequence_s=3 * fast.per_sequence_s)
    num_tasks, batches_an_epoch = 256, 2

    def length_of(slot: SlotKey) -> int:
        task = random.Random(f"task {slot.task.index % num_tasks}").gauss(0, 1.0)
        noise = random.Random(f"{slot.task.index}/{slot.sample}").gauss(0, 0.2)
        return max(1, min(16_384, round(2500 * math.exp(task + noise))))

    def makespan_s(pool: list[Engine], *, remembers: bool) -> float:
        environment = EnvironmentSpec("sums", num_tasks=num_tasks if remembers else 0)
        rules = small_rules(
            mode="sequential", groups_per_batch=128, group_size=8, lease_s=7200.0, environment=environment
        )
        swarm = Swarm(rules, engines=pool, trainer_rates=QUICK, length_of=length_of)
        with patch.object(leases, "take_outliers", lambda *_, **__: ()):  # what that gives is measured in `tail`
            swarm.run_to(batches_an_epoch)
            return swarm.run_to(4 * batches_an_epoch) / (3 * batches_an_epoch)

    pools = {"8 fast and 8 slow nodes (1:3)": [fast] * 8 + [slow] * 8, "16 equal nodes": [fast] * 16}
    mixed, equal = (makespan_s(pool, remembers=True) / makespan_s(pool, remembers=False) for pool in pools.values())
    what = "step of 1,024 slots at lag 0 with the memory of lengths, against the same tasks in order; "
    names = list(pools)
    return [
        at_most("makespan, longest first over any order", mixed, 0.7, anchor=what + names[0], simulated=True),
        reported("the same, equal nodes", equal, anchor=what + names[1], simulated=True),
    ]


def _filtering() -> list[Figure]:
    """Dynamic sampling: nine in ten groups have equal rewards."""

    def run(share: float) -> tuple[float, Swarm]:
        def reward_of(slot: SlotKey) -> float:
            is_flat = random.Random(f"reward {slot.task.index}").random() < share
            return 0.0 if is_flat else float(slot.sample % 2)

        rules = small_rules(groups_per_batch=16, dynamic_sampling=True)
        engines = [Engine(seats=16, pause_s=1.0)] * 6
        swarm = Swarm(
            rules,
            engines=engines,
            trainer_rates=[20_000.0],
            length_of=lognormal(500, 0.5),
            reward_of=reward_of,
            pause_s=1.0,
        )
        return 30 * 3600 / swarm.run_to(30), swarm

    (all_used, _), (pace, swarm) = run(0.0), run(0.9)
    books, spec = swarm.core.books(), swarm.rules.spec
    num_open = (books.running + books.queued + books.in_round) // spec.group_size
    num_spare = (spec.max_lag + swarm.head + 1) * spec.groups_per_batch - books.trained // spec.group_size - num_open
    turn = Turn(swarm.rules, swarm.core.state, swarm.core.soft, swarm.now_ms)
    lost = abs(num_spare - leases.spare_groups(turn, version=swarm.head))
    what = "90 % of the groups filtered; 6 nodes and a trainer"
    return [
        at_least(
            "versions/h with 90 % filtered, over none filtered", pace / all_used, 0.05, anchor=what, simulated=True
        ),
        at_most("groups whose capacity did not come back", lost, 0, anchor=what, simulated=True),
        reported("slots filtered for each one trained", books.filtered / books.trained, anchor="9", simulated=True),
    ]


def _enforcement() -> list[Figure]:
    """One node in twelve never loads a new version."""
    good = Engine(seats=16, pause_s=1.0)

    def run(engines: list[Engine]) -> tuple[float, int, Swarm]:
        swarm = Swarm(
            small_rules(max_lag=2),
            engines=engines,
            trainer_rates=[80_000.0],
            length_of=lognormal(500, 0.5),
            pause_s=1.0,
        )
        swarm.run_to(5)
        last = list(swarm.nodes.values())[-1]
        num_before = last.num_granted
        return 40 / swarm.run_to(45), last.num_granted - num_before, swarm

    alone, _, _ = run([good] * 11)
    pace, num_granted, swarm = run([good] * 11 + [replace(good, updates=False)])
    what = "12 nodes of which one never updates, against the other 11 alone"
    return [
        at_least("versions/h beside a node that never updates", pace / alone, 0.99, anchor=what, simulated=True),
        at_most("slots that it was given once it was over the bound", num_granted, 0, anchor=what, simulated=True),
        reported("times that it was told why", swarm.refusals["VERSION_TOO_OLD"], anchor=what, simulated=True),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if print_table(figures()) else 1)
