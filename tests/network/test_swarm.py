"""One swarm of real processes through what befalls a swarm. The tests build on each other, in the order of the file."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network.swarm import RUN_FILE, Swarm

pytestmark = pytest.mark.timeout(300)

SILENT = "capability_in_hello = false\n"
"""Heartbeats and hellos say nothing of what the node can do; only the DHT does."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("s")
    swarm, base = Swarm(folder), folder / "base"
    params = [f"--param={name}" for name in ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")]
    swarm.run("node.cli", "base", "create", str(base), "--tiny", "--environment", "chain_sum", *params, deadline_s=120)
    (folder / "run.toml").write_text(RUN_FILE.format(base=base))
    try:
        swarm.start_coordinator()
        swarm.join("t1", "--base", str(base), role="trainer", settings=SILENT)
        swarm.join("t2", role="trainer", settings=SILENT)
        swarm.join("r1", role="rollout", settings=SILENT)
        yield swarm
    finally:
        swarm.stop()


def test_roles_come_from_the_directory_alone_and_versions_are_made(swarm: Swarm) -> None:
    status = swarm.wait_for_version(2)
    roles = {node["name"]: node["role"] for node in status["nodes"]}
    assert roles == {"t1": "trainer", "t2": "trainer", "r1": "rollout"}
    assert all(node["train_tokens_per_s"] > 0 for node in status["nodes"])
    assert status["num_diverged"] == 0


def test_the_rollout_node_compares_each_version_with_its_trainers_canary(swarm: Swarm) -> None:
    """Trainers attest it, the coordinator seals it, the engine scores the probe after the load."""
    swarm.wait_for("a judged load", lambda: swarm.node("r1", "status")["canary_difference"] is not None)
    said = swarm.node("r1", "status")
    assert said["canary_difference"] < 1e-3
    assert said["engine_k3"] < 1e-6


def test_trainers_and_rollout_node_hold_the_same_weights(swarm: Swarm) -> None:
    def weights() -> dict[str, set[str]]:
        """Root by version, as each node's own status has it."""
        found: dict[str, set[str]] = {}
        for name in ("t1", "t2", "r1"):
            said = swarm.node(name, "status")
            found.setdefault(str(said["version"]), set()).add(str(said["root"]))
        return found

    seen = [weights() for _ in range(3)]
    assert all(len(roots) == 1 for found in seen for roots in found.values())


def test_frozen_coordinator_leaves_the_directory_at_work(swarm: Swarm) -> None:
    """With the coordinator stopped, `peers` still knows everybody's rates, and a newcomer that has lost its disk finds
    holders of a version through the DHT alone and fetches it from them."""
    swarm.join("i1", settings="")
    swarm.wait_for("the newcomer's first version", lambda: swarm.held("i1"))
    swarm.wait_for("all four rates in the newcomer's directory", lambda: num_rates(swarm) == 4)
    swarm.signal("coordinator", signal.SIGSTOP)
    held, blobs = swarm.held("i1"), swarm.folder / "i1" / "blobs"
    try:
        assert num_rates(swarm) == 4
        wanted = max(held)
        swarm.wait_for("two holders of it in the newcomer's directory", lambda: num_holders(swarm, wanted) >= 2)
        for chunk in blobs.iterdir():
            chunk.unlink()
        fetched = swarm.node("i1", "fetch", str(wanted))
        assert fetched["version"] == wanted
    finally:
        swarm.signal("coordinator", signal.SIGCONT)
    assert len(list(blobs.iterdir())) >= fetched["num_chunks"]


def test_killed_coordinator_goes_on_where_its_journal_ends(swarm: Swarm) -> None:
    before = swarm.status()
    swarm.signal("coordinator", signal.SIGKILL)
    swarm.start_coordinator()
    after = swarm.wait_for_version(before["version"] + 2)
    assert after["epoch"] == before["epoch"] + 1
    assert after["num_accepted"] >= before["num_accepted"]
    assert_balanced(after)


def test_killed_trainer_costs_a_round_at_most(swarm: Swarm) -> None:
    swarm.wait_for("both trainers in step", lambda: num_in_step(swarm) == 2)
    before = swarm.wait_for("a moment in which both have the newest moments", lambda: frozen_in_step(swarm))
    swarm.signal("t2", signal.SIGKILL)
    swarm.signal("coordinator", signal.SIGCONT)
    after = swarm.wait_for_version(before["version"] + 2)
    assert after["num_diverged"] == 0
    assert_balanced(after)


def test_evaluations_are_of_committed_versions(swarm: Swarm) -> None:
    swarm.wait_for("an evaluation", lambda: swarm.status().get("evaluations"))
    status = swarm.status()
    assert all(0 <= e["accuracy"] <= 1 and e["version"] % 2 == 0 for e in status["evaluations"])


def test_nothing_is_left_after_sigterm(swarm: Swarm, tmp_path: Path) -> None:
    swarm.processes["r1"].terminate()
    assert swarm.processes.pop("r1").wait(timeout=20) == 0


def frozen_in_step(swarm: Swarm) -> dict[str, Any]:
    """The status, the coordinator stopped, once both trainers have the optimizer's state after the newest version on
    their disks; else it goes on."""
    status = swarm.status()
    swarm.signal("coordinator", signal.SIGSTOP)
    head = max(swarm.node("t1", "status")["head"], swarm.node("t2", "status")["head"])
    kept = [swarm.folder / name / "optimizer" / f"v{head}.bin" for name in ("t1", "t2")]
    if status and all(path.exists() for path in kept):
        return status
    swarm.signal("coordinator", signal.SIGCONT)
    return {}


def num_in_step(swarm: Swarm) -> int:
    """Living trainers that have the newest version, or are about to."""
    status = swarm.status()
    trainers = [node for node in status["nodes"] if node["role"] == "trainer" and node["state"] == "live"]
    return sum(node["version"] >= status["version"] - 1 for node in trainers)


def num_holders(swarm: Swarm, version: int) -> int:
    """Nodes of which the newcomer reads in the DHT that they hold a version."""
    return sum(version in peer["versions"] for peer in swarm.node("i1", "peers")["peers"])


def num_rates(swarm: Swarm) -> int:
    """Nodes whose measured rates the newcomer reads from the DHT."""
    peers = swarm.node("i1", "peers")["peers"]
    return sum(peer["decode_tokens_per_s"] > 0 and peer["train_tokens_per_s"] > 0 for peer in peers)


def assert_balanced(status: dict[str, Any]) -> None:
    books = status["books"]
    parts = ("running", "queued", "in_round", "trained", "dropped", "filtered", "failed")
    assert books["issued"] == sum(books[part] for part in parts)
    leases = status["leases"]
    assert leases["granted"] == leases["open"] + leases["filled"] + leases["expired"] + leases["returned"]
