"""One real daemon, fed by a real coordinator on loopback until a fixed number of slots is filled. Impure: processes.

There is no trainer, so that the coordinator hands out exactly one batch's worth under version 0: the same work can be
given to an engine alone. Time runs from the first lease to the last receipt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.home import CoordinatorHome
from coordinator.journal_reader import JournalReader
from coordinator.settings import read_run_file
from node.rollout.worker import PROMPT_ROOM, _max_model_len
from protocol.gym_tasks import make_environment
from protocol.ids import Version
from protocol.rollout import Rollout
from protocol.run import RunSpec
from protocol.seeds import slot_seed
from protocol.tasks import load_tokenizer, regenerate
from protocol.v1 import control_pb2
from protocol.wire import rollout_of
from tests.bench.bare_vllm import Work
from tests.network.swarm import Swarm

RUN_FILE = """\
name = "bench"
base = "{base}"
[task]
environment = "chain_sum"
params = {{ min_terms = 2, max_terms = 4, min_digits = 1, max_digits = 2 }}
[sampling]
max_new_tokens = {max_new_tokens}
[batch]
groups = {groups}
group_size = {group_size}
max_lag = 0
max_concurrent_groups = {groups}
[nodes]
expected = 1
settle_s = 0.0
[limits]
heartbeat_s = 2.0
lease_s = 600.0
[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""
LOOK_S = 0.1
START_DEADLINE_S, FILL_DEADLINE_S = 180.0, 600.0
MAX_NUM_SEQS = 64
"""What the daemon's engine takes at once; four groups of 16 are a new node's first allowance, so that it is full from
the first lease on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is sampled."""

    groups: int
    max_new_tokens: int
    group_size: int = 16

    @property
    def num_slots(self) -> int:
        """In all."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class Fed:
    """What the daemon did: its samples' token ids in the order of `work`, and how long they took."""

    work: Work
    token_ids: list[list[int]]
    seconds: float


def feed(folder: Path, base: Path, plan: Plan, *, engine: str) -> Fed:
    """Runs the two until all slots are filled. Raises `AssertionError` if that does not happen in time."""
    swarm = Swarm(folder)
    shape = {"groups": plan.groups, "group_size": plan.group_size, "max_new_tokens": plan.max_new_tokens}
    (folder / "run.toml").write_text(RUN_FILE.format(base=base, **shape))
    try:
        swarm.start_coordinator()
        swarm.join("r1", "--base", str(base), "--engine", engine, role="rollout")
        granted = lambda: swarm.status()["leases"]["granted"]  # noqa: E731
        _wait(granted, 1, deadline_s=START_DEADLINE_S)
        began_s = time.monotonic()
        _wait(lambda: swarm.status()["num_accepted"], plan.num_slots, deadline_s=FILL_DEADLINE_S)
        seconds = time.monotonic() - began_s
    finally:
        swarm.stop()
    work, token_ids = _done(folder, base)
    return Fed(work, token_ids, seconds)


def _wait(number: Callable[[], int], wanted: int, *, deadline_s: float) -> None:
    ends_s = time.monotonic() + deadline_s
    while number() < wanted:
        assert time.monotonic() < ends_s, f"{number()} of {wanted} after {deadline_s:g} s"
        time.sleep(LOOK_S)


def _done(folder: Path, base: Path) -> tuple[Work, list[list[int]]]:
    """The work that was done, as an engine alone would be given it, and what came of it."""
    home, tokenizer = CoordinatorHome.ensure(folder / "coordinator"), load_tokenizer(base)
    spec = read_run_file(folder / "run.toml").rules(home.run_id, tokenizer).spec
    rollouts = _rollouts(home.journal)
    environment, secret = make_environment(spec.environment), home.seed_secret(Version(0))
    prompts = [environment.prompt_ids(regenerate(environment, one.slot.task), tokenizer) for one in rollouts]
    return _work(base, spec, prompts, [slot_seed(secret, one.slot) for one in rollouts]), [
        list(one.token_ids) for one in rollouts
    ]


def _work(base: Path, spec: RunSpec, prompts: list[tuple[int, ...]], seeds: list[int]) -> Work:
    return Work(
        model_dir=str(base),
        weights=str(next(base.glob("*.safetensors"))),
        max_model_len=_max_model_len(base, spec.sampling, PROMPT_ROOM),
        max_num_seqs=MAX_NUM_SEQS,
        max_new_tokens=spec.sampling.max_new_tokens,
        stop_ids=list(spec.sampling.stop_ids),
        temperature=spec.sampling.temperature,
        prompts=[list(ids) for ids in prompts],
        seeds=seeds,
    )


def _rollouts(journal: Path) -> list[Rollout]:
    """In the order of their slots."""
    reader = JournalReader(journal)
    try:
        bodies = reader._rows("SELECT body FROM rollout")
    finally:
        reader.close()
    found = [rollout_of(control_pb2.Rollout.FromString(bytes(body))) for (body,) in bodies]  # type: ignore[arg-type]
    return sorted(found, key=lambda one: (one.slot.task.index, one.slot.sample))
