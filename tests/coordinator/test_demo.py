"""What the demo starts and when it is over; the demo itself is run by `make demo`."""

from pathlib import Path

import pytest

from coordinator.demo import DemoPlan, Status, is_over
from coordinator.demo_settings import make_plan
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
