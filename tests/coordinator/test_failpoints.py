"""Exactly once, whenever the process dies: at each place where something could be half done, at any moment, and when
the disk fails. The swarm around it goes on with the next process as nodes do: it tries again what it has no answer to.

The planted bugs show that the account that `crashing.Clients` keep would notice.
"""

import ast
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from coordinator import failpoints
from coordinator.failpoints import NAMES, VARIABLE, failpoint, parse_failpoints
from coordinator.journal import Journal
from protocol.errors import JournalError, UsageError
from tests.coordinator.crashing import Clients
from tests.coordinator.journal_writer import BUGS
from tests.coordinator.world import RUN_ID
from tests.house.tree import ROOT, parse, product

KILLED = -9
PLACES = tuple(name for name in NAMES if name != "schema.before_commit")
BUDGET_S = 360.0
NUM_KILLS = 500


@pytest.fixture
def make_clients(tmp_path: Path) -> Iterator[Callable[..., Clients]]:
    """Clients at a new journal each."""
    made: list[Clients] = []

    def make(*, seed: int = 1, bug: str = "") -> Clients:
        made.append(Clients(tmp_path / f"journal{len(made)}.db", seed=seed, bug=bug))
        return made[-1]

    yield make
    for clients in made:
        clients.close()


def test_killed_once_at_each_failpoint(make_clients: Callable[..., Clients]) -> None:
    clients = make_clients()
    clients.live(num_turns=8)
    plan = [f"{name}=kill@{1 if 'snapshot' in name or 'truncation' in name else 3}" for name in PLACES]
    for now, then in zip(plan, [*plan[1:], ""], strict=True):
        assert clients.live(now, then=then) == KILLED, f"{now} was never reached"
    assert clients.live(num_turns=3) == 0
    account = clients.account
    assert len(clients.acknowledged) > 20
    assert len(clients.turns) > 10
    assert account.num_versions > 3
    assert len(account.trained) > 10
    assert clients.reader is not None
    assert next(clients.reader.lines()).seq > 1, "the log was truncated on the way"


@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 120)
def test_killed_five_hundred_times(make_clients: Callable[..., Clients]) -> None:
    ends_s = time.monotonic() + BUDGET_S
    chance, killed_at, clients, plan = random.Random(66), Counter[str](), make_clients(seed=66), list[str]()
    for number in range(NUM_KILLS + 1):
        name = PLACES[number % len(PLACES)]
        most = 2 if "snapshot" in name or "truncation" in name else 40 if name == "authority.before_decide" else 9
        plan.append(f"{name}=kill@{chance.randint(1, most)}")
    for number, (now, then) in enumerate(pairwise(plan)):
        assert time.monotonic() < ends_s, f"{number} kills took longer than {BUDGET_S:g} s"
        assert clients.live(now, then=then) == KILLED, f"{now} was never reached"
        killed_at[now.partition("=")[0]] += 1
    assert sum(killed_at.values()) == NUM_KILLS
    assert set(killed_at) == set(PLACES)
    assert clients.account.num_versions > NUM_KILLS / 5
    assert len(clients.acknowledged) > NUM_KILLS
    print(f"{dict(killed_at)}; {len(clients.acknowledged)} acknowledged, {clients.account.num_versions} versions")


def test_killed_at_any_moment(make_clients: Callable[..., Clients]) -> None:
    clients = make_clients(seed=5)
    for num_turns in (0, 2, 5, 1, 4, 3):
        assert clients.live(num_turns=num_turns) == 0
    assert len(clients.acknowledged) > 10


@pytest.mark.parametrize("bug", list(BUGS))
def test_planted_bugs_are_found(make_clients: Callable[..., Clients], bug: str) -> None:
    clients, chance = make_clients(bug=bug), random.Random(7)
    name = "journal.before_commit" if bug == "answers before the commit" else "journal.after_commit"
    plan = [f"{name}=kill@{chance.randint(2, 9)}" for _ in range(60)]

    def lives() -> None:
        clients.live(num_turns=8)
        for now, then in pairwise(plan):
            clients.live(now, then=then, num_turns=10)

    with pytest.raises(AssertionError, match=r"lost|manifest|trained|gives another state|skipped|does not wait"):
        lives()


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_failing_disk_ends_the_process_in_words(make_clients: Callable[..., Clients], kind: str) -> None:
    clients = make_clients()
    clients.live(num_turns=5)
    for name in [name for name in PLACES if name.startswith("journal.")]:
        count = 1 if "snapshot" in name or "truncation" in name else 2
        assert clients.live(f"{name}={kind}@{count}") == JournalError.exit_code, clients.error
        assert "could not be written" in clients.error
        assert "Traceback" not in clients.error
    assert clients.live(num_turns=3) == 0


def test_a_file_that_cannot_grow_ends_the_process_in_words(make_clients: Callable[..., Clients]) -> None:
    """No failpoint: the kernel refuses the write."""
    clients = make_clients()
    clients.live(num_turns=3)
    before = len(clients.acknowledged)
    assert clients.live(limit_bytes=250_000, num_turns=500) == JournalError.exit_code, clients.error
    assert "could not be written" in clients.error
    assert len(clients.acknowledged) > before
    assert clients.live(num_turns=3) == 0


def test_torn_files_of_a_dead_process_open(make_clients: Callable[..., Clients]) -> None:
    clients = make_clients()
    clients.live("journal.before_commit=kill@6")
    wal, shm = (clients.path.with_name(clients.path.name + suffix) for suffix in ("-wal", "-shm"))
    assert clients.reader is not None
    clients.reader.close()
    clients.reader = None
    with wal.open("ab") as file:
        file.write(b"\x5a" * 10_000)
    shm.unlink()
    clients.live("journal.after_commit=kill@5")
    clients.reader.close()
    clients.reader = None
    shm.unlink()
    assert len(clients.acknowledged) > 5
    clients.check()


def test_killed_in_a_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older file is whole until the newer one is."""
    from tests.coordinator.test_journal_schema import old_journal

    path = old_journal(tmp_path)
    imports = "from pathlib import Path; from coordinator.journal import Journal"
    code = f"{imports}; Journal(Path({str(path)!r}), run_id={RUN_ID!r})"
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={VARIABLE: "schema.before_commit=kill"}, timeout=60, check=False
        )
        assert process.returncode == KILLED
    monkeypatch.setattr(failpoints, "_armed", parse_failpoints("schema.before_commit=enospc"))
    with pytest.raises(JournalError, match="could not be opened"):
        Journal(path, run_id=RUN_ID)
    monkeypatch.undo()
    journal = Journal(path, run_id=RUN_ID)
    assert journal.reader.check_content(journal.reader.recover()) > 0
    journal.close()


def test_nothing_happens_unless_the_variable_is_set() -> None:
    code = "from coordinator import failpoints as f\nassert f._armed == {}\nfor name in f.NAMES: f.failpoint(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={}, timeout=60, check=True)
    assert failpoints._armed == {}
    began_s = time.perf_counter()
    for _ in range(100_000):
        failpoint("journal.before_commit")
    assert time.perf_counter() - began_s < 1.0, "a place costs more than a look into a dictionary"


def test_every_name_has_its_one_place() -> None:
    calls = [
        ast.literal_eval(item.args[0])
        for path in product()
        for item in ast.walk(parse(path))
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "failpoint"
    ]
    assert sorted(calls) == sorted(NAMES)


def test_the_third_time_counts() -> None:
    failure = parse_failpoints("journal.after_facts=eio@3")["journal.after_facts"]
    failure.reach()
    failure.reach()
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        failure.reach()
    failure.reach()


@pytest.mark.parametrize(
    "text",
    ["nowhere=kill", "journal.before_commit", "journal.before_commit=sleep", "journal.before_commit=kill@0", "=,x"],
)
def test_a_wrong_value_of_the_variable_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"{VARIABLE} is wrong"):
        parse_failpoints(text)
