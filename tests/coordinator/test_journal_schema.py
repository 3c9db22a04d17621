"""Files of other releases, of other tasks, and of nobody: what becomes of them at opening."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from coordinator.core import events as e
from coordinator.core.handle import Core
from coordinator.core.state import State, encode_state
from coordinator.journal import Journal
from coordinator.journal_reader import JournalReader
from coordinator.journal_schema import SCHEMA, environment_digest
from protocol.errors import JournalError
from protocol.ids import Digest, PeerId
from protocol.run import EnvironmentSpec
from tests.coordinator.test_journal import Book
from tests.coordinator.world import RUN_ID, make_rules


def old_journal(folder: Path, *, schema: int = 1) -> Path:
    """A file as a release with that schema wrote it: five versions, an open round, and one of two leased slots filled.
    In schema 2 rollouts were accepted between its two snapshots, when they earned no credit for slots that move."""
    path = folder / "old.db"
    db = sqlite3.connect(path)
    db.executescript(Path(__file__).with_name(f"journal_schema_{schema}.sql").read_text())
    db.close()
    return path


@pytest.mark.parametrize("schema", [1, 2])
def test_an_older_journal_is_migrated_and_the_run_goes_on(tmp_path: Path, schema: int) -> None:
    path = old_journal(tmp_path, schema=schema)
    db = sqlite3.connect(path)
    slots = {slot for (slot,) in db.execute("SELECT slot FROM rollout")}
    (encoded,) = db.execute("SELECT state FROM snapshot ORDER BY seq DESC").fetchone()
    db.close()
    known = set(msgspec.msgpack.decode(encoded))
    assert known < set(msgspec.msgpack.decode(encode_state(State()))), "the file lacks fields of today"
    with pytest.raises(JournalError, match="an older release wrote it"):
        JournalReader(path)
    journal = Journal(path, run_id=RUN_ID, environment=Digest("the run's"))
    state = journal.reader.recover()
    assert state.head is not None
    assert (state.head.version, state.tally["trained"], state.tally["in_round"]) == (5, 20, 4)
    assert journal.reader.check_replay() == 0
    assert journal.reader.check_content(state) == len(slots) == 25
    journal.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    rows = db.execute("SELECT slot, digest, peer, version FROM rollout").fetchall()
    assert {slot for slot, *_ in rows} == slots
    assert all((digest, peer) == (f"digest of {slot}", "r0") for slot, digest, peer, _ in rows)
    assert all(slot.startswith(f"v{version}/") for slot, _, _, version in rows)
    db.close()
    go_on(path, state)


def go_on(path: Path, state: State) -> None:
    """The run's next versions, from what the migrated file holds; a repeated rollout is still known."""
    book = Book(path)
    book.world.rules = replace(book.world.rules, num_trainers=1, expected_nodes=2)
    book.world.core = Core(book.world.rules, state)
    book.world.now_ms = 1_010_000
    book.world.do(e.CoordinatorStarted())
    slot = next(group.key(0) for group in state.groups.values() if group.slots[0].digest)
    again = e.RolloutSubmitted(PeerId("r0"), "none", slot, Digest(f"digest of {slot}"), ((slot.version, 4),))  # type: ignore[arg-type]
    assert getattr(book.world.do(again).reply, "outcome", "") == "DUPLICATE"
    for name in ("t0", "r0"):
        book.world.see(name)
        book.world.do(e.CapabilityLearned(PeerId(name), e.Capability(1.0, 1.0, 1, "cpu")))
    book.world.tick()
    book.world.finish_round()
    book.world.see_all()
    book.write()
    book.run(3)
    reader = book.journal.reader
    assert encode_state(reader.recover()) == encode_state(book.world.core.state)
    assert reader.check_replay() == len(book.world.facts)
    reader.check_content(reader.recover())
    book.journal.close()


def test_a_migration_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = old_journal(tmp_path)
    db = sqlite3.connect(path)
    db.execute("INSERT INTO rollout VALUES('v5/sums:7:99/0', 99, NULL, x'00')")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="which no fact knows"):
        Journal(path, run_id=RUN_ID)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert db.execute("SELECT count(*) FROM rollout").fetchone() == (26,)
    db.close()
    assert len(path.read_bytes()) == len(before)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("UPDATE facts SET crc = crc + 1 WHERE seq = (SELECT max(seq) FROM facts)", "checksum of fact"),
        ("UPDATE snapshot SET crc = crc + 1 WHERE seq = (SELECT max(seq) FROM snapshot)", "checksum of the snapshot"),
        ("DELETE FROM facts WHERE seq = (SELECT max(seq) FROM facts) - 1", "is missing"),
    ],
)
def test_a_damaged_old_journal_is_not_made_a_sound_new_one(tmp_path: Path, damage: str, why: str) -> None:
    path = old_journal(tmp_path, schema=2)
    db = sqlite3.connect(path)
    db.execute(damage)
    db.commit()
    with pytest.raises(JournalError, match=why):
        Journal(path, run_id=RUN_ID)
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


@pytest.mark.parametrize("schema", [1, 2])
def test_an_empty_old_journal_is_migrated(tmp_path: Path, schema: int) -> None:
    path = old_journal(tmp_path, schema=schema)
    db = sqlite3.connect(path)
    db.executescript("DELETE FROM facts; DELETE FROM snapshot; DELETE FROM rollout; DELETE FROM manifest;")
    db.close()
    journal = Journal(path, run_id=RUN_ID)
    assert encode_state(journal.reader.recover()) == encode_state(State())
    journal.close()


def test_other_tasks_on_an_old_journal_are_refused(tmp_path: Path) -> None:
    rules, path = make_rules(), tmp_path / "journal.db"
    ours = environment_digest(rules.spec)
    mistyped = environment_digest(replace(rules.spec, environment=EnvironmentSpec("smus")))
    Journal(path, run_id=RUN_ID, environment=mistyped).close()
    Journal(path, run_id=RUN_ID, environment=ours).close()  # nothing was opened under the other name
    book = Book(path)
    book.world.start()
    book.world.lease()
    book.write()
    book.journal.close()
    with pytest.raises(JournalError, match=r"\[task\] section is not the one with which the run began.*home folder"):
        Journal(path, run_id=RUN_ID, environment=mistyped)
    Journal(path, run_id=RUN_ID, environment=ours).close()


def test_each_setting_of_the_tasks_has_its_digest() -> None:
    spec = make_rules(environment=EnvironmentSpec("sums", {"a": 1, "b": 2})).spec
    environment = spec.environment
    others = [
        replace(spec, seed=8),
        *(
            replace(spec, environment=replace(environment, **{name: value}))
            for name, value in {"name": "x", "params": {"a": 1}, "prompt": "expression", "num_tasks": 9}.items()
        ),
    ]
    assert len({environment_digest(each) for each in [spec, *others]}) == 6
    same = replace(spec, environment=replace(environment, params={"b": 2, "a": 1}), name="other", max_lag=9)
    assert environment_digest(same) == environment_digest(spec)
