"""Accepted rollouts a second, as a ratio to a bare gRPC echo of the same messages. `python -m tests.bench.throughput`.

Three processes: a real coordinator (TLS, journal with durable commits, signature checks, a grading child), a bare
`grpc.aio` echo with the same TLS, and 64 clients that talk to one or the other by turns, each with one call under way.
What is compared was measured within seconds of each other, so a busy machine slows both sides; the median of the pairs
counts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.bench import served
from tests.bench.table import Figure, at_least, at_most, print_table, reported

NUM_CLIENTS = 64
PHASE_S = 10.0
GROUP_SIZE = 16
HEARTBEAT_S = 10.0
CLIENTS_DEADLINE_S = 600.0

ECHO = "bare grpc.aio echo, same TLS and messages, same run"


def figures() -> list[Figure]:
    """Measures, which takes three minutes."""
    return figures_of(measure(PHASE_S))


def measure(phase_s: float) -> list[dict[str, Any]]:
    """The phases as `clients` prints them."""
    folder = Path(tempfile.mkdtemp(prefix="hx-"))
    servers = [served.start("coordinator", folder, NUM_CLIENTS, GROUP_SIZE, HEARTBEAT_S)]
    try:
        served.await_place(servers[0], folder / "coordinator.json")
        servers.append(served.start("echo", folder))
        served.await_place(servers[1], folder / "echo.json")
        command = [sys.executable, "-m", "tests.bench.clients", str(folder), str(NUM_CLIENTS), str(phase_s)]
        quiet = {**os.environ, "GRPC_VERBOSITY": "NONE"}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, env=quiet, text=True, check=True, timeout=CLIENTS_DEADLINE_S
        )
    finally:
        for server in servers:
            served.stop(server)
        shutil.rmtree(folder)
    phases: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return phases


def figures_of(phases: Sequence[dict[str, Any]]) -> list[Figure]:
    """The table's lines: echo and coordinator alternate, for one rollout a call and then for sixteen."""
    found: list[Figure] = []
    for rollouts_a_call in (1, 16):
        mine = [phase for phase in phases if phase["rollouts_a_call"] == rollouts_a_call]
        echoes, ours = ([phase for phase in mine if phase["side"] == side] for side in ("echo", "coordinator"))
        ratio = median(_rate(b) / _rate(a) for a, b in zip(echoes, ours, strict=True))
        name = f"accepted rollouts/s over echo, {rollouts_a_call} a call"
        rates = f"{median(map(_rate, ours)):.0f}/s over {median(map(_rate, echoes)):.0f}/s; {ECHO}"
        if rollouts_a_call == 1:
            found.append(at_least(name, ratio, 0.3, anchor=rates))
            ours_s, echo_s = _p99_s(ours), _p99_s(echoes)
            anchor = f"{1000 * ours_s:.0f} ms over {1000 * echo_s:.0f} ms; {ECHO}"
            found.append(
                at_most("p99 of LeaseWork under that load over the echo's", ours_s / echo_s, 10, anchor=anchor)
            )
            cpu = [
                sum(phase["server_cpu_s"] for phase in side) / sum(p["num_good"] for p in side)
                for side in (ours, echoes)
            ]
            anchor = f"{1e6 * cpu[0]:.0f} us over {1e6 * cpu[1]:.0f} us of the server's process"
            found.append(reported("CPU time of an accepted rollout over an echo", cpu[0] / cpu[1], anchor=anchor))
        else:
            found.append(reported(name, ratio, anchor=rates))
    refused = sum(phase["num_bad"] for phase in phases)
    found.append(at_most("rollouts refused under load", refused, 0, anchor="every one is valid"))
    return found


def _rate(phase: dict[str, Any]) -> float:
    return float(phase["num_good"] / phase["seconds"])


def _p99_s(phases: Sequence[dict[str, Any]]) -> float:
    return quantiles([took for phase in phases for took in phase["probes_s"]], n=100)[98]


if __name__ == "__main__":
    sys.exit(0 if print_table(figures()) else 1)
