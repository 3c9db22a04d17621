"""The long tail of a batch, simulated: with slots that another node takes over (`core.outliers`), and without.

The case is that of the memory of lengths (`dispatch`): 256 tasks that come again, in batches of half of them, at lag 0;
lengths differ by a factor of sigma 1.0 from task to task and of sigma 0.2 within a task; eight nodes, and eight that
are three times as slow. The tail of a batch is the time from nine tenths of its slots to the last. What was sampled of
a slot that moves is computed anew, twenty tokens in the time of one. Both arms have the same tasks, lengths and nodes.
"""

import math
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from unittest.mock import patch

from coordinator.core import leases
from protocol.ids import SlotKey, Version
from protocol.run import EnvironmentSpec
from tests.bench.dispatch import QUICK, small_rules
from tests.bench.simulated_nodes import Engine
from tests.bench.simulator import Swarm
from tests.bench.table import Figure, at_least, at_most, print_table, reported

SEEDS = (0, 1, 2)
NUM_TASKS, GROUPS, GROUP_SIZE = 256, 128, 8
FIRST, LAST = 2, 8
"""Batches that are measured: from the second epoch on, when something is remembered."""

RUNAWAYS, LONGER = 0.02, 4.0


@dataclass(frozen=True, slots=True)
class Run:
    """`runaways` is the share of slots that come to be up to `LONGER` times as long as their task's."""

    seed: int
    moves: bool
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
    with patch.object(leases, "take_outliers", leases.take_outliers if run.moves else lambda *_, **__: ()):
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
    """Both arms over all seeds, the plain case and two others."""
    cases = {"plain": {}, "runaways": {"runaways": RUNAWAYS}, "equal": {"slowness": 1.0}}
    runs = [Run(seed, moves, **case) for case in cases.values() for seed in SEEDS for moves in (False, True)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(runs, pool.map(carry_out, runs), strict=True))

    def cut(case: str, name: str) -> float:
        """By how much the mean over the seeds is smaller with moves."""
        before, after = (
            fmean(getattr(found[Run(seed, moves, **cases[case])], name) for seed in SEEDS) for moves in (False, True)
        )
        return 1 - after / before

    moved = {case: max(found[Run(seed, True, **how)].moved for seed in SEEDS) for case, how in cases.items()}
    what = f"lag 0, 8 fast and 8 slow nodes (1:3), batches of 1,024 slots, {len(SEEDS)} seeds; the same core without"
    run_off = f"{RUNAWAYS:.0%} of the slots up to {LONGER:g} times as long as their task's"
    return [
        at_least("time of the last 10 % of a batch, cut by", cut("plain", "tail_s"), 0.30, anchor=what, simulated=True),
        at_most("share of slots that moved, worst seed", max(moved.values()), 0.05, anchor=what, simulated=True),
        reported("step, cut by", cut("plain", "step_s"), anchor=what, simulated=True),
        at_least("the tail, with runaways, cut by", cut("runaways", "tail_s"), 0.30, anchor=run_off, simulated=True),
        reported("the tail among equal nodes, cut by", cut("equal", "tail_s"), anchor="16 fast nodes", simulated=True),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if print_table(figures()) else 1)
