"""The journal's tables: how they are made, checked, and brought up from an older release. Not pure: SQLite.

Invariants: a file of a newer release, of another run, of other tasks or with damaged pages is refused and left as it
is; an older file becomes a present one in one transaction, by one function for each step; every payload stands beside
its CRC-32, since SQLite's own check sees damaged pages and not damaged content.
"""

import contextlib
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from coordinator.core.apply import apply
from coordinator.core.facts import decode_fact
from coordinator.core.state import State, decode_state, encode_state
from coordinator.failpoints import failpoint
from protocol.errors import JournalError
from protocol.ids import Digest, PeerId, RunId
from protocol.manifest import digest_of
from protocol.run import RunSpec

SCHEMA = 3

PINNED = {
    "environment": ("its [task] section is", "Put the section back as it was"),
    "prompts": (
        "the content of its task's files, code, packages or chat template is",
        "Put them back as they were",
    ),
}

META = "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
MANIFEST = "CREATE TABLE manifest(version INTEGER PRIMARY KEY, payload BLOB NOT NULL, signature BLOB NOT NULL)"
LOG = (
    """CREATE TABLE facts(seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, now_ms INTEGER NOT NULL,
        crc INTEGER NOT NULL, payload BLOB NOT NULL)""",
    "CREATE TABLE snapshot(seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, state BLOB NOT NULL)",
)
ROLLOUT = (
    """CREATE TABLE rollout(slot TEXT PRIMARY KEY NOT NULL, digest TEXT NOT NULL UNIQUE, peer TEXT NOT NULL,
        version INTEGER NOT NULL, task INTEGER NOT NULL, retired_at INTEGER, crc INTEGER NOT NULL,
        body BLOB NOT NULL)""",
    "CREATE INDEX rollout_by_task ON rollout(task)",
    "CREATE INDEX rollout_by_retirement ON rollout(retired_at)",
)


def environment_digest(spec: RunSpec) -> Digest:
    """Names everything of a run from which its prompts are drawn: a journal's slots have no meaning under another."""
    environment = spec.environment
    params = sorted(environment.params.items())
    content = (environment.name, params, environment.prompt, environment.num_tasks, spec.seed)
    return digest_of(msgspec.json.encode(content))


def prepare(db: sqlite3.Connection, path: Path, *, run_id: RunId, environment: Digest | None) -> None:
    """Makes the tables in an empty file, migrates an older one, refuses any other. Raises `JournalError`."""
    schema = schema_of(db, path)
    if schema == 0:
        with transaction(db):
            for statement in (META, MANIFEST, *LOG, *ROLLOUT):
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES('run_id', ?)", (run_id,))
            db.execute(f"PRAGMA user_version = {SCHEMA}")
    check_pages(db, path)
    owner = _meta(db, "run_id")
    if owner != run_id:
        raise JournalError(
            f"the journal {path} cannot be used",
            why=f"it belongs to run {owner}",
            remedy="Use that run's file, or another home folder.",
        )
    if 0 < schema < SCHEMA:
        with transaction(db):
            for step in range(schema, SCHEMA):
                MIGRATIONS[step](db, path)
            db.execute(f"PRAGMA user_version = {SCHEMA}")
            failpoint("schema.before_commit")
    if environment is not None:
        pin(db, path, "environment", environment)


def schema_of(db: sqlite3.Connection, path: Path) -> int:
    """The file's schema, 0 if it is empty. Raises `JournalError` on a newer one, and on another program's file."""
    schema = int(db.execute("PRAGMA user_version").fetchone()[0])
    if schema > SCHEMA:
        raise JournalError(
            f"the journal {path} cannot be used",
            why=f"a newer release wrote it (schema {schema}, this one knows {SCHEMA})",
            remedy="Install that release.",
        )
    if schema == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise JournalError(
            f"the journal {path} cannot be used", why="another program made it", remedy="Name another home folder."
        )
    return schema


def check_pages(db: sqlite3.Connection, path: Path) -> None:
    """SQLite's own check. Raises `JournalError`."""
    (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, f"integrity_check says: {verdict.splitlines()[-1]}")


def checksum(payload: bytes) -> int:
    """What stands beside a payload."""
    return zlib.crc32(payload)


def checked(path: Path, payload: bytes, crc: int, what: str) -> bytes:
    """The payload. Raises `JournalError` unless it is what was written."""
    if zlib.crc32(payload) != crc:
        raise damaged(path, f"the checksum of {what} does not hold")
    return payload


def damaged(path: Path, why: str) -> JournalError:
    """The refusal of a journal whose content cannot be trusted."""
    return JournalError(
        f"the journal {path} is damaged",
        why=why,
        remedy="Move it away with its -wal and -shm files, and put a backup in its place.",
    )


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Everything inside, or nothing."""
    with or_rolled_back(db):
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")


@contextlib.contextmanager
def or_rolled_back(db: sqlite3.Connection) -> Iterator[None]:
    """Ends the open transaction without a trace if what happens inside fails."""
    try:
        yield
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def as_journal_error(path: Path, what: str) -> Iterator[None]:
    """Turns what SQLite and the disk raise into `JournalError`."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path, f"integrity_check could not end: {error}") from error
        raise JournalError(
            f"the journal {path} could not be {what}",
            why=str(error),
            remedy="Check the disk's space and health, then start the coordinator again.",
        ) from error


def _meta(db: sqlite3.Connection, key: str) -> str | None:
    found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(found[0]) if found else None


def pin(db: sqlite3.Connection, path: Path, key: Literal["environment", "prompts"], digest: Digest) -> None:
    """Takes the tasks for the run's, as the run file names them or by their content, unless others were opened already;
    a first start with a typing error does no harm. Raises `JournalError`."""
    known = _meta(db, key)
    if known == digest:
        return
    if known is not None and _has_opened_tasks(db, path):
        what, back = PINNED[key]
        raise JournalError(
            f"the journal {path} cannot be used with this run file",
            why=f"{what} not the one with which the run began, and the slots would get other prompts",
            remedy=f"{back}, or begin a new run in another home folder.",
        )
    with transaction(db):
        db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, digest))


def _has_opened_tasks(db: sqlite3.Connection, path: Path) -> bool:
    return _recovered(db, path)[1].num_issued > 0


def _recovered(db: sqlite3.Connection, path: Path) -> tuple[int, State]:
    """The last fact's number and the state after it, whatever the schema. Raises `JournalError`."""
    found = db.execute("SELECT seq, state FROM snapshot ORDER BY seq DESC LIMIT 1").fetchone()
    seq, state = (found[0], decode_state(found[1])) if found else (0, State())
    for number, payload in db.execute("SELECT seq, payload FROM facts WHERE seq > ? ORDER BY seq", (seq,)):
        seq += 1
        if number != seq:
            raise damaged(path, f"fact {seq} is missing")
        apply(state, decode_fact(payload))
    return seq, state


def _begin_log(db: sqlite3.Connection, seq: int, state: State) -> None:
    """The log begins anew with one snapshot: the facts of before were applied by other rules, and would give another
    state than the snapshots of before."""
    for table in ("facts", "snapshot"):
        db.execute(f"DROP TABLE {table}")
    for statement in LOG:
        db.execute(statement)
    if seq:
        data = encode_state(state)
        db.execute("INSERT INTO snapshot VALUES(?, ?, ?)", (seq, checksum(data), data))


def _from_1(db: sqlite3.Connection, path: Path) -> None:
    """Digest, peer and version beside each rollout, and checksums."""
    seq, state = _recovered(db, path)
    fills = _fills(state)
    for statement in (
        "DROP INDEX rollout_by_task",
        "DROP INDEX rollout_by_retirement",
        "ALTER TABLE rollout RENAME TO rollout_1",
        *ROLLOUT,
    ):
        db.execute(statement)
    for slot, task, retired_at, body in db.execute("SELECT slot, task, retired_at, body FROM rollout_1"):
        if slot in fills:
            peer, digest, version = fills[slot]
            row = (slot, digest, peer, version, task, retired_at, checksum(body), body)
            db.execute("INSERT INTO rollout VALUES(?, ?, ?, ?, ?, ?, ?, ?)", row)
        elif retired_at is None:
            raise damaged(path, f"it holds a rollout for slot {slot}, which no fact knows")
    db.execute("DROP TABLE rollout_1")
    _begin_log(db, seq, state)


def _from_2(db: sqlite3.Connection, path: Path) -> None:
    """Accepted rollouts earn credit for slots that move, and slots may hold tokens of the environment."""
    for seq, crc, payload in db.execute("SELECT seq, crc, payload FROM facts"):
        checked(path, payload, crc, f"fact {seq}")
    for seq, crc, data in db.execute("SELECT seq, crc, state FROM snapshot"):
        checked(path, data, crc, f"the snapshot at {seq}")
    _begin_log(db, *_recovered(db, path))


def _fills(state: State) -> dict[str, tuple[PeerId, Digest, int]]:
    """Who filled each slot that the state remembers, with what, and the version under which it was opened."""
    fills: dict[str, tuple[PeerId, Digest, int]] = {}
    for group in state.groups.values():
        for sample, slot in enumerate(group.slots):
            if slot.peer_id is not None and slot.digest is not None:
                fills[str(group.key(sample))] = (slot.peer_id, slot.digest, group.version)
    for retired in state.retired.values():
        for sample, fill in enumerate(retired.fills):
            if fill is not None:
                fills[f"v{retired.version}/{retired.task}/{sample}"] = (*fill, retired.version)
    return fills


MIGRATIONS: dict[int, Callable[[sqlite3.Connection, Path], None]] = {1: _from_1, 2: _from_2}
"""From each older schema, the step to the next one."""
