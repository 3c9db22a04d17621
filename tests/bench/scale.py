"""A coordinator with 10,000 nodes: what it costs, whether it stays as it is, whether its page answers.

`python -m tests.bench.scale`. Three processes: the coordinator with the simulated nodes in it (`crowded`), 500 real TLS
connections (`connections`), and this one, which reads the status as a browser would.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import quantiles
from typing import IO, Any

from tests.bench import served
from tests.bench.crowd import HEARTBEAT_S, PIECE_S, PIECE_TOKENS
from tests.bench.crowded import NUM_CONNECTIONS, NUM_LEASES, NUM_NODES
from tests.bench.table import Figure, at_least, at_most, print_table, reported

STATUS_EVERY_S = 0.5
STATUS_DEADLINE_S = 30.0
MIN_SHARE = 0.95
"""Of the planned heartbeats and pieces; with less the nodes were kept waiting."""


def figures() -> list[Figure]:
    """Measures, which takes a quarter of an hour."""
    return figures_of(*measure())


def measure() -> tuple[dict[str, Any], list[float], int]:
    """What `crowded` measured, how long each reading of the status took, and how many sessions broke."""
    folder = Path(tempfile.mkdtemp(prefix="hx-"))
    crowded = _start("tests.bench.crowded", folder)
    started, statuses_s = [crowded], list[float]()
    try:
        place = served.await_place(crowded, folder / "coordinator.json", deadline_s=300.0)
        started.append(_start("tests.bench.connections", folder, NUM_CONNECTIONS))
        _await_line(started[1], "open")
        _await_line(crowded, "measuring")
        done = threading.Event()
        reader = threading.Thread(target=_read_statuses, args=(f"{place.status}api/v1/status", statuses_s, done))
        reader.start()
        try:
            measured: dict[str, Any] = json.loads(_await_line(crowded, "{"))
        finally:
            done.set()
            reader.join()
        num_breaks = _breaks(started[1])
    finally:
        for process in reversed(started):
            served.stop(process)
        shutil.rmtree(folder)
    return measured, statuses_s, num_breaks


def figures_of(measured: dict[str, Any], statuses_s: list[float], num_breaks: int) -> list[Figure]:
    """The table's lines."""
    seconds, crowd = measured["seconds"], measured["crowd_share"]
    load = (
        f"{NUM_NODES} nodes beating every {HEARTBEAT_S:g} s, {measured['num_open']:.0f} leases of one slot, "
        f"{PIECE_TOKENS} tokens of each every {PIECE_S:g} s ({measured['num_pieces'] / seconds:.0f} pieces/s), "
        f"{measured['num_leases'] / seconds:.0f} leases/s, {measured['num_versions']} versions, "
        f"{NUM_CONNECTIONS} TLS sessions"
    )
    kept = min(
        measured["num_pieces"] / measured["pieces_planned"], measured["num_beats"] / measured["heartbeats_planned"]
    )
    anchor = f"process CPU over {seconds:.0f} s, the nodes' own work in it ({crowd:.2f} in a rehearsal); {load}"
    sticks = "two million rounds; {:.0f} ms before, {:.0f} ms after".format(
        *(1000 * s for s in measured["yardsticks_s"])
    )
    lateness_ms = 1000 * measured["lateness_p99_s"]
    return [
        at_most("coordinator's CPU with 10,000 nodes", measured["cpu_s"] / seconds, 1.0, unit="cores", anchor=anchor),
        at_least("share of planned heartbeats and pieces served", kept, MIN_SHARE, anchor="the nodes' clocks"),
        at_most(
            f"growth of memory over {NUM_LEASES} leases",
            measured["growth_mb"],
            50,
            unit="MB",
            anchor=f"RSS after warm-up; {measured['rss_mb']:.0f} MB at the end, the nodes' in it",
        ),
        at_most(
            "p95 of /api/v1/status",
            1000 * quantiles(statuses_s, n=20)[18],
            200,
            unit="ms",
            anchor=f"{len(statuses_s)} readings in that time",
        ),
        at_most(
            "rollouts refused at that load",
            sum(measured["bad"].values()),
            0,
            anchor=f"every one is valid {measured['bad'] or ''}".strip(),
        ),
        at_most("TLS sessions that broke", num_breaks, 0, anchor=f"of {NUM_CONNECTIONS}, warm-up included"),
        reported("the machine: a fixed loop of Python", 1000 * max(measured["yardsticks_s"]), unit="ms", anchor=sticks),
        reported("p99 of the event loop's lateness", lateness_ms, unit="ms", anchor="a timer of 100 ms"),
    ]


def _start(module: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _await_line(process: "subprocess.Popen[str]", start: str) -> str:
    """The next line that begins so. Raises `RuntimeError` if the process ends before."""
    stdout: IO[str] | None = process.stdout
    assert stdout is not None
    for line in stdout:
        if line.startswith(start):
            return line
    raise RuntimeError(f"{process.args} ended before it said {start!r}")


def _breaks(connections: "subprocess.Popen[str]") -> int:
    assert connections.stdin is not None
    connections.stdin.close()
    return int(_await_line(connections, "breaks ").split()[1])


def _read_statuses(address: str, took_s: list[float], done: threading.Event) -> None:
    while not done.wait(STATUS_EVERY_S):
        began_s = time.monotonic()
        with urllib.request.urlopen(address, timeout=STATUS_DEADLINE_S) as answer:
            answer.read()
        took_s.append(time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(0 if print_table(figures()) else 1)
