"""`make bench-node`: what a node costs its owner. A real daemon on the transformers engine, with a real coordinator.

The daemon's own memory after joining and a lease, how long `hexcomb status` takes, and what is left of the node five
seconds after its daemon was killed. Status 1 if a figure misses its threshold.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.network.swarm import RUN_FILE, Swarm

MAX_DAEMON_BYTES = 80e6
MAX_STATUS_S = 0.5
NUM_STATUS = 5
GONE_WITHIN_S = 5.0
POLL_S = 0.1


def start_swarm(folder: Path) -> Swarm:
    """A coordinator, and one node that generates rollouts."""
    swarm = Swarm(folder)
    kind = ("--environment", "chain_sum", "--prompt", "expression")
    swarm.run("node.cli", "base", "create", str(folder / "base"), "--tiny", *kind, deadline_s=240)
    run_file = RUN_FILE.replace("trainers = 2\nrollouts = 1\nexpected = 3", "trainers = 1\nrollouts = 1\nexpected = 1")
    (folder / "run.toml").write_text(run_file.format(base=folder / "base"))
    swarm.start_coordinator()
    swarm.join("node", "--base", str(folder / "base"), role="rollout")
    return swarm


def family(pid: int) -> dict[int, str]:
    """The processes below a daemon, with what they are."""
    return {process.pid: " ".join(process.cmdline())[:80] for process in psutil.Process(pid).children(recursive=True)}


def num_accepted(home: Path) -> int:
    """Rollouts of the node that the coordinator has taken; 0 while its daemon is not up."""
    command = [sys.executable, "-m", "node.cli", "status", "--home", str(home), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    return int(json.loads(done.stdout)["counts"].get("receipt/ACCEPTED", 0)) if done.returncode == 0 else 0


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


def figures(folder: Path) -> list[Figure]:
    """All figures of one node."""
    swarm = start_swarm(folder)
    try:
        pid = swarm.processes["node"].pid
        num_taken = swarm.wait_for("a lease to be filled", lambda: num_accepted(folder / "node"), deadline_s=240)
        resident_bytes = psutil.Process(pid).memory_info().rss
        times = status_times(folder / "node")
        bare_s = statistics.median(wall_times("-c", "pass"))
        num_children, num_left, took_s = survivors_of_kill(swarm, pid)
    finally:
        swarm.stop()
    kept = f"of {num_children} processes below the daemon, {GONE_WITHIN_S:g} s after its kill -9"
    anchor = f"after joining, measuring and {num_taken} accepted rollouts; without its children"
    return [
        at_most("daemon's resident memory", resident_bytes / 1e6, MAX_DAEMON_BYTES / 1e6, unit="MB", anchor=anchor),
        at_most(
            "hexcomb status",
            statistics.median(times),
            MAX_STATUS_S,
            unit="s",
            anchor=f"wall clock, median of {NUM_STATUS}, slowest {max(times):.2f} s",
        ),
        reported("an interpreter that does nothing", bare_s, unit="s", anchor="the same, just after"),
        at_least("engine and directory ran", num_children, 2, anchor="or nothing could be left of them"),
        at_most("processes left", num_left, 0, anchor=kept),
        reported("all gone after", took_s, unit="s", anchor="looked at every 0.1 s"),
    ]


def main() -> int:
    """Status 0 if every threshold was reached."""
    with tempfile.TemporaryDirectory(prefix="hexcomb-bench-", dir=os.environ.get("TMPDIR")) as folder:
        return 0 if print_table(figures(Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
