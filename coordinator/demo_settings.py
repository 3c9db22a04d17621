"""What the demo runs: its run file, its base model, where both are kept, and when chaos strikes. Impure: folders.

The settings were found by trying: a model of about a million parameters that has had a short supervised warm-up learns
one-digit sums by reinforcement within some 100 to 200 versions.
"""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Coroutine
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from rich.console import Console

from coordinator.demo import DemoPlan, run_demo
from coordinator.demo_view import View
from protocol.errors import UsageError
from protocol.gym_tasks import make_environment
from protocol.run import EnvironmentSpec

T = TypeVar("T")

NUM_VERSIONS = 240
DEADLINE_S, CHAOS_DEADLINE_S = 480.0, 720.0
EVALUATE_EVERY = 10
BASE_RECIPE = 1
"""Raised when `hexcomb base create --tiny` makes another model than before, so that a cached one is not used."""
CHAOS = ((15, "rollout-2"), (30, "trainer-2"), (45, "coordinator"))

MIXES = {"mixed": ("vllm", "transformers"), "vllm": ("vllm",), "transformers": ("transformers",)}
"""Engines of the rollout nodes, over and over."""

# What the demo is tuned for; any other environment runs with its own parameters and without a promise.
TASKS: dict[str, dict[str, int | float | str | bool]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}

RUN_FILE = """\
name = "demo"
base = "{base}"
stop_version = {num_versions}

[task]
environment = "{task}"
prompt = "question"
params = {{ {params} }}

[sampling]
max_new_tokens = {max_new_tokens}

[batch]
groups = 64
group_size = 16
max_lag = 1

[optimizer]
lr = 2e-4
warmup_versions = 5
decay_versions = 240
final_share = 0.4
max_grad_norm = 0.5

[nodes]
trainers = {num_trainers}
rollouts = {num_rollouts}
expected = {num_nodes}

[limits]
heartbeat_s = 1.0
lease_s = 20.0
round_s = 20.0

[evaluation]
every = {evaluate_every}

[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""


def start_demo(
    *, num_nodes: int, engine: str, task: str, chaos: bool, num_versions: int | None, keep: Path | None
) -> bool:
    """Runs the demo in a folder of its own; True if the swarm learned."""
    base = base_folder(task)
    plan = make_plan(num_nodes=num_nodes, engine=engine, task=task, chaos=chaos, num_versions=num_versions, base=base)
    folder = keep or Path(tempfile.mkdtemp(prefix="hexcomb-demo-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", remedy="Name a new folder: each demo is a run of its own.")
    learned = False
    try:
        with View(Console()) as view:
            learned = asyncio.run(until_signalled(run_demo(plan, folder=folder, base=base, view=view)))
    finally:
        if learned and keep is None:
            shutil.rmtree(folder)
        elif not learned:
            Console().print(f"the logs are in {folder}")
    return learned


async def until_signalled(demo: Coroutine[Any, Any, T]) -> T:
    """What it gives; SIGINT and SIGTERM stop the swarm first, however often they come."""
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    running, waiting = asyncio.ensure_future(demo), asyncio.ensure_future(signalled.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    running.cancel()
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def make_plan(*, num_nodes: int, engine: str, task: str, chaos: bool, num_versions: int | None, base: Path) -> DemoPlan:
    """What to start. Raises `UsageError` on an engine or a task that there is not."""
    params = TASKS.get(task, {})
    make_environment(EnvironmentSpec(task, params))  # refuses a name that reasoning-gym does not know
    num_trainers = min(2, num_nodes // 2)
    num_rollouts = num_nodes - num_trainers
    if engine not in MIXES:
        raise UsageError(f"engine {engine!r} is unknown", remedy=f"Choose one of {', '.join(MIXES)}.")
    mix = MIXES[engine]
    if chaos and (num_trainers < 2 or num_rollouts < 2):
        raise UsageError("chaos needs two trainers and two rollout nodes", remedy="Use --nodes 4.")
    last = num_versions or NUM_VERSIONS
    run_file = RUN_FILE.format(
        base=base,
        task=task,
        max_new_tokens=6 if task in TASKS else 32,
        params=", ".join(f"{key} = {value}" for key, value in params.items()),
        num_versions=last,
        num_trainers=num_trainers,
        num_rollouts=num_rollouts,
        num_nodes=num_nodes,
        evaluate_every=EVALUATE_EVERY,
    )
    base_args = ["--tiny", "--warm-up", "--environment", task, "--prompt", "question"]
    for key, value in params.items():
        base_args += ["--param", f"{key}={value}"]
    return DemoPlan(
        num_trainers=num_trainers,
        rollout_engines=tuple(mix[i % len(mix)] for i in range(num_rollouts)),
        run_file=run_file,
        base_args=tuple(base_args),
        stop_version=last,
        deadline_s=CHAOS_DEADLINE_S if chaos else DEADLINE_S,
        chaos=CHAOS if chaos else (),
    )


def base_folder(task: str) -> Path:
    """Where the warmed-up base of these settings is kept from one demo to the next."""
    key = sha256(repr((metadata.version("hexcomb"), BASE_RECIPE, task, TASKS.get(task))).encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("hexcomb") / f"demo-base-{key}"
