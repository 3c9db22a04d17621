"""Tests that run in several workers do so by the scopes of `tests/conftest.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

SOURCE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test_note(number):
    (pathlib.Path(__file__).parent / f"{number}.txt").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.parametrize(("others", "num_workers"), [("network", 1), ("coordinator", 2)])
def test_engines_and_swarms_share_a_worker(tmp_path: Path, others: str, num_workers: int) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    for area in ("engine", others):
        (tmp_path / area).mkdir()
        (tmp_path / area / f"test_{area}.py").write_text(SOURCE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, timeout=60)
    noted = {path.read_text() for path in tmp_path.rglob("*.txt")}
    assert len(noted) == num_workers
