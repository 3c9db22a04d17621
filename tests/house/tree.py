"""The checkout as the house's tests read it: which files there are, and their syntax trees."""

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("node", "protocol", "coordinator")


def files(root: Path = ROOT) -> list[Path]:
    """Files under version control and those about to be: all that git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        timeout=30,
    ).stdout.decode()
    return sorted(root / name for name in set(listed.split("\0")) - {""} if (root / name).is_file())


@cache
def hand_written() -> tuple[Path, ...]:
    """Python files that a person writes: all but the generated stubs."""
    return tuple(path for path in files() if path.suffix == ".py" and "_pb2" not in path.name)


@cache
def product() -> tuple[Path, ...]:
    """The hand-written modules that ship."""
    return tuple(path for path in hand_written() if path.relative_to(ROOT).parts[0] in PACKAGES)


def parse(path: Path) -> ast.Module:
    """The module's syntax tree."""
    return ast.parse(path.read_text(), filename=str(path))


def imported(tree: ast.Module) -> set[str]:
    """Full names of the modules that a module imports, in functions too; relative imports left out."""
    names: set[str] = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            names |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module and not item.level:
            names.add(item.module)
    return names


def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
