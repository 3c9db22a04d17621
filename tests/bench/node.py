"""`make bench-node`: what a node costs its owner. A real daemon on each engine, with a real coordinator.

How long the engine takes to start, the daemon's own memory after joining and a lease, how long `hexcomb status` takes,
and what is left of the node five seconds after its daemon was killed. Status 1 if a figure misses its threshold.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.network.swarm import RUN_FILE, Swarm

MAX_DAEMON_BYTES = 80e6
MAX_STATUS_S = 0.5
MAX_START_S = 15.0
"""Of an engine with the tiny model, self-test included, while nothing else starts."""

MIN_CHILDREN = {"transformers": 2, "vllm": 3}
"""Directory and engine; vLLM's engine has a process of its own below that."""

NUM_STATUS = 5
GONE_WITHIN_S = 5.0
POLL_S = 0.1


def start_swarm(folder: Path, *, engine: str) -> Swarm:
    """A coordinator, and one node that generates rollouts."""
    swarm = Swarm(folder)
    kind = ("--environment", "chain_sum", "--prompt", "expression")
    swarm.run("node.cli", "base", "create", str(folder / "base"), "--tiny", *kind, deadline_s=240)
    run_file = RUN_FILE.replace("trainers = 2\nrollouts = 1\nexpected = 3", "trainers = 1\nrollouts = 1\nexpected = 1")
    (folder / "run.toml").write_text(run_file.format(base=folder / "base"))
    swarm.start_coordinator()
    swarm.join("node", "--base", str(folder / "base"), "--engine", engine, role="rollout")
    return swarm


def family(pid: int) -> dict[int, str]:
    """The processes below a daemon, with what they are."""
    return {process.pid: " ".join(process.cmdline())[:80] for process in psutil.Process(pid).children(recursive=True)}


def status(home: Path) -> dict[str, Any]:
    """What `hexcomb status` says of a node that has filled slots; empty while it has not."""
    command = [sys.executable, "-m", "node.cli", "status", "--home", str(home), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    said: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"counts": {}}
    return said if said["counts"].get("receipt/ACCEPTED") else {}


def status_times(home: Path) -> list[float]:
    """Wall time of `hexcomb status` as the console script starts it, interpreter and all."""
    return wall_times("-m", "node.entry", "status", "--home", str(home))


def wall_times(*arguments: str) -> list[float]:
    """Wall time of the interpreter with these arguments."""
    command = [sys.executable, *arguments]
    times = []
    for _ in range(NUM_STATUS):
        begun_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        times.append(time.perf_counter() - begun_s)
    return times


def is_running(pid: int, what: str) -> bool:
    """Whether the process still does something; a number may have gone to another, and a zombie is none."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline())[:80] == what
    except psutil.NoSuchProcess:
        return False


def restart_s(swarm: Swarm, pid: int, *, first_s: float) -> float:
    """How long the engine takes when it is started anew, its process having been killed."""
    children = psutil.Process(pid).children(recursive=True)
    next(child for child in children if "node.compute.worker" in child.cmdline()).kill()

    def started_again() -> dict[str, Any]:
        said = status(swarm.folder / "node")
        return said if said and said["engine_start_s"] not in (None, first_s) else {}

    took_s: float = swarm.wait_for("the engine to be back", started_again, deadline_s=240)["engine_start_s"]
    return took_s


def survivors_of_kill(swarm: Swarm, pid: int) -> tuple[int, int, float]:
    """How many processes the daemon had, how many of them were left in time, and when the last had gone."""
    children = family(pid)
    begun_s = time.monotonic()
    swarm.signal("node", signal.SIGKILL)
    left = dict(children)
    while left and time.monotonic() < begun_s + GONE_WITHIN_S:
        time.sleep(POLL_S)
        left = {pid: what for pid, what in left.items() if is_running(pid, what)}
    for what in left.values():
        print(f"left: {what}", file=sys.stderr)
    return len(children), len(left), time.monotonic() - begun_s


def figures(folder: Path, *, engine: str) -> list[Figure]:
    """All figures of one node."""
    swarm = start_swarm(folder, engine=engine)
    try:
        pid = swarm.processes["node"].pid
        said = swarm.wait_for("a lease to be filled", lambda: status(folder / "node"), deadline_s=240)
        assert said["engine"] == engine
        resident_bytes = psutil.Process(pid).memory_info().rss
        times = status_times(folder / "node")
        bare_s = statistics.median(wall_times("-c", "pass"))
        alone_s = restart_s(swarm, pid, first_s=said["engine_start_s"])
        num_children, num_left, took_s = survivors_of_kill(swarm, pid)
    finally:
        swarm.stop()
    num_taken = said["counts"]["receipt/ACCEPTED"]
    kept = f"of {num_children} processes below the daemon, {GONE_WITHIN_S:g} s after its kill -9"
    anchor = f"after joining, measuring and {num_taken} accepted rollouts; without its children"
    slowest = f"wall clock, median of {NUM_STATUS}, slowest {max(times):.2f} s"
    found = [
        at_most("engine's start", alone_s, MAX_START_S, unit="s", anchor="tiny model, self-test included"),
        reported("its first start", said["engine_start_s"], unit="s", anchor="while the directory starts, too"),
        at_most("daemon's resident memory", resident_bytes / 1e6, MAX_DAEMON_BYTES / 1e6, unit="MB", anchor=anchor),
        at_most("hexcomb status", statistics.median(times), MAX_STATUS_S, unit="s", anchor=slowest),
        reported("an interpreter that does nothing", bare_s, unit="s", anchor="the same, just after"),
        at_least("directory and engine ran", num_children, MIN_CHILDREN[engine], anchor="or nothing could be left"),
        at_most("processes left", num_left, 0, anchor=kept),
        reported("all gone after", took_s, unit="s", anchor="looked at every 0.1 s"),
    ]
    return [replace(figure, name=f"{engine}: {figure.name}") for figure in found]


def main() -> int:
    """Status 0 if every threshold was reached."""
    found: list[Figure] = []
    for engine in ("transformers", "vllm"):
        with tempfile.TemporaryDirectory(prefix="hexcomb-bench-", dir=os.environ.get("TMPDIR")) as folder:
            found += figures(Path(folder), engine=engine)
    return 0 if print_table(found) else 1


if __name__ == "__main__":
    sys.exit(main())
