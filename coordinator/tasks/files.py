"""Rows of files on the organizer's disk: JSONL, and data sets as parquet, arrow or a folder that `datasets` saved.
Impure: files.

Invariant: the digest covers every byte that rows come from, so that a file which changed is another environment.
pyarrow is imported only where a data set is read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from coordinator.tasks.prompts import Draft, draft_of
from protocol.errors import MachineUnfitError, UsageError
from protocol.ids import Digest
from protocol.run import PoolSpec

READ_BYTES = 1 << 20
Row = Mapping[str, Any]


def jsonl_rows(path: Path, pool: PoolSpec) -> tuple[list[Draft], Digest]:
    """The rows of a file with one JSON object a line (empty lines left out), and its digest. Raises `UsageError`."""
    rows: list[Draft] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_draft(_object(line, f"{path}, line {number}"), pool, f"{path}, line {number}"))
    except OSError as error:
        raise unreadable(path, error) from error
    return _not_empty(rows, path), _digest([path], pool)


def dataset_rows(path: Path, pool: PoolSpec) -> tuple[list[Draft], Digest]:
    """The rows of a data set, and its digest. Raises `UsageError`, and `MachineUnfitError` without pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        raise MachineUnfitError(
            f"the data set {path} cannot be read",
            why="the package pyarrow is not installed",
            remedy="Install `hexcomb[tasks]`, or save the rows as JSONL.",
        ) from error
    try:
        files = _data_files(path)
        raw = [row for file in files for row in _table_rows(file)]
        digest = _digest(files, pool)
    except OSError as error:
        raise unreadable(path, error) from error
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the data set {path} cannot be read",
            why=f"{type(error).__name__}: {error}",
            remedy="Save it anew, as parquet or with `save_to_disk`.",
        ) from error
    return _not_empty([_draft(row, pool, f"{path}, row {i}") for i, row in enumerate(raw)], path), digest


def unreadable(path: Path, error: OSError) -> UsageError:
    """The refusal of a path."""
    return UsageError(
        f"{path} cannot be read",
        why=error.strerror or str(error),
        remedy="Name a file that exists, from the run file's folder.",
    )


def _data_files(path: Path) -> list[Path]:
    """The files of a data set, in the order of their rows."""
    if not path.is_dir():
        path.stat()
        return [path]
    state = path / "state.json"
    if state.is_file():
        return [path / Path(item["filename"]).name for item in json.loads(state.read_text())["_data_files"]]
    splits = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
    if splits:
        raise UsageError(
            f"{path} holds several data sets",
            why=f"it has {', '.join(splits)}",
            remedy=f"Name one: {path / splits[0]}.",
        )
    found = sorted([*path.glob("*.parquet"), *path.glob("*.arrow")])
    if not found:
        raise UsageError(
            f"{path} is no data set",
            why="it holds no state.json, no *.parquet and no *.arrow",
            remedy="Name a folder that `save_to_disk` made, or a file.",
        )
    return found


def _table_rows(path: Path) -> Iterable[Row]:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    if path.suffix != ".arrow":
        raise UsageError(f"{path} is no data set", remedy="Name a .parquet or .arrow file, or use `jsonl:` for JSONL.")
    with pyarrow.OSFile(str(path)) as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            source.seek(0)
            table = pyarrow.ipc.open_file(source).read_all()
    rows = table.to_pylist()
    return rows  # noqa: RET504 - the assignment gives it a type


def _object(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON", why=str(error), remedy="Mend the line.") from error
    if not isinstance(row, dict):
        raise UsageError(
            f"{where} is no JSON object", why=f"it is {type(row).__name__}", remedy="Write columns by name."
        )
    return row


def _draft(row: Row, pool: PoolSpec, where: str) -> Draft:
    return draft_of(row, prompt=pool.prompt_column, answer=pool.answer_column, where=where)


def _not_empty(rows: list[Draft], path: Path) -> list[Draft]:
    if not rows:
        raise UsageError(f"{path} holds no tasks", why="it has no rows", remedy="Name the file with the tasks.")
    return rows


def _digest(files: list[Path], pool: PoolSpec) -> Digest:
    """Of the content, wherever the files are, and of which columns are read."""
    hasher = blake3(json.dumps(["rows", pool.prompt_column, pool.answer_column]).encode())
    for path in files:
        size, content = 0, blake3()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                content.update(block)
                size += len(block)
        hasher.update(f"{size}:{content.hexdigest()}".encode())
    return Digest(hasher.hexdigest())
