"""Reads a journal, also while another process writes it: facts, snapshots, rollouts, manifests. Not pure: SQLite.

Invariant: `recover` gives the state of the last COMMIT, byte for byte, from the newest snapshot and the facts after
it; `check_replay` proves the snapshots by the facts that led to them.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.apply import apply
from coordinator.core.facts import Fact, decode_fact
from coordinator.core.state import State, decode_state, encode_state
from protocol.errors import JournalError
from protocol.ids import SlotKey, Version
from protocol.manifest import SignedManifest

NUM_SNAPSHOTS = 2
BUSY_TIMEOUT_S = 10.0
MAX_QUERY = 500


@dataclass(frozen=True, slots=True)
class Line:
    """A fact as the journal keeps it."""

    seq: int
    epoch: int
    now_ms: int
    fact: Fact


class JournalReader:
    """Reads a journal, also while another process writes it. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        with as_journal_error(path, "read"):
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=BUSY_TIMEOUT_S
            )
        self.path = path

    def _rows(self, query: str, *values: int | str) -> list[tuple[object, ...]]:
        with self._lock, as_journal_error(self.path, "read"):
            return self._db.execute(query, values).fetchall()

    def _blob(self, query: str, *values: int | str) -> tuple[bytes, ...] | None:
        rows = self._rows(query, *values)
        return tuple(bytes(value) for value in rows[0]) if rows else None  # type: ignore[call-overload]

    def manifest(self, version: Version) -> SignedManifest | None:
        """A committed version's manifest."""
        found = self._blob("SELECT payload, signature FROM manifest WHERE version = ?", version)
        return SignedManifest(found[0], found[1]) if found else None

    def newest_manifest(self) -> SignedManifest | None:
        """The head's manifest."""
        found = self._blob("SELECT payload, signature FROM manifest ORDER BY version DESC LIMIT 1")
        return SignedManifest(found[0], found[1]) if found else None

    def rollout_bodies(self, slots: Sequence[SlotKey]) -> list[bytes]:
        """What was handed in for each slot. Raises `JournalError` if one is no longer kept, or never was."""
        names = [str(slot) for slot in slots]
        found: dict[str, bytes] = {}
        for start in range(0, len(names), MAX_QUERY):
            part = names[start : start + MAX_QUERY]
            marks = ", ".join("?" * len(part))
            for name, body in self._rows(f"SELECT slot, body FROM rollout WHERE slot IN ({marks})", *part):
                assert isinstance(name, str) and isinstance(body, bytes)  # noqa: PT018
                found[name] = body
        missing = [name for name in names if name not in found]
        if missing:
            raise JournalError(
                f"{len(missing)} rollouts are not in the journal, {missing[0]} among them",
                why="they were never accepted, or their versions are long past",
            )
        return [found[name] for name in names]

    def lines(self, *, after: int = 0) -> Iterator[Line]:
        """The facts after a sequence number, in order."""
        while page := self._rows(
            "SELECT seq, epoch, now_ms, payload FROM facts WHERE seq > ? ORDER BY seq LIMIT 1000", after
        ):
            for seq, epoch, now_ms, payload in page:
                assert isinstance(seq, int) and isinstance(epoch, int) and isinstance(now_ms, int)  # noqa: PT018
                assert isinstance(payload, bytes)
                yield Line(seq, epoch, now_ms, decode_fact(payload))
                after = seq

    def snapshots(self) -> list[tuple[int, State]]:
        """(sequence number, state) of the snapshots that are kept, oldest first."""
        found = self._rows("SELECT seq, state FROM snapshot ORDER BY seq")
        return [(seq, decode_state(state)) for seq, state in found]  # type: ignore[misc, arg-type]

    def recover(self) -> State:
        """The state after the last fact: newest snapshot, and what came after it."""
        seq, state = self.snapshots()[-1] if self._rows("SELECT 1 FROM snapshot LIMIT 1") else (0, State())
        for line in self.lines(after=seq):
            apply(state, line.fact)
        return state

    def check_replay(self) -> int:
        """Replays what is kept and compares with each snapshot on the way, byte for byte; returns the number of facts.
        Raises `JournalError` where they differ."""
        kept = dict(self.snapshots())
        seq, state = next(iter(kept.items())) if len(kept) >= NUM_SNAPSHOTS else (0, State())
        count = 0
        for line in self.lines(after=seq):
            apply(state, line.fact)
            count += 1
            known = kept.get(line.seq)
            if known is not None and encode_state(known) != encode_state(state):
                raise JournalError(
                    f"the journal's snapshot at {line.seq} is not what its facts give",
                    why="it was written by a defective release, or the file was changed",
                    remedy="Keep a copy of the journal and report this.",
                )
        return count

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()


@contextlib.contextmanager
def as_journal_error(path: Path, what: str) -> Iterator[None]:
    """Turns what SQLite and the disk raise into `JournalError`."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise JournalError(
            f"the journal {path} could not be {what}",
            why=str(error),
            remedy="Check the disk's space and health, then start the coordinator again.",
        ) from error
