"""A swarm of real processes on loopback, started by the command lines that a person would type, each in a home."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_FILE = """\
name = "test"
base = "{base}"
[task]
environment = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
[sampling]
max_new_tokens = 4
[batch]
groups = 4
group_size = 4
max_lag = 2
[optimizer]
lr = 1e-4
[nodes]
trainers = 2
rollouts = 1
expected = 3
[limits]
heartbeat_s = 0.5
lease_s = 10.0
round_s = 15.0
[evaluation]
every = 2
[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""
POLL_S = 0.2


@dataclass
class Swarm:
    """`folder` holds every home and log; `processes` run in sessions of their own."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)

    def run(self, module: str, *args: str, deadline_s: float = 60.0, stdin: str = "") -> str:
        """Standard output of a command that ends by itself."""
        command = [sys.executable, "-m", module, *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr[-2000:]}"
        return done.stdout

    def start(self, name: str, command: list[str], *, stdin: str = "") -> None:
        """Starts a process that stays."""
        self.commands[name] = command
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        self.processes[name] = process

    def start_coordinator(self) -> None:
        """`hexcomb-coordinator serve`; also the way to start it again."""
        serve = ["serve", str(self.folder / "run.toml"), "--home", str(self.folder / "coordinator")]
        self.start("coordinator", [sys.executable, "-m", "coordinator.cli", *serve])
        self.wait_for("the coordinator", lambda: self.get("readyz") == "ok\n")

    def join(self, name: str, *options: str, role: str = "auto", settings: str = "") -> None:
        """Invites a node and starts it, the invite on standard input."""
        home = self.folder / name
        home.mkdir(mode=0o700)
        if settings:
            self.run("node.cli", "identity", "show", "--home", str(home))
            (home / "node.toml").write_text(settings)
        invite = self.run(
            "coordinator.cli", "invite", "create", "--home", str(self.folder / "coordinator"), "--role", role
        )
        entry = "from node.cli import join_swarm; join_swarm()"
        options = ("--home", str(home), "--name", name, "--engine", "transformers", "--threads", "1", *options)
        self.start(name, [sys.executable, "-c", entry, "-", *options], stdin=invite)

    def held(self, name: str) -> list[int]:
        """The versions that a node holds; none while its daemon is not up."""
        status = [sys.executable, "-m", "node.cli", "status", "--home", str(self.folder / name), "--json"]
        done = subprocess.run(status, capture_output=True, text=True, timeout=60, check=False)
        return list(json.loads(done.stdout)["versions_held"]) if done.returncode == 0 else []

    def node(self, name: str, *args: str, deadline_s: float = 60.0) -> dict[str, Any]:
        """What `hexcomb ARGS --json` says on a node."""
        output = self.run("node.cli", *args, "--home", str(self.folder / name), "--json", deadline_s=deadline_s)
        return dict(json.loads(output))

    def get(self, path: str) -> str:
        """A page of the status endpoint; empty while the coordinator is away."""
        try:
            page = json.loads((self.folder / "coordinator" / "addresses.json").read_text())["status"]
            with urllib.request.urlopen(page + path, timeout=5) as answer:
                return str(answer.read().decode())
        except (OSError, urllib.error.URLError, KeyError, ValueError):
            return ""

    def status(self) -> dict[str, Any]:
        """The run's status; empty while the coordinator is away."""
        text = self.get("api/v1/status")
        return dict(json.loads(text)) if text else {}

    def wait_for(self, what: str, is_so: Callable[[], Any], *, deadline_s: float = 120.0) -> Any:
        """Polls until something is so, and returns it; fails with every log's end when time is over."""
        ends_at = time.monotonic() + deadline_s
        while time.monotonic() < ends_at:
            if found := is_so():
                return found
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended by itself:\n{self.logs()}"
            time.sleep(POLL_S)
        raise AssertionError(f"waited {deadline_s:g} s for {what}\n{self.status()}\n{self.logs()}")

    def wait_for_version(self, version: int, *, deadline_s: float = 120.0) -> dict[str, Any]:
        """The status once this version is committed."""
        reached = lambda: (found := self.status()) and found["version"] >= version and found  # noqa: E731
        return dict(self.wait_for(f"version {version}", reached, deadline_s=deadline_s))

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process alone; SIGKILL also takes it off the list."""
        os.kill(self.processes[name].pid, number)
        if number == signal.SIGKILL:
            self.processes.pop(name).wait(timeout=30)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        """The last lines of every log."""
        ends = [(path, path.read_text(errors="replace").splitlines()[-12:]) for path in self.folder.glob("*.log")]
        return "\n".join(f"--- {path.name}\n" + "\n".join(lines) for path, lines in ends)
