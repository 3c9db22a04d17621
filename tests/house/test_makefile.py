"""Every target of the Makefile is in `make help`, and continuous integration runs `make test`."""

import re
import subprocess
from pathlib import Path

from tests.house.tree import ROOT


def targets(makefile: Path) -> set[str]:
    """Names of all targets that a person could ask for."""
    found = re.findall(r"^([A-Za-z0-9_][\w.-]*):(?!=)", makefile.read_text(), flags=re.MULTILINE)
    return set(found)


def helped(makefile: Path) -> dict[str, str]:
    """Target -> description, as `make help` prints them."""
    command = ["make", "-s", "-C", str(makefile.parent), "-f", str(makefile), "help"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in printed.splitlines()}


def test_every_target_is_in_help_with_a_description() -> None:
    makefile = ROOT / "Makefile"
    listed = helped(makefile)
    assert set(listed) == targets(makefile)
    assert {"help", "setup", "demo", "demo-chaos", "test", "check", "lint", "types", "protos", "slow"} <= set(listed)
    assert all(len(description) > 10 for description in listed.values())


def test_a_target_without_description_is_caught(tmp_path: Path) -> None:
    planted = tmp_path / "Makefile"
    planted.write_text((ROOT / "Makefile").read_text() + "\n.PHONY: hidden\nhidden:\n\t@true\n")
    assert targets(planted) - set(helped(planted)) == {"hidden"}


def test_every_target_is_phony() -> None:
    text = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"^\.PHONY: (\S+)$", text, flags=re.MULTILINE)) == targets(ROOT / "Makefile")


def test_ci_runs_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script
    assert "set -eu" in script
