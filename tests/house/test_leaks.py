"""The run fails when a test leaves a process behind, whether its child or an orphan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

CHILD = """
import subprocess, sys
def test_leak():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
"""
# The middle process starts another and ends, which leaves the other to init.
ORPHAN = """
import subprocess, sys
def test_leak():
    sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
    code = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
CLEAN = """
import subprocess, sys
def test_clean():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("source", "status"), [(CHILD, 1), (ORPHAN, 1), (CLEAN, 0)], ids=["child", "orphan", "clean"])
def test_leftover_processes_fail_the_run(tmp_path: Path, source: str, status: int, workers: str) -> None:
    text = (ROOT / "tests" / "conftest.py").read_text().replace("GRACE_S = 5.0", "GRACE_S = 0.2")
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_sample.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "1 passed" in result.stdout
    assert result.returncode == status, result.stdout + result.stderr
    assert result.stdout.count("LEFT BEHIND") == status


def test_each_home_is_private_and_apart(home: Path, make_home: object) -> None:
    assert callable(make_home)
    other = make_home()
    assert home != other
    assert not other.is_relative_to(home)
    assert home.stat().st_mode & 0o777 == other.stat().st_mode & 0o777 == 0o700
    assert os.environ["HEXCOMB_HOME"] == str(home)
    assert len(str(home / "run" / "child-0123456789.sock")) < 107
