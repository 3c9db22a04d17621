"""`replay`, `check` and `backup`: the state of any kept moment, proven, while the coordinator goes on."""

import asyncio
import os
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest

from coordinator import journal as journal_module
from coordinator.backup import back_up
from coordinator.core.apply import apply
from coordinator.core.state import State, encode_state
from coordinator.journal import Journal
from coordinator.journal_reader import JournalReader
from coordinator.replay import prove, replay_until, summary_of, text_of, time_of
from protocol.errors import JournalError, UsageError
from protocol.ids import Digest
from tests.coordinator.test_authority import Bench
from tests.coordinator.test_journal import Book
from tests.coordinator.world import RUN_ID

DEADLINE_S = 10.0


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """A run of twelve versions, a second each, and a log whose beginning is gone."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 40)
    monkeypatch.setattr(journal_module, "MIN_LOG_SHARE", 0.0)
    book = Book(tmp_path / "journal.db")
    book.world.start()
    book.write()
    for _ in range(12):
        book.run(1)
        book.world.tick(1.0)
        book.world.see_all()
    book.world.fill_batch()
    book.world.lease()
    book.write()
    return book


def state_after(book: Book, seq: int) -> bytes:
    """Of the facts in memory, from the first on."""
    state = State()
    for fact in book.world.facts[:seq]:
        apply(state, fact)
    return encode_state(state)


async def test_replay_gives_the_state_of_the_living_authority(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal.db")
    await bench.swarm()
    grant = await bench.lease()
    for slot in grant.slots:
        await bench.fill(grant, slot)
    reader = JournalReader(bench.path)
    found = await asyncio.to_thread(replay_until, reader)
    assert encode_state(found.state) == encode_state(bench.authority.core.state)
    assert found.num_facts == found.seq > 10
    reader.close()
    await bench.stop()


def test_every_kept_moment_can_be_made_again(book: Book) -> None:
    reader = book.journal.reader
    first, last = next(reader.lines()).seq, len(book.world.facts)
    assert first > 1
    for seq in (first - 1, first, last - 17, last):
        found = replay_until(reader, str(seq))
        assert (found.seq, found.first_seq, found.num_facts) == (seq, first, seq - first + 1)
        assert encode_state(found.state) == state_after(book, seq)
    assert encode_state(replay_until(reader).state) == encode_state(book.world.core.state)
    lines = list(reader.lines())
    middle_ms = lines[len(lines) // 2].now_ms
    for until in (time_of(middle_ms), datetime.fromtimestamp(middle_ms / 1000).isoformat()):
        found = replay_until(reader, until)
        assert found.now_ms == middle_ms
        assert found.seq == max(line.seq for line in lines if line.now_ms <= middle_ms) < last
    assert replay_until(reader, "2100-01-01").seq == last
    book.journal.close()


def test_moments_out_of_reach_are_refused(book: Book) -> None:
    reader, first = book.journal.reader, next(book.journal.reader.lines()).seq
    for until in (str(first - 2), "0", "1970-01-01T00:00:01Z"):
        with pytest.raises(UsageError, match=rf"begin with number {first}; those before .* deleted.*backup"):
            replay_until(reader, until)
    with pytest.raises(UsageError, match=rf"no fact 999999 yet.*last one is {len(book.world.facts)}"):
        replay_until(reader, "999999")
    for until in ("yesterday", "-1", "", "9" * 30 + "T"):
        with pytest.raises(UsageError, match="neither a fact's number nor a time"):
            replay_until(reader, until)
    book.journal.close()


def test_a_snapshot_that_differs_is_found_wherever_replay_ends(book: Book) -> None:
    seq, state = book.journal.reader.snapshots()[1]
    state.num_aborted += 1
    data = encode_state(state)
    first = next(book.journal.reader.lines()).seq
    book.sql(f"UPDATE snapshot SET state = x'{data.hex()}', crc = {journal_module.checksum(data)} WHERE seq = {seq}")
    for until in (None, str(first)):
        with pytest.raises(JournalError, match=f"snapshot at {seq} is not what its facts give"):
            replay_until(book.journal.reader, until)
    with pytest.raises(JournalError, match="is not what its facts give"):
        prove(book.path)
    book.journal.close()


def test_what_people_and_machines_read(book: Book) -> None:
    found = replay_until(book.journal.reader)
    shown, text = summary_of(found), text_of(found)
    assert (shown["version"], shown["seq"], shown["balanced"]) == (12, len(book.world.facts), True)
    assert shown["books"]["trained"] == 48
    assert shown["lag_histogram"] == {"0": 192}
    assert (len(shown["leases"]), shown["leases"][0]["node"], shown["leases"][0]["slots"]) == (1, "r0", 2)
    assert shown["round"]["round"] == "12.0"
    for words in ("version 12", "48 trained", "they balance", "192  100.0 %", "round 12.0 is open", "open leases: 1"):
        assert words in text
    assert "mac_key" not in str(shown)
    empty = summary_of(replay_until(book.journal.reader, str(found.first_seq - 1)))
    assert empty["time"] is None
    book.journal.close()


def test_replay_of_an_empty_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", run_id=RUN_ID)
    found = replay_until(journal.reader)
    assert (found.seq, found.num_facts, summary_of(found)["version"]) == (0, 0, None)
    assert "no version yet" in text_of(found)
    assert prove(journal.path)[1] == 0
    journal.close()


def test_check_reads_everything(book: Book) -> None:
    found, num_rollouts = prove(book.path)
    assert found.seq == len(book.world.facts)
    assert num_rollouts == book.sql("SELECT count(*) FROM rollout")[0][0]
    book.sql("UPDATE rollout SET body = x'00' WHERE retired_at = 12")
    with pytest.raises(JournalError, match="checksum of the rollout"):
        prove(book.path)
    book.journal.close()


def test_books_that_do_not_balance_are_found(book: Book) -> None:
    state = book.journal.reader.recover()
    state.num_issued += 1
    data = encode_state(state)
    seq = len(book.world.facts)
    book.sql(f"INSERT INTO snapshot VALUES({seq}, {journal_module.checksum(data)}, x'{data.hex()}')")
    book.sql(f"DELETE FROM snapshot WHERE seq < {seq}")
    book.sql(f"DELETE FROM facts WHERE seq <= {seq}")
    with pytest.raises(JournalError, match="damaged because the books do not balance"):
        prove(book.path)
    book.journal.close()


async def test_backup_of_a_busy_journal_is_one_whole_state(book: Book, tmp_path: Path) -> None:
    """Copies are made while versions are; each is the state of some COMMIT, and a run goes on from the last."""
    copies = [tmp_path / f"copy{number}.db" for number in range(4)]

    async def copy() -> None:
        for target in copies:
            await asyncio.to_thread(back_up, book.path, target)

    copying = asyncio.create_task(copy())
    async with asyncio.timeout(DEADLINE_S * 3):
        while not copying.done():
            await asyncio.to_thread(book.run, 1)
    await copying
    book.journal.close()
    for target in copies:
        assert target.stat().st_mode & 0o077 == 0
        found, _ = prove(target)
        assert encode_state(found.state) == state_after(book, found.seq)
    assert sorted(name for name in os.listdir(tmp_path) if "copy" in name) == [path.name for path in copies]
    restored = Journal(copies[-1], run_id=RUN_ID)
    found, _ = prove(copies[-1])
    restored.append([], state=found.state)
    restored.close()


def test_backup_never_overwrites_and_leaves_nothing_half_done(book: Book, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("dear")
    with pytest.raises(UsageError, match="never overwrites"):
        back_up(book.path, target)
    assert target.read_text() == "dear"
    with pytest.raises(UsageError, match="cannot be made"):
        back_up(book.path, tmp_path / "nowhere" / "copy.db")
    book.journal.close()
    data = bytearray(book.path.read_bytes())
    data[4096 * 3 : 4096 * 4] = b"\xff" * 4096
    book.path.write_bytes(bytes(data))
    with pytest.raises(JournalError, match="damaged"):
        back_up(book.path, tmp_path / "bad.db")
    assert [path.name for path in tmp_path.iterdir() if "bad" in path.name] == []


def test_backup_is_an_ordinary_file_of_sqlite(book: Book, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    assert back_up(book.path, target) == target.stat().st_size > 0
    db = sqlite3.connect(f"{target.as_uri()}?immutable=1", uri=True)
    assert db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone() == (RUN_ID,)
    assert db.execute("SELECT count(*) FROM rollout WHERE digest = ?", (Digest("none"),)).fetchone() == (0,)
    db.close()
    book.journal.close()
