"""Resume of half-sampled slots: real daemons on loopback are killed at random in mid-generation; what was accepted must
be, token for token, what one engine samples without any interruption. `python -m tests.bench.resume`.

A coordinator and three rollout nodes (transformers, fp32, one thread) work on a run that never completes a batch, so
that version 0 serves all. Twice: greedy (a temperature of 1e-4, the smallest that means anything), and at temperature
1, where the noise of a slot's seed, indexed by position, fixes the text as well. The weights are random; a completion
is up to 256 tokens long.
"""

import asyncio
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.facts import PrefixDropped, RolloutAccepted, SlotMoved
from coordinator.journal_reader import JournalReader
from node.base_folder import describe
from node.rollout.engine import SampleRequest
from node.tokenizer import END_ID, PAD_ID, vocabulary_of, write_tokenizer
from node.torch_guard import block_broken_extras
from protocol.gym_tasks import make_environment
from protocol.ids import RunId, Version
from protocol.key_file import read_identity
from protocol.manifest import open_manifest
from protocol.rollout import Rollout, verify_pieces
from protocol.run import EnvironmentSpec
from protocol.seeds import slot_seed
from protocol.tasks import load_tokenizer, regenerate
from protocol.v1 import control_pb2
from protocol.wire import rollout_of
from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.network.swarm import Swarm

SUMS = EnvironmentSpec("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
VOCABULARY = 2048
"""So large that a random model seldom draws the one stop id."""
MAX_NEW_TOKENS, PIECE_TOKENS = 256, 32
NODES = ("r1", "r2", "r3")


@dataclass(frozen=True, slots=True)
class Plan:
    """One swarm: so many trajectories are compared, of which so many moved."""

    name: str
    temperature: float
    num_compared: int
    num_moved: int


PLANS = (Plan("greedy", 1e-4, 200, 40), Plan("sampled", 1.0, 100, 15))
WARM_S, CALM_S = 1.5, 4.0
"""A node that is at work again is left alone for the first, another is killed only after the second."""
DEADLINE_S = 180.0
RUN_FILE = """\
name = "resume"
base = "{base}"
[task]
environment = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
[sampling]
max_new_tokens = {max_new_tokens}
temperature = {temperature}
[batch]
groups = 100000
group_size = 4
max_lag = 4
[nodes]
trainers = 1
rollouts = {num_nodes}
expected = {num_nodes}
[limits]
heartbeat_s = 0.5
lease_s = 60.0
piece_tokens = {piece_tokens}
[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a swarm left: accepted rollouts (those that moved first), what the journal says of moves, and where."""

    folder: Path
    rollouts: tuple[Rollout, ...]
    moves: tuple[SlotMoved, ...]
    num_dropped: int
    num_tokens: int
    num_kills: int


def write_base(folder: Path, *, vocab_size: int = VOCABULARY) -> Path:
    """A base whose small model has random weights, spread so far that no two tokens are ever nearly as likely."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from node.base import write_weights

    environment = make_environment(SUMS)
    folder.mkdir(parents=True)
    write_tokenizer(folder, vocabulary_of(environment.task(0, i).prompt for i in range(200)), max_length=512)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    config.save_pretrained(folder)
    write_weights(model, folder / "model.safetensors")
    describe(folder)
    return folder


def start(
    folder: Path, base: Path, *, temperature: float, nodes: Sequence[str] = NODES, run_file: str = RUN_FILE
) -> Swarm:
    """The swarm, once every node is at work; the first node seeds version 0."""
    swarm = Swarm(folder)
    text = run_file.format(
        base=base,
        temperature=temperature,
        num_nodes=len(nodes),
        max_new_tokens=MAX_NEW_TOKENS,
        piece_tokens=PIECE_TOKENS,
    )
    (folder / "run.toml").write_text(text)
    try:
        swarm.start_coordinator()
        for name in nodes:
            swarm.join(name, *(("--base", str(base)) if name == nodes[0] else ()), role="rollout")
        swarm.wait_for("all nodes at work", lambda: set(working(swarm)) == set(nodes))
    except BaseException:
        swarm.stop()
        raise
    return swarm


def working(swarm: Swarm) -> list[str]:
    """Nodes whose engine has version 0."""
    nodes = swarm.status().get("nodes", [])
    return [node["name"] for node in nodes if node["state"] == "live" and node["version"] == 0]


def revive(swarm: Swarm, name: str) -> None:
    """Starts a killed daemon again, in its home."""
    swarm.start(name, [sys.executable, "-m", "node.cli", "up", "--home", str(swarm.folder / name)])


def outcome_of(folder: Path, *, num_kills: int, num_rollouts: int) -> Outcome:
    """What the journal holds."""
    reader = JournalReader(folder / "coordinator" / "journal.db")
    try:
        facts = [line.fact for line in reader.lines()]
        moves = tuple(fact for fact in facts if isinstance(fact, SlotMoved))
        accepted = [fact.slot for fact in facts if isinstance(fact, RolloutAccepted)]
        rollouts = [rollout_of(control_pb2.Rollout.FromString(body)) for body in reader.rollout_bodies(accepted)]
        num_dropped = sum(isinstance(fact, PrefixDropped) for fact in facts)
    finally:
        reader.close()
    rollouts.sort(key=lambda rollout: -len({piece.node for piece in rollout.pieces}))
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return Outcome(folder, tuple(rollouts[:num_rollouts]), moves, num_dropped, num_tokens, num_kills)


def is_enough(folder: Path, plan: Plan) -> bool:
    """Whether as many rollouts are accepted as shall be compared, and as many of them moved on the way."""
    seen = outcome_of(folder, num_kills=0, num_rollouts=plan.num_compared).rollouts
    return len(seen) >= plan.num_compared and sum(map(has_moved, seen)) >= plan.num_moved


def has_moved(rollout: Rollout) -> bool:
    """Whether more than one node sampled it."""
    return len({piece.node for piece in rollout.pieces}) > 1


def run_with_kills(folder: Path, base: Path, plan: Plan, *, chance: random.Random) -> Outcome:
    """Kills one node after the other, until enough slots have moved and been filled."""
    swarm, killed_s, num_kills = start(folder, base, temperature=plan.temperature), 0.0, 0
    since = dict.fromkeys(NODES, time.monotonic())
    ends_at = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < ends_at:
            now_s, at_work = time.monotonic(), working(swarm)
            since = {name: since.get(name, now_s) for name in at_work}
            ripe = sorted(name for name in at_work if now_s - since[name] >= WARM_S)
            if len(ripe) >= 2 and now_s - killed_s >= CALM_S:
                if num_kills and is_enough(folder, plan):
                    break
                victim = chance.choice(ripe)
                swarm.signal(victim, signal.SIGKILL)
                revive(swarm, victim)
                since.pop(victim)
                killed_s, num_kills = time.monotonic(), num_kills + 1
            time.sleep(0.1 + chance.random() / 5)
    finally:
        swarm.stop()
    return outcome_of(folder, num_kills=num_kills, num_rollouts=plan.num_compared)


async def uninterrupted(outcome: Outcome, base: Path, *, temperature: float) -> dict[str, tuple[int, ...]]:
    """The completion of each slot by one engine in this process, from the slot's own seed."""
    from node.rollout.transformers_engine import TransformersEngine

    home = outcome.folder / "coordinator"
    reader = JournalReader(home / "journal.db")
    signed = reader.manifest(Version(0))
    reader.close()
    assert signed is not None
    run_id, key = RunId((home / "run.id").read_text()), read_identity(home / "identity.key").public_bytes
    secret = open_manifest(signed, coordinator_key=key, run_id=run_id).seal.secret
    environment, tokenizer = make_environment(SUMS), load_tokenizer(base)
    requests = [
        SampleRequest(
            key=str(rollout.slot),
            prompt_ids=environment.prompt_ids(regenerate(environment, rollout.slot.task), tokenizer),
            max_new_tokens=MAX_NEW_TOKENS,
            seed=slot_seed(secret, rollout.slot),
            temperature=temperature,
            stop_ids=tokenizer.stop_ids,
        )
        for rollout in outcome.rollouts
    ]
    for rollout in outcome.rollouts:
        verify_pieces(rollout, run_id=run_id)
    engine = TransformersEngine(max_model_len=512)
    await engine.start(base, Version(0), base / "model.safetensors")
    try:
        return {sample.key: sample.token_ids async for sample in engine.generate(requests)}
    finally:
        await engine.close()


def holes(rollout: Rollout) -> tuple[int, int]:
    """Positions that its pieces leave out, and that they have twice."""
    seen = [piece.start + i for piece in rollout.pieces for i in range(len(piece.token_ids))]
    wanted = set(range(max(seen) + 1))
    return len(wanted - set(seen)), len(seen) - len(set(seen))


def judge(plan: Plan, outcome: Outcome, expected: dict[str, tuple[int, ...]]) -> list[Figure]:
    """The figures of one swarm."""
    name, rollouts = plan.name, outcome.rollouts
    moved = [rollout for rollout in rollouts if has_moved(rollout)]
    wrong = [rollout for rollout in rollouts if rollout.token_ids != expected[str(rollout.slot)]]
    for rollout in wrong:
        pairs = zip(rollout.token_ids, expected[str(rollout.slot)], strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
        edges = [(piece.start, piece.node[-6:]) for piece in rollout.pieces]
        print(f"{name}: {rollout.slot} differs from position {first} on; pieces {edges}", file=sys.stderr)
    lost, doubled = (sum(column) for column in zip(*map(holes, rollouts), strict=True))
    kept = sum(length for move in outcome.moves for _, length in move.segments)
    again = PIECE_TOKENS * len(outcome.moves)
    of_all = f"{outcome.num_tokens} tokens accepted, {outcome.num_kills} kills, {len(outcome.moves)} moves"
    return [
        at_least(f"{name}: trajectories compared", len(rollouts), plan.num_compared, anchor="one engine, no kills"),
        at_least(f"{name}: of these sampled by two nodes or more", len(moved), plan.num_moved, anchor=of_all),
        at_most(f"{name}: texts that differ", len(wrong), 0, anchor="token for token"),
        at_most(f"{name}: positions lost", lost, 0, anchor=""),
        at_most(f"{name}: positions doubled", doubled, 0, anchor=""),
        reported(f"{name}: prefixes that were of no use", outcome.num_dropped, anchor=""),
        reported(
            f"{name}: tokens sampled again, at most",
            100 * again / max(outcome.num_tokens, 1),
            unit="%",
            anchor=f"a piece of {PIECE_TOKENS} a move; from scratch {100 * kept / max(outcome.num_tokens, 1):.1f} %",
        ),
    ]


def figures() -> list[Figure]:
    """Both swarms, one after the other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    block_broken_extras()
    folder, found = Path(tempfile.mkdtemp(prefix="hx-")), list[Figure]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the swarm is stopped then, too
    chance = random.Random(int(os.environ.get("SEED", "0")) or secrets.randbits(32))
    try:
        base = write_base(folder / "base")
        for plan in PLANS:
            home = folder / plan.name
            home.mkdir(mode=0o700)
            outcome = run_with_kills(home, base, plan, chance=chance)
            expected = asyncio.run(uninterrupted(outcome, base, temperature=plan.temperature))
            found += judge(plan, outcome, expected)
    finally:
        shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    raise SystemExit(0 if print_table(figures()) else 1)
