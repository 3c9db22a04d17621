"""No module is too long to read in one sitting, no function too long for one screen."""

import ast
from pathlib import Path

import pytest

from tests.house.tree import ROOT, hand_written, parse

MODULE_LINES = 400
FUNCTION_LINES = 60


def oversized(path: Path) -> list[str]:
    """What is too long in the file, one line each."""
    num_lines = len(path.read_text().splitlines())
    found = [f"{path.name}: {num_lines} lines"] if num_lines > MODULE_LINES else []
    for item in ast.walk(parse(path)):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (item.end_lineno or item.lineno) - item.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path.name}: {item.name} has {length} lines")
    return found


@pytest.mark.parametrize("path", hand_written(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert oversized(path) == []


def test_long_module_and_function_are_caught(tmp_path: Path) -> None:
    module, function = tmp_path / "module.py", tmp_path / "function.py"
    module.write_text("x = 1\n" * (MODULE_LINES + 1))
    function.write_text("async def long():\n" + "    x = 1\n" * FUNCTION_LINES)
    assert oversized(module) == ["module.py: 401 lines"]
    assert oversized(function) == ["function.py: long has 61 lines"]
    function.write_text("def fits():\n" + "    x = 1\n" * (FUNCTION_LINES - 1))
    assert oversized(function) == []
