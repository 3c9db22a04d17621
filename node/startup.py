"""Starting and stopping a node from the command line: in the foreground, or detached. Impure.

Invariant: a detached node is reported as running only once its socket has answered.
"""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
import uvloop

from node import foreground
from node.daemon import run_daemon
from node.home import Home
from node.join import join
from node.joined import read_joined
from node.machine import quick_check, require_fit
from node.settings import read_settings, write_settings
from protocol.child_session import MAX_LOG_BYTES, open_log
from protocol.errors import DaemonNotRunningError, HexcombError, MachineUnfitError, UnreachableError
from protocol.heap import steady_heap
from protocol.local_ask import ask_now

DETACH_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
POLL_S = 0.1
FINISH_POLL_S = 0.5
STDERR = 2


def join_and_start(folder: Path, invite: str, *, options: dict[str, Any], base: Path | None, detach: bool) -> None:
    """Identity, a look at the machine, the invite, then the daemon."""
    set_up_logging()
    findings = quick_check(folder)
    for finding in findings:
        note = "" if finding.is_good else f"  -> {finding.remedy}"
        print(f"{'ok  ' if finding.is_good else 'LOOK'} {finding.what}{note}", file=sys.stderr)
    require_fit(findings)
    home = Home.ensure(folder)
    settings = read_settings(home.path, options=options)
    joined = asyncio.run(join(home, invite))
    write_settings(home.path, settings)
    if base is not None:
        from node.base_folder import seed_store
        from node.weights.blobs import BlobStore

        seed_store(base, BlobStore(home.blobs))
    print(f"joined run {joined.run_id} as {home.peer_id}, allowed role: {joined.role}", file=sys.stderr)
    start(folder, detach=detach)


def start(folder: Path, *, detach: bool) -> None:
    """Becomes the daemon, or starts it in the background. Raises `NotJoinedError`, and `HomeInUseError` and their like
    where it was to be in the background."""
    home = Home.open(folder)
    read_joined(home)
    read_settings(home.path)
    if detach:
        _start_detached(home)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, foreground.command(home.path), foreground.environment())


def run(folder: Path) -> bool:
    """The daemon itself, until it is told to stop; whether that was by an interrupt from the terminal. Raises
    `NotJoinedError`, `HomeInUseError` and their like."""
    home = Home.open(folder)
    settings = read_settings(home.path)
    set_up_logging(home)
    steady_heap()
    return uvloop.run(run_daemon(home, settings))


def stop(folder: Path) -> None:
    """Asks the daemon to end and waits until it has. Raises `DaemonNotRunningError`, `UnreachableError`."""
    socket_path = Home.open(folder).socket
    ask_now(socket_path, "down", deadline_s=5.0)
    ends_s = time.monotonic() + STOP_DEADLINE_S
    while time.monotonic() < ends_s:
        if not _answers(socket_path):
            return
        time.sleep(POLL_S)
    raise UnreachableError(f"the node did not stop within {STOP_DEADLINE_S:.0f} s")


def finish(folder: Path, *, deadline_s: float | None, say: Callable[[str], None]) -> None:
    """Asks the daemon to complete its work and end, and says what is open until it has ended. Raises
    `DaemonNotRunningError`."""
    socket_path = Home.open(folder).socket
    ask_now(socket_path, "finish", deadline_s=5.0, finish_within_s=deadline_s)
    said = ""
    while True:
        try:
            answer = ask_now(socket_path, "status", deadline_s=5.0)
        except DaemonNotRunningError:
            return
        except UnreachableError:  # it may be busy ending
            continue
        if answer["activity"] != said:
            said = answer["activity"]
            say(said)
        time.sleep(FINISH_POLL_S)


class BoundedLog:
    """Standard error, for a daemon whose standard error is its own log file: once that is longer than `MAX_LOG_BYTES`
    it is set aside, in place of the one before, and a new one begun. Everything that the process prints moves along."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """Writes, to a new file if it is time."""
        if os.fstat(STDERR).st_size > MAX_LOG_BYTES:
            self._begin_anew()
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Nothing stays behind."""
        sys.stderr.flush()

    def _begin_anew(self) -> None:
        sys.stderr.flush()
        descriptor, _ = open_log(self._path)
        os.dup2(descriptor, STDERR)
        os.close(descriptor)


def log_output(home: Home | None) -> TextIO:
    """Where events go: standard error, bounded where that is the log in this home."""
    path = home.path / "logs" / "daemon.log" if home is not None else None
    is_own_log = path is not None and path.exists() and os.path.samestat(path.stat(), os.fstat(STDERR))
    return cast("TextIO", BoundedLog(path)) if path is not None and is_own_log else sys.stderr


def set_up_logging(home: Home | None = None) -> None:
    """Events to standard error, one line each; colours only on a terminal."""
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=colours),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=log_output(home)),
        cache_logger_on_first_use=True,
    )


def _start_detached(home: Home) -> None:
    """A session of its own, with its log in the home; returns once the socket answers."""
    log_path = home.path / "logs" / "daemon.log"
    descriptor, _ = open_log(log_path)
    with open(descriptor, "ab") as log:
        process = subprocess.Popen(
            foreground.command(home.path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=foreground.environment(),
        )
    ends_s = time.monotonic() + DETACH_DEADLINE_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-10:])
            raise MachineUnfitError("the node ended at once", why=tail, remedy=f"Its log is {log_path}.")
        if _answers(home.socket):
            print(f"the node runs in the background; its log is {log_path}", file=sys.stderr)
            return
        time.sleep(POLL_S)
    process.terminate()
    raise UnreachableError(
        f"the node did not answer within {DETACH_DEADLINE_S:.0f} s", remedy=f"Its log is {log_path}."
    )


def _answers(socket_path: Path) -> bool:
    try:
        ask_now(socket_path, "status", deadline_s=2.0)
    except DaemonNotRunningError:
        return False
    except HexcombError:
        return True
    return True
