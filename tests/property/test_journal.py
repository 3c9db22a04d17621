"""Random histories through a journal that truncates its log all the time: what opening gives is what all facts since
the first give, byte for byte."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator import journal as journal_module
from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core.apply import apply
from coordinator.core.replies import Grant
from coordinator.core.state import State, encode_state
from coordinator.journal import Entry, Journal
from protocol.errors import HexcombError
from protocol.ids import PeerId, SlotKey
from protocol.manifest import SignedManifest
from tests.coordinator.world import RUN_ID, World

NUM_STEPS = 400
SEEDS = range(16)


class History:
    """A world in which anything may happen next, and its journal. `full` is the state of all facts since the first."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance, self.world = path, random.Random(seed), World()
        self.world.is_checked = False  # the books have tests of their own
        self.journal = Journal(path, run_id=RUN_ID)
        self.journal._db.execute("PRAGMA synchronous=OFF")  # what is tested is the order of things, not the disk
        self.full, self.num_written = State(), 0
        self.grants: list[tuple[str, Grant]] = []
        self.steps: list[tuple[int, Callable[[], object]]] = [
            (4, self.lease),
            (4, self.make_version),
            (12, self.submit),
            (8, self.score),
            (4, lambda: self.world.tick(self.chance.choice([0.1, 0.5, 1.0, 25.0]))),
            (9, self.come),
            (2, self.give_back),
            (2, self.attest),
            (1, lambda: self.world.do(e.SessionEnded(PeerId(self.chance.choice(["t0", "r0", "r1"]))))),
            (1, lambda: self.world.do(e.CoordinatorStarted())),
            (1, self.reopen),
        ]

    def run(self) -> None:
        """The history; at its end, what the journal gives."""
        self.world.start(trainers=1, rollouts=2)
        for _ in range(NUM_STEPS):
            (step,) = self.chance.choices([s for _, s in self.steps], [weight for weight, _ in self.steps])
            with contextlib.suppress(HexcombError):  # refusals are part of a history
                step()
            self.write()
        self.reopen()
        assert self.num_written > 100, "too little happened"
        assert len(self.journal.reader.snapshots()) == journal_module.NUM_SNAPSHOTS
        assert all(line.seq > 1 for line in self.journal.reader.lines()), "nothing of truncation was tested"

    def write(self) -> None:
        facts, self.num_written = tuple(self.world.facts[self.num_written :]), len(self.world.facts)
        for fact in facts:
            apply(self.full, fact)
        bodies = tuple((x.slot, b"body") for x in facts if isinstance(x, f.RolloutAccepted))
        made = tuple((x.version, SignedManifest(b"m", b"s")) for x in facts if isinstance(x, f.VersionCommitted))
        if facts:
            self.journal.append([Entry(self.world.now_ms, facts, bodies, made)], state=self.world.core.state)

    def reopen(self) -> None:
        """Another process takes over."""
        self.write()
        self.journal.close()
        self.journal = Journal(self.path, run_id=RUN_ID)
        reader = self.journal.reader
        state = reader.recover()
        if encode_state(state) != encode_state(self.full):
            raise ValueError("a snapshot and what follows give another state than all facts")
        reader.check_replay()
        reader.check_content(state)

    def come(self) -> None:
        """All nodes are there, with the head loaded."""
        for name in ("t0", "r0", "r1"):
            self.world.see(name)
            self.world.do(e.CapabilityLearned(PeerId(name), e.Capability(1.0, 1.0, 1, "cpu")))

    def lease(self) -> None:
        name = self.chance.choice(["r0", "r1"])
        self.grants.append((name, self.world.lease(name, self.chance.randint(1, 4))))

    def slot(self) -> tuple[str, Grant, SlotKey]:
        name, grant = self.chance.choice(self.grants[-6:] or [("r0", self.world.lease())])
        return name, grant, self.chance.choice(grant.slots)

    def submit(self) -> None:
        name, grant, slot = self.slot()
        self.world.submit(grant, slot, name=name)

    def score(self) -> None:
        self.world.score(self.slot()[2], self.chance.choice([0.0, 1.0, 1.0, 0.5]))

    def give_back(self) -> None:
        name, grant, _ = self.slot()
        self.world.do(e.LeaseReturned(PeerId(name), grant.lease_id))

    def make_version(self) -> None:
        """As much of it as can be now."""
        self.world.fill_batch(name=self.chance.choice(["r0", "r1"]))
        self.attest()

    def attest(self) -> None:
        if self.world.core.state.round is not None:
            self.world.finish_round()


@pytest.fixture
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 7)
    monkeypatch.setattr(journal_module, "MIN_LOG_SHARE", 0.0)


def play(folder: Path, seed: int) -> None:
    """One history."""
    history = History(folder / f"journal{seed}.db", seed)
    try:
        history.run()
    finally:
        history.journal.close()


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_from_a_snapshot_is_replay_of_everything(seed: int, tmp_path: Path) -> None:
    play(tmp_path, seed)


@pytest.mark.usefixtures("_tight")
def test_a_snapshot_of_the_wrong_moment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a snapshot that lacks what the facts before it did."""
    held = [encode_state(State())]

    def stale(state: State) -> bytes:
        held.append(encode_state(state))
        return held[-2]

    monkeypatch.setattr(journal_module, "encode_state", stale)
    with pytest.raises((ValueError, AssertionError, KeyError, IndexError)):
        play(tmp_path, 0)
