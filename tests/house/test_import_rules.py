"""The import rules hold, and each of them catches a planted violation."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES, ROOT, imported, parse, product

LINT = Path(sys.executable).with_name("lint-imports")
# What a module that calls itself pure may not import directly; .importlinter checks the innermost in depth.
IMPURE = {
    "asyncio",
    "grpc",
    "socket",
    "time",
    "threading",
    "subprocess",
    "multiprocessing",
    "secrets",
    "uuid",
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the packages and the rules, to plant violations in."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the import rules over the folder; the packages found are the folder's own."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [str(LINT), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_rules_hold(house: Path) -> None:
    result = lint(house)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("node/planted.py", "import coordinator", "node and coordinator"),
        ("coordinator/planted.py", "def f():\n    import node.torch_guard", "node and coordinator"),
        ("protocol/planted.py", "import node", "node and coordinator"),
        ("protocol/lag.py", "import time", "pure modules"),
        ("coordinator/core/planted.py", "import random", "pure modules"),
        ("coordinator/core/planted.py", "def f():\n    import protocol.v1.peer_pb2_grpc", "pure modules"),
        ("node/planted.py", "def f():\n    import torch", "torch is imported only"),
        ("coordinator/planted.py", "from transformers import AutoTokenizer", "torch is imported only"),
        ("node/training/planted.py", "import vllm.config", "only the rollout engine"),
        ("node/rollout/planted.py", "from vllm import LLM", "only the rollout engine"),
        ("node/training/planted.py", "import hivemind", "only the directory"),
    ],
)
def test_planted_violations_are_caught(house: Path, module: str, line: str, broken: str) -> None:
    path = house / module
    for parent in [parent for parent in path.parents if parent.is_relative_to(house) and parent != house]:
        parent.mkdir(exist_ok=True)
        (parent / "__init__.py").touch()
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(house)
    assert result.returncode == 1, result.stdout + result.stderr
    verdicts = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert len(verdicts) == 1
    assert verdicts[0].startswith(broken)


def claims_purity(tree: ast.Module) -> bool:
    """Whether the docstring says `Pure.`."""
    return "Pure." in (ast.get_docstring(tree) or "").replace("\n", " ")


def impurities(tree: ast.Module) -> set[str]:
    """What a module imports although it calls itself pure."""
    return {name for name in imported(tree) if name.split(".")[0] in IMPURE} if claims_purity(tree) else set()


@pytest.mark.parametrize("path", product(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_call_themselves_pure_are(path: Path) -> None:
    assert impurities(parse(path)) == set()


def test_a_false_claim_of_purity_is_caught() -> None:
    assert impurities(ast.parse('"""Counts. Pure."""\nfrom time import time')) == {"time"}
    assert impurities(ast.parse('"""Waits. Impure: asks the clock."""\nimport time')) == set()


def heavy_after_import(module: str) -> str:
    """The heavy modules that are loaded once the module is, in an interpreter of its own."""
    code = (
        f"import sys, {module}\n"
        "print(sorted({'torch', 'vllm', 'hivemind', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["node.cli", "coordinator.cli"])
def test_command_lines_load_nothing_heavy(module: str) -> None:
    assert heavy_after_import(module) == "[]"


def test_a_heavy_import_is_caught() -> None:
    assert heavy_after_import("fastapi") == "['fastapi']"
