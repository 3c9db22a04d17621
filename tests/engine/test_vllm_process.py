"""The process that begins before vLLM is imported: it runs what it is given, once, and nothing else stays behind."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.rollout.vllm_process import EarlyContext, EarlyProcess, early_context

DEADLINE_S = 60.0


@pytest.fixture
def early() -> Iterator[EarlyProcess]:
    process = EarlyProcess.begin(imports=("json", "imaplib"))
    yield process
    process.discard()


def write_state(path: str) -> None:
    """Runs in the process."""
    Path(path).write_text(f"{os.environ['HEXCOMB_TEST']} {'imaplib' in sys.modules} {os.getpid()}")


def test_it_runs_what_it_is_given_in_the_environment_of_that_time(
    early: EarlyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = early.pid
    monkeypatch.setenv("HEXCOMB_TEST", "set after it began")
    context = EarlyContext(early, os.environ.get("LD_PRELOAD", ""))
    process = context.Process(target=write_state, name="EngineCore", kwargs={"path": str(tmp_path / "state")})
    process.start()
    process.join(DEADLINE_S)
    assert (process.exitcode, process.name, process.pid) == (0, "EngineCore", before)
    assert (tmp_path / "state").read_text() == f"set after it began True {before}"


def test_where_vllm_preloads_something_else_another_process_is_made(
    early: EarlyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEXCOMB_TEST", "x")
    context = EarlyContext(early, "/some/libgomp.so")
    process = context.Process(target=write_state, name="EngineCore", kwargs={"path": str(tmp_path / "state")})
    assert early.exitcode == -signal.SIGKILL
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert process.pid != early.pid
    assert (tmp_path / "state").read_text() == f"x False {process.pid}"


def test_one_that_has_ended_says_so_when_it_is_started(early: EarlyProcess) -> None:
    early.kill()
    early.join(DEADLINE_S)
    process = EarlyContext(early, os.environ.get("LD_PRELOAD", "")).Process(target=print, name="x", kwargs={})
    with pytest.raises(OSError, match="ended while it imported vLLM, with status -9"):
        process.start()


def test_it_ends_where_the_engine_does_not_start(tmp_path: Path) -> None:
    with early_context(tmp_path) as context:
        assert context is not None
        assert context.early.is_alive()
    assert context.early.exitcode == -signal.SIGKILL


def test_it_does_not_outlive_its_owner(tmp_path: Path) -> None:
    code = (
        "import time, node.rollout.vllm_process as p\n"
        "if __name__ == '__main__':\n"
        "    print(p.EarlyProcess.begin(imports=('json',)).pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "owner.py"
    script.write_text(code)
    folder = tmp_path / "engine"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        watched = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    try:
        ready, _, _ = select.select([watched], [], [], DEADLINE_S)
    finally:
        os.close(watched)
    assert ready
    assert not folder.exists()
