"""The journal: every fact that the core decided, durable before anybody hears of it. Not pure: SQLite on disk.

Invariants: one process writes a journal (a lock file says so); a batch of facts, the rollouts and manifests that
belong to it and what they make obsolete is one transaction, synced to disk at COMMIT; a slot has one rollout, and a
rollout one slot; opening gives the state of the last COMMIT, byte for byte. A snapshot bounds log and restart: one is
due after `SNAPSHOT_EVERY` facts, but not before the facts weigh as much as the snapshot before, so that a large state
is not written over and over. The facts since the last but one are kept, so that the newest can be proven by replay.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.facts import Fact, GroupDropped, RolloutAccepted, VersionCommitted, encode_fact
from coordinator.core.state import State, encode_state
from coordinator.failpoints import failpoint
from coordinator.journal_reader import BUSY_TIMEOUT_S, MAX_QUERY, NUM_SNAPSHOTS, JournalReader
from coordinator.journal_schema import as_journal_error, checksum, or_rolled_back, pin, prepare
from protocol.errors import HomeInUseError, JournalError
from protocol.ids import Digest, RunId, SlotKey, Version
from protocol.manifest import SignedManifest

KEPT_MANIFESTS = 1000
"""Versions before the oldest that may still be needed whose manifests stay readable."""
SNAPSHOT_EVERY = 2000
MAX_FACTS_PER_SNAPSHOT = 200_000
"""However large a snapshot is, a restart replays no more than these."""
MIN_LOG_SHARE = 1.0
"""Bytes of facts for each byte of the snapshot before them that make a new one due."""
MAX_IDLE_WAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """What one event adds: its facts, the bodies of accepted rollouts, the manifests of committed versions."""

    now_ms: int
    facts: tuple[Fact, ...]
    bodies: tuple[tuple[SlotKey, bytes], ...] = ()
    manifests: tuple[tuple[Version, SignedManifest], ...] = ()


class Journal:
    """The only writer. `append` and `commit` block until the disk has the batch: call them outside the event loop."""

    def __init__(self, path: Path, *, run_id: RunId, environment: Digest | None = None) -> None:
        """Opens, creates or migrates. `environment` names what the run's prompts are drawn from
        (`journal_schema.environment_digest`); it may not change once tasks were opened. Raises `HomeInUseError` or
        `JournalError`."""
        self.path = path
        self._write_lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = _take_lock(path)
        try:
            self._db = _open(path, run_id, environment)
            self.reader = JournalReader(path)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._seq = self._number("SELECT max(seq) FROM (SELECT seq FROM facts UNION ALL SELECT seq FROM snapshot)")
        self._snapshot_seq = self._number("SELECT max(seq) FROM snapshot")
        self._snapshot_bytes = self._number("SELECT length(state) FROM snapshot ORDER BY seq DESC LIMIT 1")
        self._log_bytes = self._number(f"SELECT sum(length(payload)) FROM facts WHERE seq > {self._snapshot_seq}")

    def pin_prompts(self, digest: Digest) -> None:
        """Names what the run's prompts are made from, by content; it may not change once tasks were opened. Raises
        `JournalError`."""
        with self._write_lock, as_journal_error(self.path, "written"):
            pin(self._db, self.path, "prompts", digest)

    def append(self, entries: Sequence[Entry], *, state: State) -> None:
        """One transaction for the whole batch; `state` is the state after it. Raises `JournalError`, after which the
        process must end: what it has in memory is not what the disk has."""
        self.stage(entries, state=state)
        self.commit(entries, state=state)

    def stage(self, entries: Sequence[Entry], *, state: State) -> None:
        """The quick half of `append`: no wait for the disk. Each row gives the interpreter's lock away for a moment, so
        in a thread beside a busy event loop it would take longer than the loop is held up by it."""
        with self._write_lock, as_journal_error(self.path, "written"), or_rolled_back(self._db):
            failpoint("journal.before_begin")
            self._db.execute("BEGIN IMMEDIATE")
            self._write_facts(entries, state)
            failpoint("journal.after_facts")
            self._write_rollouts(entries)
            failpoint("journal.after_rollouts")
            self._write_manifests(entries)

    def commit(self, entries: Sequence[Entry], *, state: State) -> None:
        """The other half, of what was staged: blocks until the disk has the batch."""
        with self._write_lock, as_journal_error(self.path, "written"), or_rolled_back(self._db):
            self._retire_groups(entries)
            if self._is_snapshot_due():
                self._write_snapshot(state)
            failpoint("journal.before_commit")
            self._db.execute("COMMIT")
            failpoint("journal.after_commit")

    def close(self) -> None:
        """Closes after the batch that is being written, and lets another process have the journal."""
        with self._write_lock:
            self.reader.close()
            self._db.close()
            os.close(self._lock_file)

    def _write_facts(self, entries: Sequence[Entry], state: State) -> None:
        rows = []
        for entry in entries:
            for fact in entry.facts:
                payload = encode_fact(fact)
                self._seq += 1
                self._log_bytes += len(payload)
                rows.append((self._seq, state.epoch, entry.now_ms, checksum(payload), payload))
        self._db.executemany("INSERT INTO facts VALUES(?, ?, ?, ?, ?)", rows)

    def _write_rollouts(self, entries: Sequence[Entry]) -> None:
        self._db.executemany(
            "INSERT INTO rollout VALUES(?, ?, ?, ?, ?, NULL, ?, ?)",
            [row for entry in entries for row in _rollout_rows(self.path, entry)],
        )

    def _write_manifests(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for version, signed in entry.manifests:
                self._db.execute("INSERT INTO manifest VALUES(?, ?, ?)", (version, signed.payload, signed.signature))

    def _retire_groups(self, entries: Sequence[Entry]) -> None:
        """Marks the rollouts of trained groups, and deletes what is past its time. Those of dropped groups go at
        once: nobody trains on them, and the state alone knows a duplicate."""
        facts = [fact for entry in entries for fact in entry.facts]
        self._for_tasks("DELETE FROM rollout", [fact.index for fact in facts if isinstance(fact, GroupDropped)])
        for fact in facts:
            if isinstance(fact, VersionCommitted):
                self._for_tasks("UPDATE rollout SET retired_at = ?", fact.groups, fact.version)
                self._db.execute("DELETE FROM rollout WHERE retired_at < ?", (fact.keep_from,))
                self._db.execute("DELETE FROM manifest WHERE version < ?", (fact.keep_from - KEPT_MANIFESTS,))

    def _for_tasks(self, change: str, tasks: Sequence[int], *values: int) -> None:
        """Makes a change to the rollouts of many tasks by a few statements: each gives the interpreter's lock away."""
        for start in range(0, len(tasks), MAX_QUERY):
            part = tasks[start : start + MAX_QUERY]
            self._db.execute(f"{change} WHERE task IN ({', '.join('?' * len(part))})", (*values, *part))

    def _is_snapshot_due(self) -> bool:
        num_facts = self._seq - self._snapshot_seq
        is_heavy = self._log_bytes >= MIN_LOG_SHARE * self._snapshot_bytes
        return num_facts >= SNAPSHOT_EVERY and (is_heavy or num_facts >= MAX_FACTS_PER_SNAPSHOT)

    def _write_snapshot(self, state: State) -> None:
        data = encode_state(state)
        self._db.execute("INSERT INTO snapshot VALUES(?, ?, ?)", (self._seq, checksum(data), data))
        failpoint("journal.after_snapshot")
        kept = "SELECT seq FROM snapshot ORDER BY seq DESC LIMIT ?"
        self._db.execute(f"DELETE FROM snapshot WHERE seq NOT IN ({kept})", (NUM_SNAPSHOTS,))
        if self._number("SELECT count(*) FROM snapshot") == NUM_SNAPSHOTS:
            self._db.execute("DELETE FROM facts WHERE seq <= (SELECT min(seq) FROM snapshot)")
        failpoint("journal.after_truncation")
        self._snapshot_seq, self._snapshot_bytes, self._log_bytes = self._seq, len(data), 0

    def _number(self, query: str) -> int:
        found = self._db.execute(query).fetchone()
        return int(found[0] or 0) if found else 0


def _rollout_rows(path: Path, entry: Entry) -> Iterator[tuple[str, str, str, int, int, int, bytes]]:
    bodies = dict(entry.bodies)
    for fact in entry.facts:
        if not isinstance(fact, RolloutAccepted):
            continue
        if (body := bodies.get(fact.slot)) is None:
            raise JournalError(
                f"the journal {path} could not be written",
                why=f"the rollout accepted for slot {fact.slot} came without its bytes",
            )
        slot = fact.slot
        yield str(slot), fact.digest, fact.peer_id, slot.version, slot.task.index, checksum(body), body


def _open(path: Path, run_id: RunId, environment: Digest | None) -> sqlite3.Connection:
    with as_journal_error(path, "opened"):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)
        try:
            for setting in ("journal_mode=WAL", "synchronous=FULL", "trusted_schema=OFF"):
                db.execute(f"PRAGMA {setting}")
            db.execute(f"PRAGMA journal_size_limit={MAX_IDLE_WAL_BYTES}")
            prepare(db, path, run_id=run_id, environment=environment)
        except BaseException:
            db.close()
            raise
        return db


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
