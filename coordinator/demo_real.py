"""The demo with a real model: SmolLM2-135M-Instruct learns sums of one and two digits. Impure: folders, processes.

One trainer and two rollout nodes; at the end the last version is exported and loaded again by plain transformers. The
verdict is that every version was made on sound books by every engine, and that the exported model's logits are the
trainer's. Ten versions raise the reward; whether the model learned is what `make train-real` tells.
"""

import asyncio
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console

from coordinator.demo import DemoPlan, Swarm, output, program, run_swarm
from coordinator.demo_settings import until_signalled
from coordinator.demo_view import View
from protocol.errors import UsageError

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
ENVIRONMENT = "chain_sum"
MAX_NEW_TOKENS = 8
BASE_RECIPE = 1
"""Raised when `hexcomb base create --smollm2` makes another folder than before."""
NEVER = 2.0
"""An accuracy that ends no run before its last version."""
BASE_DEADLINE_S, EXPORT_DEADLINE_S = 1800.0, 600.0

RUN_FILE = """\
name = "smollm2"
base = "{base}"
stop_version = {settings.num_versions}

[task]
environment = "{environment}"
params = {{ {params} }}

[sampling]
max_new_tokens = {max_new_tokens}

[batch]
groups = {settings.groups}
group_size = {settings.group_size}
max_lag = {settings.max_lag}
dynamic_sampling = {dynamic_sampling}

[optimizer]
lr = {settings.lr}
warmup_versions = 2
decay_versions = {settings.num_versions}
final_share = 0.2
max_grad_norm = 1.0

[nodes]
trainers = 1
rollouts = {num_rollouts}
expected = {num_nodes}

[limits]
heartbeat_s = 2.0
lease_s = 120.0
round_s = 600.0

[evaluation]
every = {settings.evaluate_every}
tasks = {settings.num_held_out}

[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""


@dataclass(frozen=True, slots=True)
class RealSettings:
    """How the model is trained; the defaults are the demo's."""

    num_versions: int = 10
    groups: int = 8
    group_size: int = 8
    max_lag: int = 1
    lr: float = 1e-5
    dynamic_sampling: bool = False
    evaluate_every: int = 5
    num_held_out: int = 64
    engines: tuple[str, ...] = ("vllm", "transformers")
    deadline_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class RealRun:
    """How a run ended: the last status, where the last version was exported to, and by how much its logits differ."""

    status: dict[str, Any]
    exported: Path
    max_logit_difference: float
    dtype: str
    seconds: float


def start_demo_real(*, num_versions: int, engines: tuple[str, ...], keep: Path | None) -> bool:
    """Runs the demo in a folder of its own; True if all went as it should."""
    settings = RealSettings(num_versions=num_versions, engines=engines)
    folder = keep or Path(tempfile.mkdtemp(prefix="hexcomb-demo-"))
    passed = False
    try:
        with View(Console()) as view:
            passed = verdict(train_real(settings, folder=folder, view=view), settings, view)
    finally:
        if passed and keep is None:
            shutil.rmtree(folder)
        elif not passed:
            Console().print(f"the logs are in {folder}")
    return passed


def train_real(settings: RealSettings, *, folder: Path, view: View) -> RealRun:
    """Runs the swarm in `folder`, which must be empty or not there; exports its last version to `exported` in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", remedy="Name a new folder: each demo is a run of its own.")
    base, started = base_folder(), time.monotonic()

    async def export(swarm: Swarm, status: dict[str, Any]) -> RealRun:
        place = swarm.folder / "exported"
        said = await output(
            program("hexcomb"), "export", str(status["version"]), str(place), "--check", "--json",
            "--home", str(swarm.folder / "trainer-1"), deadline_s=EXPORT_DEADLINE_S,
        )  # fmt: skip
        found = json.loads(said)
        seconds = time.monotonic() - started
        return RealRun(status, place, float(found["max_logit_difference"]), str(found["dtype"]), seconds)

    swarm = run_swarm(make_plan(settings, base=base), folder=folder, base=base, view=view, then=export)
    return asyncio.run(until_signalled(swarm))


def verdict(run: RealRun, settings: RealSettings, view: View) -> bool:
    """Prints metrics and what came out; True if all went as it should."""
    view.metrics(run.status)
    view.say("")
    for found in run.status["evaluations"]:
        view.say(
            f"held-out accuracy at version {found['version']}: {found['accuracy']:.3f} of {found['num_tasks']} tasks"
        )
    sound = view.accounts(run.status, engines_wanted=settings.engines)
    view.say(
        f"exported to {run.exported} and loaded by transformers in {run.dtype}: "
        f"largest difference of a logit {run.max_logit_difference:g}"
    )
    view.say(f"took {run.seconds:.0f} s")
    passed = sound and run.status["version"] >= settings.num_versions and run.max_logit_difference == 0.0
    view.say("PASS" if passed else "FAIL: all versions, on sound books, by every engine, and equal logits are needed")
    return passed


def make_plan(settings: RealSettings, *, base: Path) -> DemoPlan:
    """What to start."""
    num_rollouts = len(settings.engines)
    run_file = RUN_FILE.format(
        settings=settings,
        base=base,
        environment=ENVIRONMENT,
        params=", ".join(f"{key} = {value}" for key, value in TASK.items()),
        max_new_tokens=MAX_NEW_TOKENS,
        dynamic_sampling=str(settings.dynamic_sampling).lower(),
        num_rollouts=num_rollouts,
        num_nodes=num_rollouts + 1,
    )
    return DemoPlan(
        num_trainers=1,
        rollout_engines=settings.engines,
        run_file=run_file,
        base_args=("--smollm2",),
        stop_version=settings.num_versions,
        deadline_s=settings.deadline_s,
        target=NEVER,
        base_deadline_s=BASE_DEADLINE_S,
        trainer_threads=2,  # rollout nodes wait for it most of the time
    )


def base_folder() -> Path:
    """Where the model's base folder is kept from one run to the next."""
    key = sha256(repr((metadata.version("hexcomb"), BASE_RECIPE)).encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("hexcomb") / f"demo-smollm2-{key}"
