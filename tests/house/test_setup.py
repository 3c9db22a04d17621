"""The set-up script: when it adds PyTorch's index, when it does nothing, and what it says when it cannot.

A stand-in interpreter takes the calls and writes them down; nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

STAND_IN = f"""#!/bin/bash
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "${{BASH_SOURCE[0]}}" "$4/bin/python" ;;
  "-m pip --version") exit 0 ;;
  *"--dry-run"*) exit "${{PROBE_STATUS:-0}}" ;;
  "-m pip install"*) printf '%s\\n' "$*" >>"$CALLS"; exit "${{INSTALL_STATUS:-0}}" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


class Checkout:
    """A copy of the script and pyproject.toml with the stand-in on hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "deploy").mkdir()
        shutil.copy(ROOT / "deploy" / "setup.sh", folder / "deploy")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.stand_in = folder / "stand-in"
        self.stand_in.write_text(STAND_IN)
        self.stand_in.chmod(0o755)

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script."""
        calls = str(self.folder / "calls")
        return subprocess.run(
            ["bash", "deploy/setup.sh", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHON": str(self.stand_in), "CALLS": calls, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def installs(self) -> list[str]:
        """The pip installs asked for so far."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_run_does_nothing_until_something_changes(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    assert [call.endswith("--editable .[cpu,dev]") for call in checkout.installs()] == [True]
    again = checkout.setup()
    assert (again.returncode, again.stdout, len(checkout.installs())) == (0, "", 1)
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    checkout.setup()
    assert len(checkout.installs()) == 2
    checkout.setup("gpu")
    assert len(checkout.installs()) == 3
    checkout.setup("--fresh", "gpu")
    assert len(checkout.installs()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU build of torch has a name of its own on Linux only")
def test_pytorchs_index_is_added_only_when_the_pin_is_not_found(checkout: Checkout) -> None:
    checkout.setup("--venv", "a")
    checkout.setup("--venv", "b", PROBE_STATUS="1")
    checkout.setup("--venv", "c", "dev", PROBE_STATUS="1")
    assert ["--extra-index-url" in call for call in checkout.installs()] == [False, True, False]


def test_a_failed_install_is_not_marked_as_done(checkout: Checkout) -> None:
    failed = checkout.setup(INSTALL_STATUS="1")
    assert failed.returncode == 1
    assert "could not install" in failed.stderr
    assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 2


def test_no_usable_python_is_said_clearly(checkout: Checkout) -> None:
    result = checkout.setup(PYTHON="no-such-python")
    assert result.returncode == 1
    assert "no Python 3.11 or newer" in result.stderr
    assert "apt install" in result.stderr
    assert checkout.setup("--nonsense").returncode == 1


def test_the_pin_is_the_one_that_pyproject_names(checkout: Checkout) -> None:
    script = (checkout.folder / "deploy" / "setup.sh").read_text()
    pin = next(line.split('"')[1] for line in script.splitlines() if line.startswith("TORCH_PIN="))
    assert f'"{pin.removesuffix("+cpu")}"' in (ROOT / "pyproject.toml").read_text()
