"""The journal: durable at COMMIT, one writer, the same state again, and small however long the run."""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from coordinator import journal as journal_module
from coordinator.core import apply as apply_module
from coordinator.core import events as e
from coordinator.core.facts import Fact, GroupDropped, RolloutAccepted, VersionCommitted
from coordinator.core.state import encode_state
from coordinator.failpoints import NAMES
from coordinator.journal import Entry, Journal
from coordinator.journal_reader import JournalReader
from protocol.errors import HomeInUseError, JournalError
from protocol.ids import Digest, RunId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from tests.coordinator.world import RUN_ID, World
from tests.house.tree import ROOT


class Book:
    """A world whose facts go to a journal, batch by batch."""

    def __init__(self, path: Path, *, run_id: RunId = RUN_ID) -> None:
        self.path, self.world = path, World()
        self.journal = Journal(path, run_id=run_id)
        self.num_written = 0

    def write(self) -> None:
        """Everything new, in one transaction, as the authority does."""
        facts, self.num_written = tuple(self.world.facts[self.num_written :]), len(self.world.facts)
        entries = [self.entry((fact,)) for fact in facts]
        self.journal.append(entries, state=self.world.core.state)

    def entry(self, facts: tuple[object, ...]) -> Entry:
        bodies = [(f.slot, str(f.slot).encode()) for f in facts if isinstance(f, RolloutAccepted)]
        manifests = [
            (f.version, SignedManifest(f.root.encode(), b"s")) for f in facts if isinstance(f, VersionCommitted)
        ]
        return Entry(self.world.now_ms, facts, tuple(bodies), tuple(manifests))  # type: ignore[arg-type]

    def run(self, num_versions: int) -> None:
        for _ in range(num_versions):
            self.world.make_version()
            self.write()

    def reopen(self) -> None:
        self.journal.close()
        self.journal = Journal(self.path, run_id=RUN_ID)

    def sql(self, query: str) -> list[tuple[object, ...]]:
        db = sqlite3.connect(self.path)
        try:
            return db.execute(query).fetchall()
        finally:
            db.commit()
            db.close()


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path / "journal.db")
    book.world.start()
    book.write()
    return book


def test_opening_gives_the_same_state(book: Book) -> None:
    book.run(3)
    book.world.fill_batch()
    book.write()
    book.reopen()
    assert encode_state(book.journal.reader.recover()) == encode_state(book.world.core.state)
    assert [line.fact for line in book.journal.reader.lines()] == book.world.facts
    assert {line.epoch for line in book.journal.reader.lines()} == {0}
    book.journal.close()


def test_log_and_restart_are_bounded(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 50)
    monkeypatch.setattr(journal_module, "MIN_LOG_SHARE", 0.0)
    book.run(30)
    reader = book.journal.reader
    lines = list(reader.lines())
    assert len(book.world.facts) > 400
    assert len(lines) < 50 * 3
    assert len(reader.snapshots()) == 2
    assert lines[-1].seq == len(book.world.facts)
    assert reader.check_replay() == len(lines)
    book.reopen()
    assert encode_state(book.journal.reader.recover()) == encode_state(book.world.core.state)
    book.run(2)
    assert encode_state(book.journal.reader.recover()) == encode_state(book.world.core.state)
    book.journal.close()


def test_a_large_state_is_not_written_over_and_over(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts between two snapshots weigh as much as one, but are never more than a restart can replay."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 10)
    book.world.core.state.base_root = Digest("x" * 20_000)
    book.run(16)
    book.reopen()
    book.run(14)
    seqs = [seq for seq, _ in book.journal.reader.snapshots()]
    assert book.journal.reader.snapshots()[0][1].base_root == "x" * 20_000
    between = book.sql(f"SELECT sum(length(payload)) FROM facts WHERE seq > {seqs[0]} AND seq <= {seqs[1]}")[0][0]
    assert isinstance(between, int)
    assert between > 20_000
    monkeypatch.setattr(journal_module, "MAX_FACTS_PER_SNAPSHOT", 10)
    book.run(4)
    newest = [seq for seq, _ in book.journal.reader.snapshots()]
    assert newest[1] - newest[0] < 40
    book.journal.close()


def test_a_changed_rule_of_replay_is_found(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an `apply` that differs from the one that wrote the snapshots."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 50)
    monkeypatch.setattr(journal_module, "MIN_LOG_SHARE", 0.0)
    book.run(10)
    monkeypatch.setattr(apply_module, "MAX_EVALUATIONS_DUE", 0)
    monkeypatch.setattr(apply_module, "HISTORY", 2)
    with pytest.raises(JournalError, match="is not what its facts give"):
        book.journal.reader.check_replay()
    book.journal.close()


def test_rollouts_and_manifests_are_kept_while_they_are_needed(book: Book) -> None:
    book.run(1)
    slot = SlotKey(Version(0), TaskKey("sums", 7, 0), 0)
    reader = book.journal.reader
    assert reader.rollout_bodies([slot, slot]) == [str(slot).encode()] * 2
    book.run(4)
    assert reader.rollout_bodies([slot]) == [str(slot).encode()], "max_lag + 2 versions later it is still there"
    book.run(1)
    with pytest.raises(JournalError, match="not in the journal"):
        reader.rollout_bodies([slot])
    book.run(10)
    assert book.sql("SELECT count(*) FROM rollout") == [(4 * 5,)]
    newest = reader.newest_manifest()
    assert newest is not None
    assert newest == reader.manifest(Version(16))
    assert newest.payload == book.world.core.state.roots[Version(16)].encode()
    assert reader.manifest(Version(17)) is None
    book.journal.close()


def test_rollouts_of_a_dropped_group_go_with_it(book: Book) -> None:
    grant = book.world.lease(num_slots=4)
    for slot in grant.slots:
        book.world.submit(grant, slot)
    book.write()
    dropped, kept = {slot.task.index: slot for slot in grant.slots}.values()
    for slot in grant.slots:
        if slot.task == dropped.task:
            book.world.do(e.RolloutScored(slot, None))
    assert any(isinstance(fact, GroupDropped) for fact in book.world.facts)
    book.write()
    assert book.sql("SELECT DISTINCT task FROM rollout") == [(kept.task.index,)]
    assert book.world.submit(grant, dropped).outcome == "DUPLICATE"
    state = book.world.core.state
    book.reopen()
    assert encode_state(book.journal.reader.recover()) == encode_state(state)
    assert book.journal.reader.check_content(state) == 2
    book.journal.close()


def test_sql_knows_who_filled_a_slot_with_what(book: Book) -> None:
    book.run(2)
    slot = SlotKey(Version(1), TaskKey("sums", 7, 2), 1)
    query = "SELECT digest, peer, version, task, retired_at FROM rollout"
    assert book.sql(f"{query} WHERE slot = '{slot}'") == [(f"digest of {slot}", "r0", 1, 2, 2)]
    book.world.fill_batch()
    book.write()
    assert len(book.sql(f"{query} WHERE retired_at IS NULL")) == 4
    book.journal.close()


def test_a_slot_has_one_rollout_and_a_rollout_one_slot(book: Book) -> None:
    """The tables hold even if the core did not."""
    grant = book.world.lease()
    book.world.submit(grant, grant.slots[0])
    book.write()
    (fact,) = [fact for fact in book.world.facts if isinstance(fact, RolloutAccepted)]
    for wrong in (replace(fact, digest=Digest("another")), replace(fact, slot=grant.slots[1])):
        with pytest.raises(JournalError, match="UNIQUE constraint failed: rollout"):
            book.journal.append([book.entry((wrong,))], state=book.world.core.state)
    book.journal.close()


def test_a_batch_is_written_whole_or_not_at_all(book: Book) -> None:
    before = [line.seq for line in book.journal.reader.lines()]
    grant = book.world.lease()
    book.world.submit(grant, grant.slots[0])
    good = book.entry(tuple(book.world.facts[-2:]))
    for bad in (good, Entry(0, good.facts), Entry(0, (), (), ((Version(0), SignedManifest(b"other", b"s")),))):
        with pytest.raises(JournalError, match="could not be written"):
            book.journal.append([good, bad], state=book.world.core.state)
        assert [line.seq for line in book.journal.reader.lines()] == before
        with pytest.raises(JournalError):
            book.journal.reader.rollout_bodies([grant.slots[0]])
    book.journal.close()


def test_second_coordinator_is_refused(book: Book) -> None:
    with pytest.raises(HomeInUseError):
        Journal(book.path, run_id=RUN_ID)
    reader = JournalReader(book.path)
    assert list(reader.lines()) == list(book.journal.reader.lines()), "but anybody may read meanwhile"
    reader.close()
    book.journal.close()
    Journal(book.path, run_id=RUN_ID).close()


def test_reader_alone_opens_a_closed_journal(book: Book) -> None:
    book.journal.close()
    reader = JournalReader(book.path)
    assert encode_state(reader.recover()) == encode_state(book.world.core.state)
    reader.close()


def test_what_is_read_inside_is_of_one_commit(book: Book) -> None:
    reader = JournalReader(book.path)
    with reader.frozen():
        before = len(list(reader.lines()))
        book.run(1)
        with reader.frozen():
            assert len(list(reader.lines())) == before
    assert len(list(reader.lines())) > before
    reader.close()
    book.journal.close()


def test_foreign_and_newer_journals_are_refused(book: Book, tmp_path: Path) -> None:
    book.run(2)
    book.journal.close()
    with pytest.raises(JournalError, match="belongs to run"):
        Journal(book.path, run_id=RunId("cd" * 16))
    book.sql("PRAGMA user_version = 99")
    before = book.path.read_bytes()
    for open_it in (lambda: Journal(book.path, run_id=RUN_ID), lambda: JournalReader(book.path)):
        with pytest.raises(JournalError, match="newer release"):
            open_it()
    assert book.path.read_bytes() == before
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE songs(title)")
    other.close()
    with pytest.raises(JournalError, match="another program made it"):
        Journal(tmp_path / "other.db", run_id=RUN_ID)


def test_damaged_journals_are_refused_with_a_remedy(book: Book) -> None:
    book.run(6)
    book.journal.close()
    good = book.path.read_bytes()
    for page in range(1, len(good) // 4096, 3):
        data = bytearray(good)
        data[4096 * page : 4096 * (page + 1)] = b"\xff" * 4096
        book.path.write_bytes(bytes(data))
        with pytest.raises(JournalError, match=r"damaged because integrity_check.*put a backup in its place"):
            Journal(book.path, run_id=RUN_ID)
    book.path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(JournalError, match=r"damaged because integrity_check.*not a database"):
        Journal(book.path, run_id=RUN_ID)


@pytest.mark.parametrize(
    ("table", "column", "read"),
    [
        ("facts", "payload", JournalReader.recover),
        ("snapshot", "state", JournalReader.recover),
        ("rollout", "body", lambda reader: reader.rollout_bodies([SlotKey(Version(6), TaskKey("sums", 7, 12), 0)])),
        ("rollout", "body", lambda reader: reader.check_content(reader.recover())),
    ],
)
def test_a_flipped_bit_is_found(
    book: Book, table: str, column: str, read: Callable[[JournalReader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a payload, where SQLite's own check cannot see it."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 30)
    book.run(6)
    grant = book.world.lease()
    book.world.submit(grant, grant.slots[0])
    book.write()
    read(book.journal.reader)
    book.journal.close()
    place = f"rowid = (SELECT max(rowid) FROM {table})"
    ((payload,),) = book.sql(f"SELECT {column} FROM {table} WHERE {place}")
    assert isinstance(payload, bytes)
    spoiled = payload[:-1] + bytes([payload[-1] ^ 1])
    book.sql(f"UPDATE {table} SET {column} = x'{spoiled.hex()}' WHERE {place}")
    assert book.sql("PRAGMA integrity_check") == [("ok",)]
    reader = JournalReader(book.path)
    with pytest.raises(JournalError, match=r"damaged because the checksum of .*put a backup in its place"):
        read(reader)
    reader.close()


def test_missing_facts_and_rollouts_are_found(book: Book) -> None:
    book.run(2)
    book.world.fill_batch()
    book.write()
    state = book.journal.reader.recover()
    assert book.journal.reader.check_content(state) == 12
    book.sql("DELETE FROM rollout WHERE slot = (SELECT max(slot) FROM rollout)")
    with pytest.raises(JournalError, match="1 accepted rollouts are missing"):
        book.journal.reader.check_content(state)
    book.sql("UPDATE rollout SET digest = 'forged' WHERE slot = (SELECT max(slot) FROM rollout)")
    with pytest.raises(JournalError, match="is not the one that the facts say"):
        book.journal.reader.check_content(state)
    book.sql("DELETE FROM facts WHERE seq = 20")
    with pytest.raises(JournalError, match="fact 20 is missing"):
        book.journal.reader.recover()
    book.journal.close()


def test_journal_is_private(book: Book) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in book.path.parent.glob("journal.db*"))
    book.journal.close()


def test_reader_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="could not be read"):
        JournalReader(tmp_path / "none.db")


def names_in(section: str) -> list[str]:
    """Names in the first column of the tables of a section of the document about the journal."""
    text = (ROOT / "docs" / "journal.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_document_names_every_fact_and_every_failpoint() -> None:
    assert sorted(names_in("What is hard and what is soft")) == sorted(kind.__name__ for kind in get_args(Fact))
    assert names_in("Failpoints") == list(NAMES)
