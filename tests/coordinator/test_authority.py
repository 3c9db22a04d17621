"""The single writer: order, durability before answers, refusals, and its end."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from coordinator.authority import REQUESTS_A_TURN, Authority
from coordinator.core import events as e
from coordinator.core.effects import AnnounceVersion, AssignRole, ScoreRollout
from coordinator.core.facts import VersionCommitted
from coordinator.core.handle import Core, Decision
from coordinator.core.replies import Grant, Receipt
from coordinator.core.state import Group, Slot, State, encode_state
from coordinator.journal import Entry, Journal
from protocol.errors import InviteUnknownError, JournalError, LeaseUnknownError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from tests.coordinator.world import BASE, RUN_ID, make_body, make_rules

DEADLINE_S = 10.0


def seal(fact: VersionCommitted, previous: Digest | None, now_ms: int) -> SignedManifest:
    """A manifest that says what it was made from."""
    return SignedManifest(f"{fact.version} {fact.root} {previous}".encode(), b"signed")


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class SlowJournal(Journal):
    """Holds each COMMIT until it is let go; counts them; can fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, run_id=RUN_ID)
        self.open = threading.Event()
        self.open.set()
        self.batches: list[int] = []
        self.fails = False

    def commit(self, entries: Sequence[Entry], *, state: State) -> None:
        assert self.open.wait(DEADLINE_S)
        if self.fails:
            raise JournalError("the disk is full")
        super().commit(entries, state=state)
        self.batches.append(len(entries))


class Bench:
    """An authority that runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, Clock()
        self.start()

    def start(self) -> None:
        self.journal = SlowJournal(self.path)
        core = Core(make_rules(num_trainers=1), self.journal.reader.recover())
        self.authority = Authority(core, self.journal, clock=self.clock, sealer=seal)
        self.running = asyncio.create_task(self.authority.run())

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running], timeout=DEADLINE_S)
        self.journal.close()

    async def swarm(self) -> None:
        """A trainer and a rollout node with the base loaded."""
        submit = self.authority.submit
        await submit(e.BaseRegistered(BASE))
        await submit(e.InviteCreated(InviteId("i"), "00", 9, self.clock.now_ms + 1000, "auto"))
        for name, rate in (("t", 9.0), ("r", 1.0)):
            await submit(e.InviteRedeemed(InviteId("i"), PeerId(name)))
            await submit(e.NodeSeen(PeerId(name), presence(name)))
            await submit(e.CapabilityLearned(PeerId(name), e.Capability(rate, rate, 1, "cpu")))

    async def lease(self, num_slots: int = 4) -> Grant:
        lease_id = LeaseId(f"{len(self.authority.core.state.leases)}-{self.authority.core.state.next_index}")
        return await self.authority.submit(e.WorkRequested(PeerId("r"), Version(0), BASE.root, num_slots, lease_id))

    async def fill(self, grant: Grant, slot: SlotKey) -> Receipt:
        event = e.RolloutSubmitted(PeerId("r"), grant.lease_id, slot, Digest(str(slot)), ((Version(0), 4),))
        return await self.authority.submit(event, ((slot, str(slot).encode()),))


def presence(name: str) -> e.Presence:
    return e.Presence(Version(0), BASE.root, (Version(0),), f"{name}:2", f"{name}:1", "busy", 1.0, "test")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "journal.db")
    yield bench
    bench.journal.open.set()
    await bench.stop()


async def test_rollout_is_durable_when_it_is_acknowledged(bench: Bench) -> None:
    await bench.swarm()
    grant = await bench.lease()
    bench.journal.open.clear()
    answer = asyncio.create_task(bench.fill(grant, grant.slots[0]))
    done, _ = await asyncio.wait([answer], timeout=0.2)
    assert not done
    effects = bench.authority.effects.qsize()
    bench.journal.open.set()
    assert (await answer).outcome == "ACCEPTED"
    assert bench.authority.effects.qsize() == effects + 1
    assert await bench.authority.rollout_bodies([grant.slots[0]]) == [str(grant.slots[0]).encode()]


async def test_events_that_wait_together_share_a_commit(bench: Bench) -> None:
    await bench.swarm()
    grant = await bench.lease(4)
    bench.journal.open.clear()
    first = asyncio.create_task(bench.authority.submit(e.InviteCreated(InviteId("x"), "00", 1, 10**9, "auto")))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(bench.fill(grant, slot)) for slot in grant.slots]
    await asyncio.wait([first], timeout=0.05)
    bench.journal.open.set()
    assert [receipt.outcome for receipt in await asyncio.gather(*rest)] == ["ACCEPTED"] * 4
    assert bench.journal.batches[-2:] == [1, 4]


async def test_others_have_their_turn_in_a_long_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is heard of once in a turn of the event loop."""
    await bench.swarm()
    turns, decided_in = 0, list[int]()
    handle = bench.authority.core.handle

    def note(event: e.Event, now_ms: int) -> Decision:
        decided_in.append(turns)
        return handle(event, now_ms)

    monkeypatch.setattr(bench.authority.core, "handle", note)
    bench.journal.open.clear()  # what comes meanwhile is one batch
    first = asyncio.create_task(bench.authority.submit(e.InviteCreated(InviteId("x"), "00", 1, 10**9, "auto")))
    await asyncio.wait([first], timeout=0.05)
    seen = [asyncio.create_task(bench.authority.submit(e.NodeSeen(PeerId("r"), presence("r")))) for _ in range(100)]
    bench.journal.open.set()
    while not all(task.done() for task in seen):
        turns += 1
        await asyncio.sleep(0)
    assert len(decided_in) == 101
    assert max(Counter(decided_in[1:]).values()) <= REQUESTS_A_TURN


async def test_soft_events_make_no_transaction_and_refusals_are_counted(bench: Bench) -> None:
    await bench.swarm()
    num_commits = len(bench.journal.batches)
    await bench.authority.submit(e.NodeSeen(PeerId("r"), presence("r")))
    for _ in range(3):
        with pytest.raises(InviteUnknownError):
            await bench.authority.submit(e.InviteRedeemed(InviteId("none"), PeerId("z")))
    with pytest.raises(LeaseUnknownError):
        await bench.authority.submit(e.LeaseReturned(PeerId("r"), LeaseId("none")))
    assert len(bench.journal.batches) == num_commits
    assert bench.authority.refusals == {"INVITE_UNKNOWN": 3, "LEASE_UNKNOWN": 1}


async def test_only_accepted_bodies_are_kept(bench: Bench) -> None:
    await bench.swarm()
    grant = await bench.lease()
    assert (await bench.fill(grant, grant.slots[0])).outcome == "ACCEPTED"
    assert (await bench.fill(grant, grant.slots[0])).outcome == "DUPLICATE"
    bench.clock.now_ms = grant.deadline_ms
    with pytest.raises(LeaseUnknownError):
        await bench.fill(grant, grant.slots[1])
    with pytest.raises(JournalError):
        await bench.authority.rollout_bodies([grant.slots[1]])


async def test_manifests_form_a_chain_over_a_restart(bench: Bench) -> None:
    await bench.swarm()
    first = await bench.authority.manifest(Version(0))
    assert first == SignedManifest(f"0 {BASE.root} None".encode(), b"signed")
    await bench.stop()
    bench.start()
    await bench.authority.submit(e.CoordinatorStarted())
    await bench.authority.submit(e.NodeSeen(PeerId("t"), presence("t")))
    await bench.authority.submit(e.NodeSeen(PeerId("r"), presence("r")))
    grant = await bench.lease(4)
    for slot in grant.slots:
        await bench.fill(grant, slot)
        await bench.authority.submit(e.RolloutScored(slot, float(slot.sample)))
    round_ = bench.authority.core.state.round
    assert round_ is not None
    body = make_body(1, parent=BASE.root)
    await bench.authority.submit(e.VersionAttested(PeerId("t"), round_.round_id, body, {}))
    second = await bench.authority.manifest(Version(1))
    assert second is not None
    assert first is not None
    assert second.payload.decode() == f"1 {body.root} {first.digest}"
    assert await bench.authority.manifest(Version(2)) is None


async def test_effects_come_in_order(bench: Bench) -> None:
    await bench.swarm()
    grant = await bench.lease()
    await bench.fill(grant, grant.slots[0])
    kinds = [type(bench.authority.effects.get_nowait()) for _ in range(bench.authority.effects.qsize())]
    assert kinds == [AnnounceVersion, AssignRole, AssignRole, ScoreRollout]


async def test_a_start_asks_for_as_much_as_the_state_holds(tmp_path: Path) -> None:
    """Nobody reads the effects before the first answer."""
    core, num_groups = Core(make_rules(num_trainers=1)), 8300
    for index in range(num_groups):
        group = Group(TaskKey("sums", 7, index), Version(0), [Slot("accepted") for _ in range(8)])
        core.state.groups[index] = group
    core.state.tally["accepted"] = core.state.num_issued = 8 * num_groups
    journal = SlowJournal(tmp_path / "journal.db")
    authority = Authority(core, journal, clock=Clock(), sealer=seal)
    running = asyncio.create_task(authority.run())
    await asyncio.wait_for(authority.submit(e.CoordinatorStarted()), DEADLINE_S)
    asked = [authority.effects.get_nowait() for _ in range(authority.effects.qsize())]
    assert sum(isinstance(effect, ScoreRollout) for effect in asked) == 8 * num_groups
    running.cancel()
    await asyncio.wait([running], timeout=DEADLINE_S)
    journal.close()


async def test_failed_commit_ends_the_authority_and_answers_nobody_well(bench: Bench) -> None:
    await bench.swarm()
    before = encode_state(bench.journal.reader.recover())
    bench.journal.fails = True
    with pytest.raises(JournalError):
        await bench.lease()
    with pytest.raises(JournalError, match="disk is full"):
        await asyncio.wait_for(bench.running, DEADLINE_S)
    with pytest.raises(JournalError, match="no more events"):
        await bench.authority.submit(e.TimerFired())
    assert encode_state(bench.journal.reader.recover()) == before


async def test_stopping_answers_who_waits(bench: Bench) -> None:
    await bench.swarm()
    bench.journal.open.clear()
    waiting = [asyncio.create_task(bench.lease()) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.05)
    bench.running.cancel()
    for task in waiting:
        with pytest.raises(JournalError):
            await asyncio.wait_for(task, DEADLINE_S)


async def test_a_caller_that_gives_up_does_not_stop_the_writer(bench: Bench) -> None:
    await bench.swarm()
    bench.journal.open.clear()
    impatient = asyncio.create_task(bench.lease(1))
    await asyncio.wait([impatient], timeout=0.05)
    impatient.cancel()
    bench.journal.open.set()
    assert len((await bench.lease(1)).slots) == 1
    assert bench.authority.core.books().open == 2
