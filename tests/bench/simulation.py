"""What the staleness law costs and gives in time, simulated: the real core, sixteen workers, long-tailed lengths.

The case: batches of 1,024 slots; lengths are lognormal with a median of 2,500 tokens, sigma 1.0, capped at 16,384; an
engine has 64 seats and needs 12 ms + 0.12 ms for each running sample to give each of them a token; a trainer takes
10,000 tokens/s; a new version costs 3 s. Asynchronous runs have 12 workers that generate and 4 that train. The
synchronous loop has all 16 for both in turn. Every run makes the same number of versions.

No run of real machines was fitted to this, and it knows neither caches of prefixes nor crowded networks: the ratios
mean something, the seconds do not.
"""

import heapq
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean

from protocol.ids import SlotKey, TaskKey, Version
from tests.bench import dispatch, tail
from tests.bench.dispatch import lognormal, small_rules
from tests.bench.simulated_nodes import Engine
from tests.bench.simulator import Swarm
from tests.bench.table import Figure, at_least, at_most, print_table, reported

UPDATES = 60
SLOTS = 1024
NUM_WORKERS, NUM_TRAINERS = 16, 4
TRAIN_TOKENS_PER_S = 10_000.0
PAUSE_S = 3.0

length_of = lognormal(2500, 1.0)
short_tail = lognormal(2500, 0.3)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run. `changes` are fields of the run's spec."""

    group_size: int = 8
    num_rollouts: int = NUM_WORKERS - NUM_TRAINERS
    trainer_rates: tuple[float, ...] = (TRAIN_TOKENS_PER_S,) * NUM_TRAINERS
    engine: Engine = Engine()  # noqa: RUF009
    has_long_tail: bool = True
    updates: int = UPDATES
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. `step_s`, `train_s` (of the slowest member) and `trainers_busy` are means that leave the
    first versions out; `num_overlaps` counts rounds that began while something was generated, `num_mixed` batches with
    tokens of several versions."""

    total_s: float
    step_s: float
    train_s: float
    num_over: int
    masked: float
    length_ratio: float
    trainers_busy: float
    rollouts_busy: float
    num_overlaps: int
    num_mixed: int
    num_lost: int


# Groups of two where a figure is set beside one of single rollouts: a group is complete when its longest member is.
SINGLES = Run(group_size=2)
LOSSY = replace(Engine(), loss=0.05)
RUNS: dict[str, Run] = {
    # One trainer with the speed of all: the split of a batch costs the synchronous loop nothing.
    "sequential": Run(
        num_rollouts=NUM_WORKERS, trainer_rates=(NUM_WORKERS * TRAIN_TOKENS_PER_S,), changes={"mode": "sequential"}
    ),
    "async": Run(),
    "lossy async": Run(engine=LOSSY),
    "lag 1": replace(SINGLES, changes={"max_lag": 1}),
    "lossy lag 1": replace(SINGLES, engine=LOSSY, changes={"max_lag": 1}),
    "lag 2": replace(SINGLES, changes={"max_lag": 2}),
    "draining": Run(updates=20, changes={"interrupt": False}),
    "roomy": Run(num_rollouts=15),
    "short tail, lag 0": Run(updates=20, has_long_tail=False, changes={"mode": "sequential"}),
    "short tail, lag 1": Run(updates=30, has_long_tail=False, changes={"max_lag": 1}),
    **{
        f"{policy}, lag {lag}": replace(SINGLES, changes={"max_lag": lag, "staleness": policy})
        for policy in ("drop", "wait")
        for lag in (1, 2, 4)
    },
}

ANCHORS = {"drop": {1: 2.12, 2: 2.30, 4: 2.42}, "wait": {1: 1.30, 2: 1.76, 4: 2.35}, "mask": {1: 1.99, 2: 2.44}}
"""Of a simpler program without groups, leases or requests, three seeds."""


def carry_out(run: Run, *, seed: int = 0) -> Outcome:
    """Simulates a run."""
    lengths = length_of if run.has_long_tail else short_tail
    sizes = {"group_size": run.group_size, "groups_per_batch": SLOTS // run.group_size, "lease_s": 1800.0}
    swarm = Swarm(
        small_rules(**{**sizes, **run.changes}),
        engines=[run.engine] * run.num_rollouts,
        trainer_rates=list(run.trainer_rates),
        length_of=lengths,
        pause_s=PAUSE_S,
        seed=seed,
    )
    num_first = run.updates // 6
    first_s = swarm.run_to(num_first)
    total_s = first_s + swarm.run_to(run.updates)
    nodes, batches = swarm.nodes.values(), swarm.rounds[: run.updates]
    num_tokens, num_slots = sum(batch.num_tokens for batch in batches), sum(batch.num_slots for batch in batches)
    return Outcome(
        total_s=total_s,
        step_s=(total_s - first_s) / (run.updates - num_first),
        train_s=fmean(batch.train_s for batch in batches[num_first:]),
        num_over=sum(batch.num_over for batch in batches),
        masked=1 - sum(batch.num_live for batch in batches) / num_tokens,
        length_ratio=num_tokens / num_slots / _mean_length(run.has_long_tail),
        trainers_busy=sum(batch.busy_s for batch in batches[num_first:]) / len(swarm.trainers) / (total_s - first_s),
        rollouts_busy=sum(node.seat_s for node in nodes) / run.engine.seats / len(nodes) / total_s,
        num_overlaps=sum(batch.num_running > 0 for batch in batches),
        num_mixed=sum(len(batch.versions) > 1 for batch in batches),
        num_lost=sum(node.num_lost for node in nodes),
    )


@cache
def _mean_length(has_long_tail: bool) -> float:
    lengths = length_of if has_long_tail else short_tail
    return sum(lengths(_slot(place)) for place in range(UPDATES * SLOTS)) / (UPDATES * SLOTS)


def _slot(place: int) -> SlotKey:
    return SlotKey(Version(0), TaskKey("sums", 7, place // 8), place % 8)


def ideal_synchronous_s() -> float:
    """Seconds for all updates of a synchronous loop without any coordinator: every engine takes its part of the batch
    at once, all train when the last is done, at full speed, then load."""
    engine, total_s = Engine(), 0.0
    for update in range(UPDATES):
        lengths = [length_of(_slot(update * SLOTS + place)) for place in range(SLOTS)]
        part = SLOTS // NUM_WORKERS
        generate_s = max(decode_s(engine, lengths[i : i + part]) for i in range(0, SLOTS, part))
        total_s += generate_s + sum(lengths) / (NUM_WORKERS * TRAIN_TOKENS_PER_S) + PAUSE_S
    return total_s


def decode_s(engine: Engine, lengths: Sequence[int]) -> float:
    """Seconds until the last of some samples that begin together is done."""
    running, done, took_s = list(lengths), 0, 0.0
    heapq.heapify(running)
    while running:
        took_s += (running[0] - done) * engine.step_s(len(running))
        done = heapq.heappop(running)
    return took_s


def figures() -> list[Figure]:
    """All simulated figures of the coordinator; long runs are made by several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=context) as pool:
        results = dict(zip(RUNS, pool.map(carry_out, RUNS.values()), strict=True))
    return [
        *_speed(results),
        *_policies(results),
        *_losses(results),
        *_modes(results),
        *dispatch.figures(),
        *tail.figures(),
    ]


def _speed(results: Mapping[str, Outcome]) -> list[Figure]:
    ideal_s, sequential_s = ideal_synchronous_s(), results["sequential"].total_s
    best_s, ours = min(ideal_s, sequential_s), results["async"]
    what = f"{UPDATES} versions, lag 4, mask_tokens, groups of 8; against "
    drained_s = results["draining"].total_s * UPDATES / RUNS["draining"].updates
    return [
        at_least(
            "async over synchronous",
            best_s / ours.total_s,
            2.2,
            unit="x",
            anchor=what + "an ideal synchronous loop, or this core in sequential mode if that is faster",
            simulated=True,
        ),
        reported(
            "the same over this core in sequential mode",
            sequential_s / ours.total_s,
            unit="x",
            anchor=what + "16 + 16 nodes at lag 0",
            simulated=True,
        ),
        at_most(
            "consumed tokens over the bound, all runs",
            sum(outcome.num_over for outcome in results.values()),
            0,
            anchor="counted from what the engines sampled",
            simulated=True,
        ),
        at_least(
            "trained/source mean length, mask_tokens",
            min(ours.length_ratio, results["lag 2"].length_ratio),
            0.97,
            anchor="lag 4 and lag 2; source: the distribution",
            simulated=True,
        ),
        reported(
            "draining instead of interrupting, over synchronous",
            best_s / drained_s,
            unit="x",
            anchor="each node drains for itself; 0.94 to 1.00 of a simpler simulation",
            simulated=True,
        ),
        at_least(
            "interrupting over draining",
            drained_s / ours.total_s,
            1.1,
            unit="x",
            anchor=f"the same long tail, {RUNS['draining'].updates} and {UPDATES} versions",
            simulated=True,
        ),
    ]


def _policies(results: Mapping[str, Outcome]) -> list[Figure]:
    sync_s, found = min(ideal_synchronous_s(), results["sequential"].total_s), []
    for policy, anchors in ANCHORS.items():
        for lag, anchor in anchors.items():
            outcome = results[f"lag {lag}" if policy == "mask" else f"{policy}, lag {lag}"]
            extra = f"masked {outcome.masked:.1%}, mean length {outcome.length_ratio:.2f}"
            text = f"{anchor:.2f} of a simpler simulation; {extra}; groups of 2"
            ratio = sync_s / outcome.total_s
            found.append(
                reported(f"{policy}, lag {lag}, over synchronous", ratio, unit="x", anchor=text, simulated=True)
            )
    return found


def _losses(results: Mapping[str, Outcome]) -> list[Figure]:
    def kept(lossy: str, clean: str) -> float:
        return results[clean].total_s / results[lossy].total_s

    what = f"{UPDATES} versions; 5 % of the slots vanish on their node, which says nothing; "
    return [
        at_least(
            "throughput kept with 5 % lost rollouts, lag 1",
            kept("lossy lag 1", "lag 1"),
            0.90,
            anchor=what + "groups of 2",
            simulated=True,
        ),
        at_least(
            "throughput kept with 5 % lost rollouts, lag 4",
            kept("lossy async", "async"),
            0.98,
            anchor=what + "groups of 8",
            simulated=True,
        ),
    ]


def _modes(results: Mapping[str, Outcome]) -> list[Figure]:
    strict, short, roomy = results["sequential"], results["short tail, lag 1"], results["roomy"]
    alone = results["short tail, lag 0"]
    longest_s = max(alone.step_s - alone.train_s - PAUSE_S, short.train_s + PAUSE_S)
    return [
        at_most(
            "lag 0: batches of several versions, or cut while something was generated",
            strict.num_mixed + strict.num_overlaps,
            0,
            anchor="strict alternation: a step is the sum of its parts",
            simulated=True,
        ),
        at_most(
            "lag 1: step over max(generate, train + sync)",
            short.step_s / longest_s,
            1.10,
            unit="x",
            anchor="sigma 0.3; a batch alone is generated in what a step at lag 0 takes, less training and sync",
            simulated=True,
        ),
        at_least(
            "trainers busy, rollout capacity 1.2 x demand",
            roomy.trainers_busy,
            0.94,
            anchor="15 + 4 nodes, lag 4",
            simulated=True,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if print_table(figures()) else 1)
