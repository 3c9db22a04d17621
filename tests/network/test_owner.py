"""A swarm whose nodes' owners want their machines back. The tests build on each other, in the order of the file."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.network.swarm import RUN_FILE, Swarm

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NEVER = '[limits]\nhours = "{hour}:00-{hour}:01"\npower_cap_w = 100\n'


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("s")
    swarm, base = Swarm(folder), folder / "base"
    kind = ("--environment", "chain_sum", "--prompt", "expression")
    swarm.run("node.cli", "base", "create", str(base), "--tiny", *kind, deadline_s=240)
    (folder / "run.toml").write_text(RUN_FILE.format(base=base).replace("rollouts = 1", "rollouts = 2"))
    try:
        swarm.start_coordinator()
        swarm.join("t1", "--base", str(base), role="trainer")
        swarm.join("t2", role="trainer")
        swarm.join("r1", role="rollout")
        swarm.wait_for_version(2)
        yield swarm
    finally:
        swarm.stop()


def seen(swarm: Swarm, name: str) -> dict[str, Any]:
    """A node as the coordinator's status has it; empty while it is not there."""
    return next((dict(node) for node in swarm.status().get("nodes", []) if node["name"] == name), {})


def counts(swarm: Swarm, name: str) -> dict[str, int]:
    """What a node's own status counts."""
    return dict(swarm.node(name, "status")["counts"])


def far_from_now() -> int:
    """An hour of the day that it will not be for long."""
    return (datetime.now().hour + 12) % 24


def test_a_trainer_that_pauses_leaves_at_the_rounds_end_and_comes_back(swarm: Swarm) -> None:
    before = counts(swarm, "t1")
    swarm.run("node.cli", "pause", "--home", str(swarm.folder / "t2"))
    swarm.wait_for("the trainer to rest", lambda: seen(swarm, "t2")["role"] == "idle")
    said = swarm.node("t2", "status")
    assert (said["role"], said["engine"], said["paused"]) == ("idle", "", "by its owner")
    swarm.wait_for("its word", lambda: seen(swarm, "t2")["activity"] == "paused: by its owner")
    swarm.wait_for_version(swarm.status()["version"] + 2)
    failed = counts(swarm, "t1").get("rounds/failed", 0)
    assert failed == before.get("rounds/failed", 0), "it ended its round before it left"
    swarm.run("node.cli", "resume", "--home", str(swarm.folder / "t2"))
    swarm.wait_for("the trainer", lambda: seen(swarm, "t2")["role"] == "trainer")
    trained = counts(swarm, "t2")["rounds/attested"]
    swarm.wait_for("a round with it", lambda: counts(swarm, "t2")["rounds/attested"] > trained)
    assert swarm.status()["num_diverged"] == 0


def test_a_node_outside_its_hours_is_idle_from_the_start(swarm: Swarm) -> None:
    hour = far_from_now()
    swarm.join("r2", role="rollout", settings=NEVER.format(hour=hour))
    reason = f"outside its hours ({hour}:00-{hour}:01)"
    swarm.wait_for("its reason", lambda: seen(swarm, "r2").get("activity") == f"paused: {reason}")
    said = swarm.node("r2", "status")
    assert said["limits"]["reason"] == reason
    assert said["limits"]["not_available"], "there is no GPU to cap, or nobody may"
    shown = swarm.run("node.cli", "status", "--home", str(swarm.folder / "r2"))
    assert f"! paused: {reason}" in shown
    assert "! limit not available: power_cap_w" in shown
    assert said["tokens"] == 0


def test_finish_completes_the_leases_and_ends_with_status_0(swarm: Swarm) -> None:
    process = swarm.processes.pop("r1")
    command = [sys.executable, "-m", "node.cli", "finish", "--home", str(swarm.folder / "r1"), "--deadline", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "the node has finished and stopped" in done.stderr
    assert process.wait(timeout=20) == 0
    log = (swarm.folder / "r1.log").read_text()
    assert "node is to finish" in log
    assert "num_leases_given_back=0" in log
