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

pytestmark = pytest.mark.timeout(300)

NODES = ("r1", "r2")


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
        swarm.wait_for("rollouts of both", lambda: swarm.status()["num_accepted"] > 0)
        for victim in NODES:
            swarm.wait_for("both at work", lambda: set(resume.working(swarm)) == set(NODES))
            swarm.signal(victim, signal.SIGKILL)
            resume.revive(swarm, victim)
            swarm.wait_for(f"a slot that went on without {victim}", lambda v=victim: moved_from(home, peer_ids[v]))
    finally:
        swarm.stop()

    outcome = resume.outcome_of(home, num_kills=len(NODES), num_rollouts=10_000)
    expected = asyncio.run(resume.uninterrupted(outcome, base, temperature=1.0))  # checks signatures, too
    assert outcome.moves
    for rollout in outcome.rollouts:
        assert resume.holes(rollout) == (0, 0)
        assert rollout.token_ids == expected[str(rollout.slot)]
        assert {piece.version for piece in rollout.pieces} == {Version(0)}
        assert {piece.node for piece in rollout.pieces} <= set(peer_ids.values())


def moved_from(home: Path, peer_id: str) -> list[object]:
    """Accepted rollouts that this node began and another ended."""
    rollouts = resume.outcome_of(home, num_kills=0, num_rollouts=10_000).rollouts
    return [r for r in rollouts if r.pieces[0].node == peer_id and r.pieces[-1].node != peer_id]
