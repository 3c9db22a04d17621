"""An online backup: one consistent file, made while the coordinator writes, and checked before it has its name.

Impure: SQLite and files. Invariant: the file that is named exists only once it is whole and on disk.
"""

import os
import sqlite3
from pathlib import Path

from coordinator.journal_reader import BUSY_TIMEOUT_S
from coordinator.journal_schema import as_journal_error
from coordinator.replay import prove
from protocol.errors import UsageError


def back_up(journal: Path, target: Path) -> int:
    """Copies the journal to a new file, readable by its owner alone, and proves the copy; its size in bytes. Raises
    `UsageError` if the file exists or cannot be made, `JournalError`."""
    if os.path.lexists(target):
        raise UsageError(f"{target} exists", why="a backup never overwrites", remedy="Name another file.")
    part = target.with_name(f".{target.name}.part")
    try:
        try:
            os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise UsageError(f"{target} cannot be made", why=str(error), remedy="Name another place.") from error
        _copy(journal, part)
        prove(part)
        _sync(part)
        part.rename(target)
        _sync(target.parent)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)
    return target.stat().st_size


def _copy(journal: Path, part: Path) -> None:
    """All pages in one read transaction, so that writers cannot make it begin again; the copy is one plain file."""
    with as_journal_error(journal, "backed up"):
        uri = f"{journal.absolute().as_uri()}?mode=ro"
        source = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        try:
            copy = sqlite3.connect(part, isolation_level=None)
            try:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
            finally:
                copy.close()
        finally:
            source.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
