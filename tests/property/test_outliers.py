"""Slots that outgrow their tasks, in random histories: what moves, where to, and what it keeps.

A few nodes work at paces of their own, hand in pieces each second, and ask when they have room. `History` holds what it
knows of them against each move, and is shown cores in which one guard is missing.
"""

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from coordinator.core import apply, outliers, returns
from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core.state import Prefix
from protocol.errors import HexcombError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.run import EnvironmentSpec
from tests.coordinator.world import World, make_rules

SEEDS = range(12)
NUM_SECONDS = 150
PLACES = 8
NUM_BEFORE = 4
"""Tokens of every completion in the epochs before."""


@dataclass
class Job:
    """A slot on a node: how long it will be, and how far it is."""

    lease_id: LeaseId
    slot: SlotKey
    length: int
    num_tokens: int = 0


@dataclass
class History:
    """One history. `paces` are the nodes' own, in tokens per second of each slot; where they change in its middle only
    what does not depend on them is held against the core. In poor ones little credit was earned and much is long."""

    seed: int
    changes: bool = False
    has_pieces: bool = True
    is_rich: bool = True
    jobs: dict[str, list[Job]] = field(default_factory=dict)
    held: dict[SlotKey, tuple[str, int]] = field(default_factory=dict)
    moved: set[SlotKey] = field(default_factory=set)
    num_moves: int = 0

    def run(self) -> int:
        """The number of slots that moved. Raises `AssertionError` where one should not have, or lost tokens."""
        self.chance = random.Random(self.seed)
        spec = EnvironmentSpec("sums", num_tasks=6)
        sizes = {"groups_per_batch": 3, "group_size": 3, "max_lag": 0, "lease_s": 1000.0}
        self.world = world = World(make_rules(environment=spec, **sizes))
        world.is_checked = False
        world.start(rollouts=4)
        self.names = [f"r{i}" for i in range(4)]
        self.jobs = {name: [] for name in self.names}
        while world.core.state.move_credit < (300 if self.is_rich else 30):
            world.make_version()
        self.num_read, self.num_filled = len(world.facts), world.core.books().granted
        self.paces = dict(zip(self.names, self.chance.sample([1, 1, 2, 4, 9], 4), strict=True))
        for second in range(NUM_SECONDS):
            if self.changes and second % 10 == 0:
                self.paces = {name: self.chance.choice([1, 2, 4, 9]) for name in self.names}
            self.second()
        world.is_checked = True
        world.crash()
        return self.num_moves

    def second(self) -> None:
        """Everybody works, and says so."""
        world = self.world
        world.tick(1.0)
        world.see_all()
        for name in self.chance.sample(self.names, len(self.names)):
            self.work(name)
            self.ask(name)
        if self.chance.random() < 0.05:
            self.fail(self.chance.choice(self.names))
        if world.core.state.round is not None:
            world.finish_round()
            world.see_all()

    def work(self, name: str) -> None:
        """All slots of a node come on; those that are done are handed in, and those whose time is over are gone."""
        over = [job for job in self.jobs[name] if job.lease_id not in self.world.core.state.leases]
        self.moved -= {job.slot for job in over}
        self.jobs[name] = [job for job in self.jobs[name] if job not in over]
        head, said = Version(self.world.core.state.versions[-1].version), list[e.SlotProgress]()
        for job in list(self.jobs[name]):
            job.num_tokens = min(job.length, job.num_tokens + self.paces[name])
            edge = Digest(f"{job.slot} {job.num_tokens}")
            if job.num_tokens < job.length:
                said.append(e.SlotProgress(PeerId(name), job.lease_id, job.slot, ((head, job.num_tokens),), edge))
                continue
            self.jobs[name].remove(job)
            known = self.world.core.state.find(job.slot)
            edges = (known.prefix.edge,) if known and known.prefix else ()
            word = Digest(f"{job.slot} by {name}")
            segments = ((head, job.length),)
            self.tell(e.RolloutSubmitted(PeerId(name), job.lease_id, job.slot, word, segments, edges))
            self.num_filled += 1
            self.tell(e.RolloutScored(job.slot, self.chance.random()))
        if said and self.has_pieces:
            self.held |= {one.slot: (name, one.segments[0][1]) for one in said}
            self.tell(e.PiecesReceived(tuple(said)))

    def ask(self, name: str) -> None:
        """For what there is room for."""
        state = self.world.core.state
        num_free = PLACES - len(self.jobs[name])
        if num_free and state.head is not None:
            with contextlib.suppress(HexcombError):
                grant = self.world.lease(name, num_free)
                for slot in grant.slots:
                    known = state.find(slot)
                    begun = known.prefix.num_tokens if known and known.prefix else 0
                    is_long = random.Random(f"{self.seed} {slot}").random() < (0.2 if self.is_rich else 0.6)
                    length = max(begun + 1, 40 if is_long else NUM_BEFORE)
                    self.jobs[name].append(Job(grant.lease_id, slot, length, begun))
            self.read()

    def fail(self, name: str) -> None:
        """A node loses all it works on."""
        for lease_id in {job.lease_id for job in self.jobs[name]}:
            with contextlib.suppress(HexcombError):
                self.world.do(e.LeaseReturned(PeerId(name), lease_id, "out of memory", is_fault=True))
        self.moved -= {job.slot for job in self.jobs[name]}
        self.jobs[name].clear()
        self.read()

    def tell(self, event: e.Event) -> None:
        """Honest nodes are never refused."""
        self.world.do(event)
        self.read()

    def read(self) -> None:
        """Looks at what became of it."""
        new, self.num_read = self.world.facts[self.num_read :], len(self.world.facts)
        moving = dict[SlotKey, str]()
        for fact in new:
            if isinstance(fact, f.SlotGivenBack):
                assert fact.reason == "outgrown"
                moving[fact.slot] = self.check_begin(fact.slot)
            if isinstance(fact, f.LeaseGranted):
                for slot in set(moving) & set(fact.slots):
                    self.check_end(slot, moving.pop(slot), fact.peer_id)
        assert not moving, "a slot was taken from its node and given to nobody"

    def check_begin(self, slot: SlotKey) -> str:
        """A slot is taken from a node; the node's name."""
        assert slot not in self.moved, "a slot moved twice"
        state, (holder, num_tokens) = self.world.core.state, self.held[slot]
        known = state.find(slot)
        assert known is not None
        assert known.prefix == Prefix(((Version(slot.version), num_tokens),), Digest(f"{slot} {num_tokens}")), (
            "tokens lost"
        )
        left = [one for one in state.groups[slot.task.index].slots if one.status in ("waiting", "leased")]
        assert len(left) <= 1, "a slot moved that is not the last of its group"
        assert num_tokens > NUM_BEFORE * outliers.MIN_BETA, "a slot moved that has outgrown nothing"
        self.moved.add(slot)
        self.num_moves += 1
        assert self.num_moves <= self.num_filled / 20, "too many slots moved"
        self.jobs[holder] = [job for job in self.jobs[holder] if job.slot != slot]
        return holder

    def check_end(self, slot: SlotKey, holder: str, peer_id: PeerId) -> None:
        """Another node takes it."""
        assert peer_id != holder, "a slot moved to where it was"
        if not self.changes:
            assert self.paces[peer_id] > self.paces[holder], "a slot moved to a node that is no better"
        assert len(self.jobs[peer_id]) < PLACES / 2, "a slot moved to a node that is full"


def num_moved(seeds: Iterable[int], **how: bool) -> int:
    """Slots, in so many histories."""
    return sum(History(seed, **how).run() for seed in seeds)


def test_what_moves_may_move() -> None:
    assert num_moved(SEEDS) >= 20, "too little moved to say anything"


def test_no_more_moves_than_was_earned() -> None:
    assert num_moved(SEEDS, is_rich=False) >= 6


def test_nothing_moves_twice_while_paces_change() -> None:
    assert num_moved(SEEDS, changes=True) >= 20


def test_nothing_moves_without_pieces() -> None:
    assert num_moved(SEEDS, has_pieces=False) == 0


def free_moves(patch: pytest.MonkeyPatch) -> None:
    """A move costs nothing."""
    patch.setattr(apply, "MOVE_COST", 0)
    patch.setattr(outliers, "MOVE_COST", 0)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "moved twice": lambda patch: patch.setattr(outliers, "_has_moved", lambda *_: False),
    "no better": lambda patch: patch.setattr(outliers, "_is_better", lambda *_: True),
    "not the last": lambda patch: patch.setattr(outliers, "_is_last", lambda *_: True),
    "outgrown nothing": lambda patch: patch.setattr(outliers, "_has_outgrown", lambda *_: True),
    "tokens lost": lambda patch: patch.setattr(returns, "_keep_prefix", lambda *_: None),
    "too many": free_moves,
}


@pytest.mark.parametrize("what", list(BUGS))
def test_a_core_without_a_guard_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    BUGS[what](monkeypatch)
    with pytest.raises(AssertionError, match=what):
        num_moved(range(40), changes=what == "moved twice", is_rich=what != "too many")
