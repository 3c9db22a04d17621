"""What every test gets: one thread, no hub, a home folder of its own, and no process left behind.

The environment is set before any test module is imported, since torch and transformers read it once. Each
process that a test starts inherits a mark; at the end of the run whatever still lives, a child or an orphan
with the mark, fails it.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

MARK = "HEXCOMB_TEST_RUN"
GRACE_S = 5.0
TESTS = Path(__file__).parent
OF_PROCESSES = ("directory", "engine", "network", "soak")
left_behind: list[str] = []

os.environ[MARK] = secrets.token_hex(8)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HEXCOMB_HOME"] = "/nonexistent/no-test-may-use-the-default-home"

from node.torch_guard import block_broken_extras  # noqa: E402 - after the environment

block_broken_extras()

settings.register_profile("shared-machine", deadline=None)  # an example may wait for a core
settings.load_profile("shared-machine")


@pytest.fixture
def make_home() -> Iterator[Callable[[], Path]]:
    """Makes private (0700) home folders, each apart from all others.

    Their paths are short, since that of a Unix socket below them may have 107 bytes at most.
    """
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="hx-")))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture
def home(make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One home folder, which HEXCOMB_HOME names while the test runs."""
    folder = make_home()
    monkeypatch.setenv("HEXCOMB_HOME", str(folder))
    return folder


def leftover_processes() -> list[psutil.Process]:
    """Processes of this run that outlived `GRACE_S`: children, and orphans that carry the mark."""
    me = psutil.Process()
    found = {process for process in psutil.process_iter() if process != me and carries_mark(process)}
    found |= set(me.children(recursive=True))
    _, alive = psutil.wait_procs([process for process in found if not is_helper(process)], timeout=GRACE_S)
    return alive


def carries_mark(process: psutil.Process) -> bool:
    """Whether this run, or something that it started, started the process."""
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except (psutil.Error, OSError):  # gone, or somebody else's
        return False


def is_helper(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's resource tracker, which ends when its owner does."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run, and ends the processes, if any outlived their tests. A worker tells the process that leads it."""
    found = list[str]()
    for process in leftover_processes():
        with process.oneshot():
            found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
        process.kill()
    told: dict[str, list[str]] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["left_behind"] = found
        return
    for line in found + left_behind:
        print(f"\nLEFT BEHIND: {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker told at its end; one that crashed told nothing, which fails the run anyway."""
    left_behind.extend(getattr(node, "workeroutput", {}).get("left_behind", []))


def scope_of(nodeid: str) -> str:
    """Tests of one folder run in one worker, and those that start swarms and engines never beside one another."""
    area = nodeid.partition("::")[0].removeprefix("tests/").partition("/")[0]
    return "processes" if area in OF_PROCESSES else area


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole scopes; the marks that pytest-xdist has for it do not reach its scheduler with this pytest."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler
