"""kill -9 of a rollout node in mid-generation: its slots go on elsewhere, from the tokens that had come from it."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.ids import Version
from tests.bench import resume
from tests.network.swarm import Swarm

pytestmark = pytest.mark.timeout(300)

NODES = ("r1", "r2")
MAX_KILLS = 5
NUM_COMPARED = 48
"""Rollouts, those that moved first."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since sockets live below it."""
    made = Path(tempfile.mkdtemp(prefix="hx-"))
    yield made
    shutil.rmtree(made)


def test_killed_node_costs_no_token_that_had_come(folder: Path) -> None:
    base, home = resume.write_base(folder / "base"), folder / "run"
    home.mkdir(mode=0o700)
    swarm = resume.start(home, base, temperature=1.0, nodes=NODES)
    try:
        peer_ids = {node["name"]: node["peer_id"] for node in swarm.status()["nodes"]}
        kill_in_mid_generation(swarm, home, "r1")
        swarm.wait_for("slots that went on elsewhere", lambda: moved_from(home, peer_ids["r1"]))
    finally:
        swarm.stop()

    outcome = resume.outcome_of(home, num_kills=1, num_rollouts=NUM_COMPARED)
    expected = asyncio.run(resume.uninterrupted(outcome, base, temperature=1.0))  # checks signatures, too
    assert outcome.moves
    for rollout in outcome.rollouts:
        assert resume.holes(rollout) == (0, 0)
        assert rollout.token_ids == expected[str(rollout.slot)]
        assert {piece.version for piece in rollout.pieces} == {Version(0)}
        assert {piece.node for piece in rollout.pieces} <= set(peer_ids.values())


def kill_in_mid_generation(swarm: Swarm, home: Path, victim: str) -> None:
    """Kills the node until something of what it was at had come; it may just have begun, or have ended."""
    for _ in range(MAX_KILLS):
        swarm.wait_for(
            "work for both",
            lambda: set(resume.working(swarm)) == set(NODES) and is_in_mid_work(swarm, victim),
        )
        swarm.signal(victim, signal.SIGKILL)
        swarm.wait_for("the loss", lambda: victim not in resume.working(swarm))
        if resume.outcome_of(home, num_kills=0, num_rollouts=0).moves:
            return
        resume.revive(swarm, victim)
    raise AssertionError(f"{victim} was killed {MAX_KILLS} times, and no slot moved")


def is_in_mid_work(swarm: Swarm, name: str) -> bool:
    """Whether the node holds slots, and has filled others since it was started."""
    nodes = [node for node in swarm.status().get("nodes", []) if node["name"] == name]
    return all(node["num_leased"] > 0 and node["tokens_per_s"] > 0 for node in nodes) and bool(nodes)


def moved_from(home: Path, peer_id: str) -> list[object]:
    """Accepted rollouts that this node began and another ended."""
    rollouts = resume.outcome_of(home, num_kills=0, num_rollouts=10_000).rollouts
    return [r for r in rollouts if r.pieces[0].node == peer_id and r.pieces[-1].node != peer_id]
