"""The journal: durable at COMMIT, one writer, the same state again, and small however long the run."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import journal as journal_module
from coordinator.core import apply as apply_module
from coordinator.core.facts import RolloutAccepted, VersionCommitted
from coordinator.core.state import encode_state
from coordinator.journal import Entry, Journal
from coordinator.journal_reader import JournalReader
from protocol.errors import HomeInUseError, JournalError
from protocol.ids import Digest, RunId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from tests.coordinator.world import RUN_ID, World

ROOT = Path(__file__).parents[2]


class Book:
    """A world whose facts go to a journal, batch by batch."""

    def __init__(self, path: Path) -> None:
        self.path, self.world = path, World()
        self.journal = Journal(path, run_id=RUN_ID)
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


def test_a_changed_rule_of_replay_is_found(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an `apply` that differs from the one that wrote the snapshots."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 50)
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
    with sqlite3.connect(book.path) as db:
        (num_rollouts,) = db.execute("SELECT count(*) FROM rollout").fetchone()
    db.close()
    assert num_rollouts == 4 * 5
    newest = reader.newest_manifest()
    assert newest is not None
    assert newest == reader.manifest(Version(16))
    assert newest.payload == book.world.core.state.roots[Version(16)].encode()
    assert reader.manifest(Version(17)) is None
    book.journal.close()


def test_a_batch_is_written_whole_or_not_at_all(book: Book) -> None:
    before = [line.seq for line in book.journal.reader.lines()]
    grant = book.world.lease()
    book.world.submit(grant, grant.slots[0])
    good = book.entry(tuple(book.world.facts[-2:]))
    doubled = Entry(0, (), good.bodies + good.bodies, ())
    with pytest.raises(JournalError, match="could not be written"):
        book.journal.append([good, doubled], state=book.world.core.state)
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


def test_foreign_newer_and_damaged_journals_are_refused(book: Book) -> None:
    book.run(2)
    book.journal.close()
    with pytest.raises(JournalError, match="belongs to run"):
        Journal(book.path, run_id=RunId("cd" * 16))
    db = sqlite3.connect(book.path)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="newer release"):
        Journal(book.path, run_id=RUN_ID)
    data = bytearray(book.path.read_bytes())
    data[4096 * 2 : 4096 * 4] = b"\xff" * 8192
    book.path.write_bytes(bytes(data))
    with pytest.raises(JournalError):
        Journal(book.path, run_id=RUN_ID)
    book.path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(JournalError, match="could not be opened"):
        Journal(book.path, run_id=RUN_ID)


def test_journal_is_private(book: Book) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in book.path.parent.glob("journal.db*"))
    book.journal.close()


def test_reader_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="could not be read"):
        JournalReader(tmp_path / "none.db")


@pytest.mark.parametrize("num_acks", [1, 7, 23])
def test_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, num_acks: int) -> None:
    path = tmp_path / "journal.db"
    command = [sys.executable, "-m", "tests.coordinator.journal_writer", str(path)]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acks = [writer.stdout.readline().strip() for _ in range(num_acks)]
    writer.kill()
    acks += writer.stdout.read().split()
    writer.stdout.close()
    assert writer.wait(timeout=30) == -9
    journal = Journal(path, run_id=RUN_ID)
    accepted = [str(line.fact.slot) for line in journal.reader.lines() if isinstance(line.fact, RolloutAccepted)]
    assert accepted[: len(acks)] == acks
    assert len(accepted) - len(acks) in (0, 1), "the one that was durable and not yet said"
    state = journal.reader.recover()
    digests = {str(group.key(i)): slot.digest for group in state.groups.values() for i, slot in enumerate(group.slots)}
    for task in state.retired.values():
        digests |= {str(SlotKey(task.version, task.task, i)): f and f[1] for i, f in enumerate(task.fills)}
    assert all(digests[name] == Digest(f"digest of {name}") for name in accepted if name in digests)
    journal.close()
