"""What the demo starts and when it is over; the demo itself is run by `make demo`."""

from pathlib import Path

import pytest
from rich.console import Console

from coordinator.demo import DemoPlan, Status, is_over
from coordinator.demo_settings import make_plan
from coordinator.demo_view import View
from coordinator.settings import parse_run_file
from protocol.errors import UsageError


def plan(**changes: object) -> DemoPlan:
    options = {"num_nodes": 4, "engine": "mixed", "task": "chain_sum", "chaos": False, "num_versions": None}
    return make_plan(**{**options, **changes}, base=Path("/base"))  # type: ignore[arg-type]


def status(*accuracies: float) -> Status:
    return {"evaluations": [{"version": 10 * i, "accuracy": value} for i, value in enumerate(accuracies)]}


def test_default_swarm_has_two_trainers_and_both_engines() -> None:
    import tomllib

    made = plan()
    assert (made.num_trainers, made.rollout_engines) == (2, ("vllm", "transformers"))
    run = parse_run_file(tomllib.loads(made.run_file))
    assert (run.nodes.trainers, run.nodes.rollouts, run.nodes.expected) == (2, 2, 4)
    assert run.stop_version == made.stop_version


def test_options_change_the_swarm() -> None:
    assert plan(num_nodes=2).num_trainers == 1
    assert plan(engine="transformers", num_nodes=6).rollout_engines == ("transformers",) * 4
    assert plan(num_versions=7).stop_version == 7
    assert [name for _, name in plan(chaos=True).chaos] == ["rollout-2", "trainer-2", "coordinator"]


@pytest.mark.parametrize(
    "changes", [{"engine": "sglang"}, {"task": "no_such_environment"}, {"chaos": True, "num_nodes": 2}]
)
def test_what_cannot_be_started_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        plan(**changes)


def test_demo_ends_when_two_evaluations_in_a_row_doubled_and_reached_the_target() -> None:
    made = plan()
    assert is_over(made, status(0.34, 0.82, 0.81))
    assert not is_over(made, status(0.34, 0.82))
    assert not is_over(made, status(0.34, 0.82, 0.79))
    assert not is_over(made, status(0.42, 0.82, 0.82))  # not doubled
    assert is_over(made, {"evaluations": [{"version": made.stop_version, "accuracy": 0.1}]})
    assert not is_over(made, status())


SOUND: Status = {
    "version": 20,
    "num_diverged": 0,
    "num_accepted": 9,
    "nodes": [],
    "leases": {"expired": 0},
    "books": {
        "issued": 9,
        "running": 0,
        "queued": 0,
        "in_round": 0,
        "trained": 9,
        "dropped": 0,
        "filtered": 0,
        "failed": 0,
    },
    "evaluations": [
        {"version": 0, "accuracy": 0.34, "num_tasks": 44},
        {"version": 20, "accuracy": 0.86, "num_tasks": 44},
    ],
}


def verdict(status: Status, *engines: str) -> bool:
    view = View(Console(quiet=True))
    return view.verdict(status, engines_wanted=engines, target=0.8, seconds=1.0, chaos=False)


def test_verdict_is_for_sound_runs_alone() -> None:
    assert verdict(SOUND)
    first, last = SOUND["evaluations"]
    unfair = [
        {"evaluations": [last]},  # no word on version 0
        {"evaluations": [first, {**last, "num_tasks": 1}]},
        {"evaluations": [{**first, "accuracy": 0.5}, last]},  # not doubled
        {"evaluations": [first, {**last, "accuracy": 0.79}]},
        {"num_diverged": 1},
        {"books": {**SOUND["books"], "issued": 10}},
    ]
    assert not any(verdict({**SOUND, **change}) for change in unfair)


def test_an_engine_that_never_came_up_fails_the_demo() -> None:
    assert not verdict(SOUND, "vllm")
