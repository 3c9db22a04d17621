"""Tracked files speak of the project alone: no paths of one machine, no names of its package mirrors."""

import re
from pathlib import Path

from tests.house.tree import files

# The brackets keep this file from containing what it looks for.
FORBIDDEN = re.compile(r"(?<![\w.])/wor[k]/|/tmp/la[b]\b|opt/pyp[i]|opt/wheel[s]|\.librar[y]/")


def offences(path: Path) -> list[str]:
    """`file:line: text` for each forbidden place in a text file."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path.name}:{n}: {line.strip()[:100]}" for n, line in enumerate(lines, 1) if FORBIDDEN.search(line)]


def test_no_machine_paths_in_tracked_files() -> None:
    tracked = files()
    assert len(tracked) > 20
    assert [offence for path in tracked for offence in offences(path)] == []


def test_planted_paths_are_caught(tmp_path: Path) -> None:
    sample = tmp_path / "sample.md"
    parts = [
        ("/", "work", "/main"),
        ("/", "tmp", "/", "lab"),
        ("file:///", "opt", "/", "pypi"),
        ("frame", "work/x"),
    ]
    sample.write_text("\n".join("".join(part) for part in parts))
    assert [offence.split(":")[1] for offence in offences(sample)] == ["1", "2", "3"]
