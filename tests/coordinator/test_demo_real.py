"""What the demo with a real model starts, and what it takes to pass."""

import io
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.demo import is_over
from coordinator.demo_real import RealRun, RealSettings, make_plan, verdict
from coordinator.demo_view import View
from coordinator.settings import parse_run_file
from protocol.gym_tasks import make_environment

SETTINGS = RealSettings()


def status(**changes: object) -> dict[str, Any]:
    nodes = [
        {"peer_id": name, "role": "rollout", "engine": name, "rollouts_trained": 32, "state": "live"}
        for name in ("vllm", "transformers")
    ]
    parts = {"running": 0, "queued": 0, "in_round": 0, "trained": 64, "dropped": 0, "filtered": 0, "failed": 0}
    found = {
        "version": 10,
        "num_diverged": 0,
        "num_accepted": 64,
        "nodes": nodes,
        "leases": {"expired": 0},
        "books": {"issued": 64, **parts},
        "evaluations": [{"version": 0, "accuracy": 0.3, "num_tasks": 64}],
        "history": [{"version": 1, "metrics": {"reward": 0.25, "entropy": 1.5, "time/gradient_s": 9.0}}],
    }
    return {**found, **changes}


def judged(status: dict[str, Any], *, difference: float = 0.0) -> tuple[bool, str]:
    text = io.StringIO()
    view = View(Console(width=200, file=text))
    view.show({**status, "state": "RUNNING", "waiting_for": "", "tokens_per_s": 0.0, "history": []}, page="")
    passed = verdict(RealRun(status, Path("exported"), difference, "float32", 1.0), SETTINGS, view)
    return passed, text.getvalue()


def test_the_run_file_is_one_and_its_environment_exists() -> None:
    plan = make_plan(replace(SETTINGS, dynamic_sampling=True), base=Path("/base"))
    run = parse_run_file(tomllib.loads(plan.run_file))
    assert (run.nodes.trainers, run.nodes.rollouts, run.nodes.expected) == (1, 2, 3)
    assert (run.stop_version, run.batch.dynamic_sampling) == (10, True)
    assert make_environment(run.environment).held_out(2)
    assert plan.base_args == ("--smollm2",)


def test_it_does_not_end_before_its_last_version() -> None:
    plan = make_plan(SETTINGS, base=Path("/base"))
    perfect = [{"version": version, "accuracy": 1.0} for version in (0, 5, 6)]
    assert not is_over(plan, {"evaluations": perfect})
    assert is_over(plan, {"evaluations": [*perfect, {"version": 10, "accuracy": 0.0}]})


def test_a_sound_run_passes_and_shows_reward_and_all_metrics() -> None:
    passed, text = judged(status())
    assert passed
    assert "reward" in text
    assert "0.25" in text
    assert "time/gradient_s" in text
    assert "PASS" in text


def test_anything_less_fails() -> None:
    idle = [{"peer_id": "vllm", "role": "rollout", "engine": "vllm", "rollouts_trained": 0, "state": "live"}]
    for change in (
        {"version": 9},
        {"num_diverged": 1},
        {"nodes": idle},
        {"books": {**status()["books"], "issued": 65}},
    ):
        passed, text = judged(status(**change))
        assert not passed
        assert "FAIL" in text
    assert not judged(status(), difference=1e-7)[0]
