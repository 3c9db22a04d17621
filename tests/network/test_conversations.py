"""Real daemons hold conversations with an environment of the organizer's; one is killed after the environment spoke."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from coordinator.journal_reader import JournalReader
from coordinator.replay import prove
from coordinator.tasks.function import FunctionEnvironment
from node.rollout.engine import SampleRequest
from protocol.ids import RunId, Version
from protocol.key_file import read_identity
from protocol.manifest import open_manifest
from protocol.rollout import Rollout, verify_pieces
from protocol.run import PoolSpec
from protocol.seeds import slot_seed
from protocol.tasks import regenerate
from protocol.tokens import load_tokenizer
from tests.bench import resume
from tests.network.swarm import Swarm

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

NODES = ("r1", "r2")
MAX_KILLS = 8
VOCABULARY = 256
"""So small that a random model draws the stop id now and then, and so large that a turn lasts."""

SUMS = """
class Sums:
    def task(self, seed, index): return {"prompt": f"{index}+{seed % 1000}=", "answer": ""}
    def reply(self, row, messages): return f"+{len(messages)}=" if len(messages) < 5 else None
    def score(self, row, messages): return float(len(messages) == 5 and messages[3]["role"] == "tool")
def make(): return Sums()
"""
RUN_FILE = resume.RUN_FILE.replace(
    'environment = "chain_sum"\nparams = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}',
    'environment = "sums_of_mine:make"\nprompt = "question"',
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since sockets live below it."""
    made = Path(tempfile.mkdtemp(prefix="hx-"))
    yield made
    shutil.rmtree(made)


def test_a_node_that_is_killed_in_a_later_turn_costs_no_token(folder: Path) -> None:
    base, home = resume.write_base(folder / "base", vocab_size=VOCABULARY), folder / "run"
    home.mkdir(mode=0o700)
    (home / "sums_of_mine.py").write_text(SUMS)
    swarm = resume.start(home, base, temperature=1.0, nodes=NODES, run_file=RUN_FILE)
    try:
        kill_until_a_later_turn_moved(swarm, home)
    finally:
        swarm.stop()

    rollouts = [rollout for rollout in accepted(home) if rollout.given]
    coordinator = read_identity(home / "coordinator" / "identity.key").peer_id
    assert all(
        (piece.node == coordinator) == (not piece.is_sampled) for rollout in rollouts for piece in rollout.pieces
    )
    assert {len(rollout.given) for rollout in rollouts} <= {1, 2}
    chosen = sorted(rollouts, key=lambda rollout: not moved_in_a_later_turn(rollout))[:12]
    assert moved_in_a_later_turn(chosen[0])
    asyncio.run(sample_again(chosen, home / "coordinator", base))
    state = prove(home / "coordinator" / "journal.db")[0].state
    scored = [slot for group in state.groups.values() for slot in group.slots if slot.status == "scored"]
    assert len(scored) >= len(chosen)
    assert all(slot.reward == float(len(slot.given) == 2) for slot in scored)
    assert not state.dead_letters


def accepted(home: Path) -> tuple[Rollout, ...]:
    return resume.outcome_of(home, num_kills=0, num_rollouts=100_000).rollouts


def moved_in_a_later_turn(rollout: Rollout) -> bool:
    """Whether one node began a turn after a reply, and another went on with it."""
    sampled = [(a, b) for a, b in pairwise(rollout.pieces) if a.is_sampled and b.is_sampled and rollout.given]
    return any(a.node != b.node and a.start > rollout.given[0][0] for a, b in sampled)


def kill_until_a_later_turn_moved(swarm: Swarm, home: Path) -> None:
    for number in range(MAX_KILLS):
        victim = NODES[number % 2]
        swarm.wait_for("work for both", lambda: set(resume.working(swarm)) == set(NODES))
        num_before = len(accepted(home))
        swarm.wait_for("rollouts", lambda before=num_before: len(accepted(home)) > before + 8)
        swarm.signal(victim, signal.SIGKILL)
        swarm.wait_for("the loss", lambda name=victim: name not in resume.working(swarm))
        num_lost = len(accepted(home))
        swarm.wait_for("what went on elsewhere", lambda lost=num_lost: len(accepted(home)) > lost + 32)
        if any(map(moved_in_a_later_turn, accepted(home))):
            return
        resume.revive(swarm, victim)
    raise AssertionError(f"nodes were killed {MAX_KILLS} times, and no later turn moved")


async def sample_again(rollouts: list[Rollout], home: Path, base: Path) -> None:
    """Each turn is what one engine samples after all that was said before, from the slot's own seed."""
    from node.rollout.transformers_engine import TransformersEngine

    reader = JournalReader(home / "journal.db")
    signed = reader.manifest(Version(0))
    reader.close()
    assert signed is not None
    run_id, key = RunId((home / "run.id").read_text()), read_identity(home / "identity.key").public_bytes
    secret, tokenizer = open_manifest(signed, coordinator_key=key, run_id=run_id).seal.secret, load_tokenizer(base)
    environment = FunctionEnvironment("make", PoolSpec("sums_of_mine:make"), folder=home.parent)
    expected, requests = dict[str, tuple[int, ...]](), list[SampleRequest]()
    for rollout in rollouts:
        verify_pieces(rollout, run_id=run_id)
        task, ids = rollout.slot.task, rollout.token_ids
        prompt_ids = environment.prompt_ids(regenerate(environment, task), tokenizer)
        starts = [0, *(start + length for start, length in rollout.given)]
        stops = [*(start for start, _ in rollout.given), len(ids)]
        for start, stop in zip(starts, stops, strict=True):
            name = f"{rollout.slot} from {start}"
            expected[name] = ids[start:stop]
            requests.append(
                SampleRequest(
                    key=name,
                    prompt_ids=prompt_ids + ids[:start],
                    max_new_tokens=resume.MAX_NEW_TOKENS - start,
                    seed=slot_seed(secret, rollout.slot),
                    temperature=1.0,
                    stop_ids=tokenizer.stop_ids,
                    first_position=start,
                )
            )
    engine = TransformersEngine(max_model_len=512)
    await engine.start(base, Version(0), base / "model.safetensors")
    try:
        assert {sample.key: sample.token_ids async for sample in engine.generate(requests)} == expected
    finally:
        await engine.close()
