"""The long tail of a batch, simulated: with slots that another node takes over (`core.outliers`), and without.

The case is that of the memory of lengths (`dispatch`): 256 tasks that come again, in batches of half of them, at lag 0;
lengths differ by a factor of sigma 1.0 from task to task and of sigma 0.2 within a task; eight nodes, and eight that
are three times as slow. The tail of a batch is the time from nine tenths of its slots to the last. What was sampled of
a slot that moves is computed anew, twenty tokens in the time of one. Both arms have the same tasks, lengths and nodes.
"""

import contextlib
import math
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal
from unittest.mock import patch

from coordinator.core import leases, outliers
from protocol.ids import SlotKey, Version
from protocol.run import EnvironmentSpec
from tests.bench.dispatch import QUICK, small_rules
from tests.bench.simulated_nodes import Engine
from tests.bench.simulator import Swarm
from tests.bench.table import Figure, at_least, at_most, print_table, reported

SEEDS = (0, 1, 2, 3, 4, 5)
NUM_TASKS, GROUPS, GROUP_SIZE = 256, 128, 8
FIRST, LAST = 2, 6
"""Batches that are measured: those of the second and third epoch, when something is remembered."""

RUNAWAYS, LONGER = 0.02, 4.0

Rule = Literal["ours", "nothing moves", "outgrown alone"]


@dataclass(frozen=True, slots=True)
class Run:
    """`runaways` is the share of slots that come to be up to `LONGER` times as long as their task's; where outgrown
    slots move alone, all others stay where they are until they are."""

    seed: int
    rule: Rule
    runaways: float = 0.0
    slowness: float = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the batches, in seconds; `moved` is the share of slots."""

    step_s: float
    tail_s: float
    moved: float


def carry_out(run: Run) -> Outcome:
    """Simulates a run."""

    def length_of(slot: SlotKey) -> int:
        task = random.Random(f"{run.seed} task {slot.task.index % NUM_TASKS}").gauss(0, 1.0)
        chance = random.Random(f"{run.seed} {slot.task.index}/{slot.sample}")
        noise = chance.gauss(0, 0.2)
        if chance.random() < run.runaways:
            noise += math.log(LONGER) * chance.random()
        return max(1, min(16_384, round(2500 * math.exp(task + noise))))

    fast = Engine(seats=16)
    slow = replace(fast, base_s=run.slowness * fast.base_s, per_sequence_s=run.slowness * fast.per_sequence_s)
    rules = small_rules(
        mode="sequential",
        groups_per_batch=GROUPS,
        group_size=GROUP_SIZE,
        lease_s=7200.0,
        environment=EnvironmentSpec("sums", num_tasks=NUM_TASKS),
    )
    swarm = Swarm(
        rules,
        engines=[fast] * 8 + [slow] * 8,
        trainer_rates=QUICK,
        length_of=length_of,
        all_every=1,
        seed=run.seed,
    )
    with contextlib.ExitStack() as patches:
        if run.rule == "nothing moves":
            patches.enter_context(patch.object(leases, "take_outliers", lambda *_, **__: ()))
        if run.rule == "outgrown alone":
            patches.enter_context(patch.object(outliers, "_is_end", lambda _: False))
        swarm.run_to(FIRST)
        num_before = swarm.core.state.num_moved
        took_s = swarm.run_to(LAST)
    num_moved, num_batches = swarm.core.state.num_moved - num_before, LAST - FIRST
    tails_s = [_tail_s(swarm.filled_s[Version(version)]) for version in range(FIRST, LAST)]
    return Outcome(took_s / num_batches, fmean(tails_s), num_moved / (num_batches * GROUPS * GROUP_SIZE))


def _tail_s(filled_s: list[float]) -> float:
    """Of one batch, from the moments at which its slots were filled."""
    return filled_s[-1] - filled_s[math.ceil(0.9 * len(filled_s)) - 1]


def figures() -> list[Figure]:
    """All arms over all seeds."""
    cases = {
        "plain": Run(0, "ours"),
        "runaways": Run(0, "ours", runaways=RUNAWAYS),
        "equal": Run(0, "ours", slowness=1),
    }
    rules: tuple[Rule, ...] = ("nothing moves", "ours", "outgrown alone")
    runs = [replace(case, seed=seed, rule=rule) for case in cases.values() for seed in SEEDS for rule in rules]
    runs = [run for run in runs if run.slowness > 1 or run.rule != "outgrown alone"]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(runs, pool.map(carry_out, runs), strict=True))

    def cut(case: str, rule: Rule, name: str = "tail_s") -> float:
        """By how much the mean over the seeds is smaller than where nothing moves."""
        means = [
            fmean(getattr(found[replace(cases[case], seed=seed, rule=arm)], name) for seed in SEEDS)
            for arm in (rule, rules[0])
        ]
        return 1 - means[0] / means[1]

    moved = max(outcome.moved for outcome in found.values())
    what = f"lag 0, 8 fast and 8 slow nodes (1:3), batches of 1,024 slots, {len(SEEDS)} seeds; where nothing moves"
    runaways = f"{RUNAWAYS:.0%} of the slots up to {LONGER:g} times as long as their tasks'; where nothing moves"
    alone = "the last of a group that are longer than all that is remembered; where nothing moves"
    return [
        at_least("time of the last 10 % of a batch, cut by", cut("plain", "ours"), 0.3, anchor=what, simulated=True),
        at_least("the same, with runaways", cut("runaways", "ours"), 0.3, anchor=runaways, simulated=True),
        at_most("slots that moved for it, worst of all runs", moved, 0.05, anchor="of all in a run", simulated=True),
        reported("a step, cut by", cut("plain", "ours", "step_s"), anchor=what, simulated=True),
        reported("the tail, outgrown slots alone", cut("plain", "outgrown alone"), anchor=alone, simulated=True),
        reported("the same, with runaways", cut("runaways", "outgrown alone"), anchor=alone, simulated=True),
        reported("the tail on 16 equal nodes, cut by", cut("equal", "ours"), anchor=what, simulated=True),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if print_table(figures()) else 1)
