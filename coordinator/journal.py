"""The journal: every fact that the core decided, durable before anybody hears of it. Not pure: SQLite on disk.

Invariants: one process writes a journal (a lock file says so); a batch of facts, the rollouts and manifests that
belong to it and what they make obsolete is one transaction, synced to disk at COMMIT; opening gives the state of the
last COMMIT, byte for byte. A snapshot every `SNAPSHOT_EVERY` facts bounds log and restart; the facts since the last
but one are kept, so that the newest snapshot can be proven by replay.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.facts import Fact, GroupDropped, VersionCommitted, encode_fact
from coordinator.core.state import State, encode_state
from coordinator.journal_reader import BUSY_TIMEOUT_S, NUM_SNAPSHOTS, JournalReader, as_journal_error
from protocol.errors import HomeInUseError, JournalError
from protocol.ids import RunId, SlotKey, Version
from protocol.manifest import SignedManifest

SCHEMA = 1
KEPT_MANIFESTS = 1000
"""Versions before the oldest that may still be needed whose manifests stay readable."""
SNAPSHOT_EVERY = 2000

_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts(seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, now_ms INTEGER NOT NULL, payload BLOB NOT NULL);
CREATE TABLE snapshot(seq INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE rollout(slot TEXT PRIMARY KEY, task INTEGER NOT NULL, retired_at INTEGER, body BLOB NOT NULL);
CREATE INDEX rollout_by_task ON rollout(task);
CREATE INDEX rollout_by_retirement ON rollout(retired_at);
CREATE TABLE manifest(version INTEGER PRIMARY KEY, payload BLOB NOT NULL, signature BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one event adds: its facts, the bodies of accepted rollouts, the manifests of committed versions."""

    now_ms: int
    facts: tuple[Fact, ...]
    bodies: tuple[tuple[SlotKey, bytes], ...] = ()
    manifests: tuple[tuple[Version, SignedManifest], ...] = ()


class Journal:
    """The only writer. `append` blocks until the disk has the batch: call it outside the event loop."""

    def __init__(self, path: Path, *, run_id: RunId) -> None:
        """Opens or creates. Raises `HomeInUseError` or `JournalError`."""
        self.path, self._run_id = path, run_id
        self._write_lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = _take_lock(path)
        try:
            self._db = self._open()
            self.reader = JournalReader(path)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._seq = self._number("SELECT max(seq) FROM (SELECT seq FROM facts UNION ALL SELECT seq FROM snapshot)")
        self._snapshot_seq = self._number("SELECT max(seq) FROM snapshot")

    def append(self, entries: Sequence[Entry], *, state: State) -> None:
        """One transaction for the whole batch; `state` is the state after it. Raises `JournalError`, after which the
        process must end: what it has in memory is not what the disk has."""
        with self._write_lock, as_journal_error(self.path, "written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for entry in entries:
                    self._write(entry, state)
                if self._seq - self._snapshot_seq >= SNAPSHOT_EVERY:
                    self._snapshot(state)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes after the batch that is being written, and lets another process have the journal."""
        with self._write_lock:
            self.reader.close()
            self._db.close()
            os.close(self._lock_file)

    def _write(self, entry: Entry, state: State) -> None:
        for fact in entry.facts:
            self._seq += 1
            row = (self._seq, state.epoch, entry.now_ms, encode_fact(fact))
            self._db.execute("INSERT INTO facts VALUES(?, ?, ?, ?)", row)
        for slot, body in entry.bodies:
            self._db.execute("INSERT INTO rollout VALUES(?, ?, NULL, ?)", (str(slot), slot.task.index, body))
        for version, signed in entry.manifests:
            self._db.execute("INSERT INTO manifest VALUES(?, ?, ?)", (version, signed.payload, signed.signature))
        for fact in entry.facts:
            if isinstance(fact, GroupDropped) and state.head is not None:
                self._retire((fact.index,), state.head.version)
            if isinstance(fact, VersionCommitted):
                self._retire(fact.groups, fact.version)
                self._db.execute("DELETE FROM rollout WHERE retired_at < ?", (fact.keep_from,))
                self._db.execute("DELETE FROM manifest WHERE version < ?", (fact.keep_from - KEPT_MANIFESTS,))

    def _retire(self, tasks: tuple[int, ...], version: Version) -> None:
        rows = [(version, task) for task in tasks]
        self._db.executemany("UPDATE rollout SET retired_at = ? WHERE task = ?", rows)

    def _snapshot(self, state: State) -> None:
        self._db.execute("INSERT INTO snapshot VALUES(?, ?)", (self._seq, encode_state(state)))
        kept = "SELECT seq FROM snapshot ORDER BY seq DESC LIMIT ?"
        self._db.execute(f"DELETE FROM snapshot WHERE seq NOT IN ({kept})", (NUM_SNAPSHOTS,))
        if self._number("SELECT count(*) FROM snapshot") == NUM_SNAPSHOTS:
            self._db.execute("DELETE FROM facts WHERE seq <= (SELECT min(seq) FROM snapshot)")
        self._snapshot_seq = self._seq

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0] or 0)

    def _open(self) -> sqlite3.Connection:
        with as_journal_error(self.path, "opened"):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)
            try:
                for setting in ("journal_mode=WAL", "synchronous=FULL", "trusted_schema=OFF"):
                    db.execute(f"PRAGMA {setting}")
                self._check(db)
            except BaseException:
                db.close()
                raise
            return db

    def _check(self, db: sqlite3.Connection) -> None:
        """Makes the tables in an empty file; refuses a damaged, newer or foreign one."""
        schema = int(db.execute("PRAGMA user_version").fetchone()[0])
        if schema == 0:
            meta = f"INSERT INTO meta VALUES('run_id', '{self._run_id}');"
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} {meta} PRAGMA user_version = {SCHEMA}; COMMIT;")
        if schema > SCHEMA:
            raise JournalError(
                f"the journal {self.path} cannot be used",
                why=f"a newer release wrote it (schema {schema}, this one knows {SCHEMA})",
                remedy="Install that release.",
            )
        (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
        if verdict != "ok":
            raise JournalError(f"the journal {self.path} is damaged", why=verdict, remedy="Restore a backup.")
        (owner,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        if owner != self._run_id:
            raise JournalError(
                f"the journal {self.path} cannot be used",
                why=f"it belongs to run {owner}",
                remedy="Use that run's file, or another home folder.",
            )


def _take_lock(path: Path) -> int:
    lock_file = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock_file)
        raise HomeInUseError(
            f"the journal {path} cannot be used",
            why="another coordinator writes it",
            remedy="Stop that one first.",
        ) from error
    return lock_file
