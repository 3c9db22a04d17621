"""The simulator is itself checked: its arithmetic against closed forms, its books against the core's, and that it sees
what a core without gate 3 lets through."""

from dataclasses import replace
from functools import cache

import pytest

from coordinator.core import shares
from coordinator.core.books import check
from protocol.ids import SlotKey, TaskKey, Version
from protocol.run import EnvironmentSpec
from tests.bench.dispatch import lognormal, small_rules
from tests.bench.simulated_nodes import Engine
from tests.bench.simulation import decode_s
from tests.bench.simulator import Clock, Swarm

ENGINE = Engine(seats=8, base_s=0.01, per_sequence_s=0.001, pause_s=2.0, rtt_s=0.0, lease_slots=4)


def make_swarm(
    *,
    engines: list[Engine] | None = None,
    trainer_rates: tuple[float, ...] = (4000.0,),
    median: float = 300,
    sigma: float = 1.0,
    pieces_s: float = 3.0,
    **changes: object,
) -> Swarm:
    """Four nodes, a trainer, batches of 8 groups of 4."""
    return Swarm(
        small_rules(**{"groups_per_batch": 8, **changes}),
        engines=engines or [ENGINE] * 4,
        trainer_rates=list(trainer_rates),
        length_of=lognormal(median, sigma),
        pause_s=2.0,
        pieces_s=pieces_s,
        all_every=1,
    )


def test_time_is_in_order_and_ties_are_in_order_of_making() -> None:
    clock, seen = Clock(), list[str]()
    clock.after(2.0, lambda: seen.append("late"))
    clock.after(1.0, lambda: seen.append("first"))
    clock.after(1.0, lambda: clock.after(0.0, lambda: seen.append("third")))
    clock.after(1.0, lambda: seen.append("second"))
    clock.run(until=lambda: len(seen) == 4, limit_s=10.0)
    assert seen == ["first", "second", "third", "late"]
    assert clock.now_s == 2.0


def test_a_run_that_stands_still_ends_with_an_error() -> None:
    with pytest.raises(TimeoutError):
        make_swarm(engines=[replace(ENGINE, loss=1.0)], max_lag=0).run_to(1, limit_s=500.0)


def test_a_step_takes_what_its_parts_take() -> None:
    """At lag 0 with one seat's worth of equal slots for each seat, everything can be calculated."""
    swarm = make_swarm(sigma=0.0, median=500, trainer_rates=(8000.0,), mode="sequential", group_size=4)
    swarm.run_to(3)
    step_s = swarm.run_to(10) / 7
    generate_s, train_s = decode_s(ENGINE, [500] * 8), 32 * 500 / 8000
    assert generate_s == pytest.approx(500 * ENGINE.step_s(8))
    slack_s = 2.5  # a node asks again every two seconds
    assert generate_s + train_s + 2.0 <= step_s <= generate_s + train_s + 2.0 + slack_s


def test_engines_slow_down_by_what_they_run() -> None:
    """Two samples of 100 tokens and one of 300: three run, then one."""
    assert decode_s(ENGINE, [100, 300, 100]) == pytest.approx(100 * 0.013 + 200 * 0.011)


def test_every_token_has_the_version_that_was_loaded_when_it_was_sampled() -> None:
    swarm = make_swarm()
    swarm.run_to(6)
    mixed = [segments for segments in swarm.sampled.values() if len(segments) > 1]
    assert mixed, "no rollout went over a change of weights"
    for slot, segments in swarm.sampled.items():
        assert [version for version, _ in segments] == sorted({version for version, _ in segments})
        assert segments[0][0] >= slot.version
        assert sum(length for _, length in segments) == swarm.length_of(slot)


def test_without_interruption_no_rollout_has_two_versions() -> None:
    swarm = make_swarm(interrupt=False)
    swarm.run_to(6)
    assert all(len(segments) == 1 for segments in swarm.sampled.values())


def test_the_same_seed_gives_the_same_run_and_the_core_holds() -> None:
    def run() -> tuple[float, int, int]:
        swarm = make_swarm(engines=[replace(ENGINE, loss=0.1)] * 4)
        took_s = swarm.run_to(8)
        check(swarm.core.state)
        return took_s, swarm.num_events, swarm.core.books().granted

    assert run() == run()


def test_lost_rollouts_come_back_and_go_on_from_what_was_received_of_them() -> None:
    def wasted_for_each(*, pieces_s: float) -> float:
        engines = [replace(ENGINE, loss=0.3)] * 4
        swarm = make_swarm(engines=engines, median=2000, sigma=0.3, lease_s=100.0, pieces_s=pieces_s)
        swarm.run_to(8)
        nodes = swarm.nodes.values()
        num_lost = sum(node.num_lost for node in nodes)
        assert num_lost > 20
        return sum(node.num_sampled - node.num_tokens for node in nodes) / num_lost

    assert wasted_for_each(pieces_s=1.0) < 0.5 * wasted_for_each(pieces_s=0.0)


@cache
def stale_tokens(*, has_gate: bool) -> tuple[int, int]:
    """Live tokens over the bound, and masked ones, of a run with a long tail at lag 1."""
    with pytest.MonkeyPatch.context() as patch:
        if not has_gate:
            patch.setattr(shares, "is_fresh", lambda **_: True)
        swarm = make_swarm(sigma=1.5, max_lag=1)
        swarm.run_to(10)
    num_masked = sum(batch.num_tokens - batch.num_live for batch in swarm.rounds)
    return sum(batch.num_over for batch in swarm.rounds), num_masked


def test_the_law_is_kept_where_it_matters() -> None:
    num_over, num_masked = stale_tokens(has_gate=True)
    assert num_over == 0
    assert num_masked > 0, "no token came to be too old, so that nothing was shown"


def test_the_count_finds_what_a_core_without_gate_3_lets_through() -> None:
    num_over, num_masked = stale_tokens(has_gate=False)
    assert num_over > 0
    assert num_masked == 0


def test_a_core_that_never_gives_lost_slots_out_again_stands_still() -> None:
    swarm = make_swarm(engines=[replace(ENGINE, loss=0.3)] * 4, max_lag=0, lease_s=1e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.core.handle.leases.expire_leases", lambda turn: None)
        with pytest.raises(TimeoutError):
            swarm.run_to(3, limit_s=3000.0)


def test_tasks_come_again_with_the_lengths_they_had() -> None:
    """The memory of lengths is filled by what nodes hand in."""

    def length_of(slot: SlotKey) -> int:
        return 100 * (1 + slot.task.index % 16)

    rules = small_rules(groups_per_batch=8, environment=EnvironmentSpec("sums", num_tasks=16))
    swarm = Swarm(rules, engines=[ENGINE] * 4, trainer_rates=[4000.0], length_of=length_of)
    swarm.run_to(4)
    remembered = [int.from_bytes(swarm.core.state.lengths[4 * i : 4 * i + 4], "little") for i in range(16)]
    assert remembered == [length_of(SlotKey(Version(0), TaskKey("sums", 7, i), 0)) for i in range(16)]
