"""Reads a journal, also while another process writes it: facts, snapshots, rollouts, manifests. Not pure: SQLite.

Invariants: `recover` gives the state of the last COMMIT, byte for byte, from the newest snapshot and the facts after
it; `replay` proves the snapshots by the facts that led to them; what is read is what was written, or refused.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.apply import apply
from coordinator.core.facts import Fact, decode_fact
from coordinator.core.state import State, decode_state, encode_state
from coordinator.journal_schema import SCHEMA, as_journal_error, check_pages, checked, damaged, schema_of
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


@dataclass(frozen=True, slots=True)
class Replay:
    """A state that was made again. `seq` and `now_ms` are of the last fact in it (None = it is the snapshot that the
    kept facts begin with), `first_seq` of the first fact that is kept; `num_facts` were applied since that snapshot."""

    state: State
    seq: int
    now_ms: int | None
    first_seq: int
    num_facts: int


class JournalReader:
    """Reads a journal, also while another process writes it. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises `JournalError` on a file of another release."""
        self.path = path
        self._lock = threading.RLock()
        with as_journal_error(path, "read"):
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=BUSY_TIMEOUT_S,
            )
            try:
                schema = schema_of(self._db, path)
            except BaseException:
                self._db.close()
                raise
        if schema != SCHEMA:
            self._db.close()
            raise JournalError(
                f"the journal {path} cannot be read",
                why=f"an older release wrote it (schema {schema}, this one reads {SCHEMA})",
                remedy="Start the coordinator once: it brings the file up to date.",
            )

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Everything read inside is of one COMMIT; other threads wait."""
        with self._lock, as_journal_error(self.path, "read"):
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def manifest(self, version: Version) -> SignedManifest | None:
        """A committed version's manifest."""
        found = self._blobs("SELECT payload, signature FROM manifest WHERE version = ?", version)
        return SignedManifest(found[0], found[1]) if found else None

    def newest_manifest(self) -> SignedManifest | None:
        """The head's manifest."""
        found = self._blobs("SELECT payload, signature FROM manifest ORDER BY version DESC LIMIT 1")
        return SignedManifest(found[0], found[1]) if found else None

    def rollout_bodies(self, slots: Sequence[SlotKey]) -> list[bytes]:
        """What was handed in for each slot. Raises `JournalError` if one is damaged, or is not kept."""
        names = [str(slot) for slot in slots]
        found: dict[str, bytes] = {}
        for start in range(0, len(names), MAX_QUERY):
            part = names[start : start + MAX_QUERY]
            marks = ", ".join("?" * len(part))
            for name, crc, body in self._rows(f"SELECT slot, crc, body FROM rollout WHERE slot IN ({marks})", *part):
                assert isinstance(name, str) and isinstance(crc, int) and isinstance(body, bytes)  # noqa: PT018
                found[name] = checked(self.path, body, crc, f"the rollout for slot {name}")
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
            "SELECT seq, epoch, now_ms, crc, payload FROM facts WHERE seq > ? ORDER BY seq LIMIT 1000", after
        ):
            for seq, epoch, now_ms, crc, payload in page:
                assert isinstance(seq, int) and isinstance(epoch, int) and isinstance(now_ms, int)  # noqa: PT018
                assert isinstance(crc, int) and isinstance(payload, bytes)  # noqa: PT018
                yield Line(seq, epoch, now_ms, decode_fact(checked(self.path, payload, crc, f"fact {seq}")))
                after = seq

    def snapshots(self) -> list[tuple[int, State]]:
        """(sequence number, state) of the snapshots that are kept, oldest first."""
        found: list[tuple[int, State]] = []
        for seq, crc, state in self._rows("SELECT seq, crc, state FROM snapshot ORDER BY seq"):
            assert isinstance(seq, int) and isinstance(crc, int) and isinstance(state, bytes)  # noqa: PT018
            found.append((seq, decode_state(checked(self.path, state, crc, f"the snapshot at {seq}"))))
        return found

    def recover(self) -> State:
        """The state after the last fact: newest snapshot, and what came after it."""
        with self.frozen():
            seq, state = self.snapshots()[-1] if self._rows("SELECT 1 FROM snapshot LIMIT 1") else (0, State())
            for line in self._onward(seq):
                apply(state, line.fact)
        return state

    def replay(self, *, is_wanted: Callable[[Line], bool] = lambda _: True) -> Replay:
        """Replays all that is kept, and compares with each snapshot on the way, byte for byte; gives the state before
        the first fact that is not wanted. Raises `JournalError` where a snapshot differs or a fact is missing."""
        with self.frozen():
            kept = self.snapshots()
            (first,) = self._rows("SELECT min(seq) FROM facts")[0]
            begins_empty = not kept or first == 1
            start, state = (0, State()) if begins_empty else (kept[0][0], decode_state(encode_state(kept[0][1])))
            expected = {seq: encode_state(known) for seq, known in kept}
            seq, now_ms, cut = start, None, None
            for line in self._onward(start):
                if cut is None and not is_wanted(line):
                    cut = Replay(decode_state(encode_state(state)), seq, now_ms, start + 1, seq - start)
                apply(state, line.fact)
                seq, now_ms = line.seq, line.now_ms
                if seq in expected and expected[seq] != encode_state(state):
                    raise self._differs(seq)
        return cut or Replay(state, seq, now_ms, start + 1, seq - start)

    def check_replay(self) -> int:
        """`replay`; the number of facts that prove the snapshots."""
        return self.replay().num_facts

    def check_content(self, state: State) -> int:
        """Compares the rollouts with the state after the last fact, and reads each; returns their number. Raises
        `JournalError` if one is damaged, or missing, or no fact knows it."""
        filled = {
            str(group.key(sample)): (slot.peer_id, slot.digest)
            for group in state.groups.values()
            for sample, slot in enumerate(group.slots)
            if slot.digest is not None
        }
        count = 0
        with self._lock, as_journal_error(self.path, "read"):
            check_pages(self._db, self.path)
            query = "SELECT slot, digest, peer, retired_at, crc, body FROM rollout"
            for name, digest, peer, retired_at, crc, body in self._db.execute(query):
                checked(self.path, body, crc, f"the rollout for slot {name}")
                if filled.pop(name, (peer, digest) if retired_at is not None else None) != (peer, digest):
                    raise damaged(self.path, f"the rollout for slot {name} is not the one that the facts say")
                count += 1
        if filled:
            raise damaged(self.path, f"{len(filled)} accepted rollouts are missing, {next(iter(filled))} among them")
        return count

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def _onward(self, seq: int) -> Iterator[Line]:
        for line in self.lines(after=seq):
            seq += 1
            if line.seq != seq:
                raise damaged(self.path, f"fact {seq} is missing")
            yield line

    def _differs(self, seq: int) -> JournalError:
        return JournalError(
            f"the journal's snapshot at {seq} is not what its facts give",
            why="it was written by a defective release, or the file was changed",
            remedy="Keep a copy of the journal and report this.",
        )

    def _rows(self, query: str, *values: int | str) -> list[tuple[object, ...]]:
        with self._lock, as_journal_error(self.path, "read"):
            return self._db.execute(query, values).fetchall()

    def _blobs(self, query: str, *values: int | str) -> tuple[bytes, ...] | None:
        rows = self._rows(query, *values)
        return tuple(bytes(value) for value in rows[0]) if rows else None  # type: ignore[call-overload]
