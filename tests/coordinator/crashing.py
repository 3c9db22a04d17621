"""Clients of `journal_writer` who remember every answer, see it die, and compare what it said with what is on disk.

Their own account is drawn from answers and from the facts that they read while the process lives; a fact that was
once read may never change, so the state that opening gives must be that of all facts since the first, byte for byte.
"""

import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core.apply import apply
from coordinator.core.books import check
from coordinator.core.state import State, encode_state
from coordinator.failpoints import VARIABLE
from coordinator.journal_reader import JournalReader
from protocol.errors import JournalError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, Version
from tests.coordinator.journal_writer import Answer, Command
from tests.coordinator.world import BASE, make_body
from tests.house.tree import ROOT

TRAINER, ROLLOUTS = PeerId("t"), (PeerId("r0"), PeerId("r1"))
NODES = (TRAINER, *ROLLOUTS)
DEADLINE_S = 60.0


def start(path: Path, *, failpoints: str = "", bug: str = "", limit_bytes: int = 0) -> "subprocess.Popen[bytes]":
    """A process that imports what it needs and waits for `go`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.coordinator.journal_writer", str(path), bug, str(limit_bytes)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **({VARIABLE: failpoints} if failpoints else {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@dataclass
class Account:
    """What the facts say, entered once each. `state` is that of all facts since the first."""

    state: State = field(default_factory=State)
    seq: int = 0
    accepted: dict[SlotKey, Digest] = field(default_factory=dict)
    leases: set[LeaseId] = field(default_factory=set)
    sealed: dict[RoundId, set[SlotKey]] = field(default_factory=dict)
    trained: set[SlotKey] = field(default_factory=set)
    turns: set[tuple[SlotKey, Digest]] = field(default_factory=set)
    num_versions: int = 0

    def enter(self, reader: JournalReader) -> None:
        """What is new on disk."""
        for line in reader.lines(after=self.seq):
            assert line.seq == self.seq + 1, "a fact is missing"
            self.seq = line.seq
            apply(self.state, line.fact)
            match line.fact:
                case f.LeaseGranted() as fact:
                    self.leases.add(fact.lease_id)
                case f.RolloutAccepted() as fact:
                    assert fact.slot not in self.accepted, "two rollouts were accepted for one slot"
                    self.accepted[fact.slot] = fact.digest
                case f.TurnTaken() as fact:
                    self.turns.add((fact.slot, fact.answered))
                case f.RoundSealed() as fact:
                    self.sealed[fact.round_id] = {slot for _, part in fact.shares for slot in part}
                case f.VersionCommitted() as fact:
                    self.commit(fact)
                case _:
                    pass

    def commit(self, fact: f.VersionCommitted) -> None:
        """Versions follow each other, and train on nothing twice."""
        assert fact.version == self.num_versions, "a version is skipped or exists twice"
        self.num_versions += 1
        if fact.round_id is not None:
            slots = self.sealed[fact.round_id]
            assert not slots & self.trained, "a rollout is trained twice"
            assert slots <= set(self.accepted)
            self.trained |= slots


class Clients:
    """A trainer and two rollout nodes at one journal, whatever number of processes serves it."""

    def __init__(self, path: Path, *, seed: int, bug: str = "") -> None:
        self.path, self.bug, self.chance = path, bug, random.Random(seed)
        self.account = Account()
        self.reader: JournalReader | None = None
        self.now_ms, self.num_commands, self.num_deaths = 1_000_000, 0, 0
        self.asked: dict[int, e.Event] = {}
        self.granted: set[LeaseId] = set()
        self.acknowledged: dict[SlotKey, Digest] = {}
        self.tried: dict[SlotKey, e.RolloutSubmitted] = {}
        self.turns: set[tuple[SlotKey, Digest]] = set()
        self.next: subprocess.Popen[bytes] | None = None

    def live(self, failpoints: str = "", *, limit_bytes: int = 0, then: str = "", num_turns: int = 80) -> int:
        """One life of the process: it is worked with until it dies, or for so many turns; then everything is checked.
        The process of the next life, which will have the failpoints `then`, is started meanwhile. The exit status, 0
        if it had to be killed, in the middle of its work."""
        process = self.next or start(self.path, failpoints=failpoints, bug=self.bug, limit_bytes=limit_bytes)
        self.next = start(self.path, failpoints=then, bug=self.bug) if then else None
        assert process.stdin is not None
        try:
            process.stdin.write(b"go\n")
            is_alive = self.exchange(process, self.greeting())
            for _ in range(num_turns):
                if not is_alive:
                    break
                is_alive = self.exchange(process, self.turn())
            if is_alive:
                self.exchange(process, self.turn(), is_last=True)
            status = process.wait(DEADLINE_S)
            return 0 if is_alive else status
        finally:
            process.kill()
            self.error = process.communicate(timeout=DEADLINE_S)[1].decode()
            self.num_deaths += 1
            self.check()

    def close(self) -> None:
        """Ends what waits for its turn."""
        if self.next is not None:
            self.next.kill()
            self.next.communicate(timeout=DEADLINE_S)
        if self.reader is not None:
            self.reader.close()

    def exchange(self, process: "subprocess.Popen[bytes]", batch: list[e.Event], *, is_last: bool = False) -> bool:
        """Sends some events at once and hears the answers; whether the process still lives. After the last ones it is
        killed at the first answer."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.now_ms += 20
        waiting = set()
        try:
            for event in batch:
                self.num_commands += 1
                body = str(event.slot) if isinstance(event, e.RolloutSubmitted) else ""
                raw = msgspec.Raw(msgspec.json.encode(event))
                command = Command(self.num_commands, self.now_ms, type(event).__name__, raw, body)
                waiting.add(self.num_commands)
                self.asked[self.num_commands] = event
                process.stdin.write(msgspec.json.encode(command) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before it died is still to be heard
        while waiting:
            line = process.stdout.readline()
            if not line.endswith(b"\n"):
                return False
            if is_last:
                process.kill()
            answer = msgspec.json.decode(line, type=Answer)
            waiting.remove(answer.number)
            self.hear(self.asked.pop(answer.number), answer)
        self.read()
        return True

    def hear(self, event: e.Event, answer: Answer) -> None:
        """Notes what was acknowledged; a repetition must be known as one."""
        if answer.grant is not None:
            self.granted.add(answer.grant.lease_id)
        if not isinstance(event, e.RolloutSubmitted) or answer.outcome == JournalError.code:
            return  # a coordinator that is going down has no answer
        if event.reply is not None:
            if answer.outcome in ("TURN_TAKEN", "DUPLICATE"):
                self.turns.add((event.slot, event.edges[-1]))
            return
        if event.slot in self.acknowledged and self.is_remembered(event.slot):
            assert answer.outcome == "DUPLICATE", f"an acknowledged rollout came again, and was {answer.outcome}"
        if answer.outcome in ("ACCEPTED", "DUPLICATE"):
            self.acknowledged[event.slot] = event.digest

    def is_remembered(self, slot: SlotKey) -> bool:
        """Whether the slot's group is not long past."""
        return slot.task.index in self.account.state.groups or slot.task.index in self.account.state.retired

    def read(self) -> None:
        """Enters the new facts."""
        if self.reader is None:
            self.reader = JournalReader(self.path)
        self.account.enter(self.reader)

    def greeting(self) -> list[e.Event]:
        """What the first moments of a life bring: everybody comes back, and tries again what it has no answer to."""
        batch: list[e.Event] = [e.CoordinatorStarted(), e.BaseRegistered(BASE)]
        if TRAINER not in self.account.state.nodes:
            batch.append(e.InviteCreated(InviteId("trainer"), "00", 1, 1 << 50, "trainer"))
            batch.append(e.InviteCreated(InviteId("rollout"), "00", 2, 1 << 50, "rollout"))
            batch += [e.InviteRedeemed(InviteId("trainer" if n == TRAINER else "rollout"), n) for n in NODES]
        known = e.Capability(100.0, 100.0, 1, "cpu")
        batch += [self.heartbeat(node) for node in NODES]
        batch += [e.CapabilityLearned(node, known) for node in NODES]
        return [*batch, *list(self.tried.values())[-6:]]

    def heartbeat(self, node: PeerId) -> e.NodeSeen:
        """A sign of life with the head loaded."""
        head = self.account.state.head
        version, root = (head.version, head.root) if head else (Version(0), BASE.root)
        endpoint = "t:1" if node == TRAINER else ""
        presence = e.Presence(version, root, (version,), f"{node}:2", endpoint, "busy", 1.0, "test")
        return e.NodeSeen(node, presence)

    def turn(self) -> list[e.Event]:
        """What the nodes do next, in some order; some of it twice."""
        state = self.account.state
        work: list[e.Event] = []
        for lease_id, lease in state.leases.items():
            for index, sample in lease.slots[:3]:
                group = state.groups[index]
                slot = group.key(sample)
                newest = state.head.version if state.head else group.version
                event = self.rollout(lease.peer_id, lease_id, slot, newest)
                self.tried[slot] = event
                work += [event] * self.chance.choice([1, 1, 2])
        for group in state.groups.values():
            for sample, member in enumerate(group.slots):
                if member.status == "accepted":
                    work.append(e.RolloutScored(group.key(sample), float(sample)))
        if state.head is not None:
            for node in ROLLOUTS:
                lease_id = LeaseId(f"{node}-{self.num_commands}")
                work.append(e.WorkRequested(node, state.head.version, state.head.root, 2, lease_id))
        self.chance.shuffle(work)
        ends: list[e.Event] = []
        if state.round is not None and state.head is not None:
            body = make_body(state.head.version + 1, parent=state.head.root)
            ends = [e.VersionAttested(peer, state.round.round_id, body, {}) for peer in state.round.peer_ids]
        return [*(self.heartbeat(node) for node in NODES), *work[:6], *ends, e.TimerFired()]

    def rollout(self, peer_id: PeerId, lease_id: LeaseId, slot: SlotKey, newest: Version) -> e.RolloutSubmitted:
        """What a node hands in: every other slot is a conversation of two turns."""
        held, own = self.account.state.find(slot), ((newest, 4),)
        assert held is not None
        digest, edge = Digest(f"{slot} by {lease_id}"), Digest(f"{slot} at {newest}")
        if held.prefix is not None:
            segments, edges = (*held.prefix.segments, *own), (held.prefix.edge, Digest(f"{edge}, second turn"))
            return e.RolloutSubmitted(peer_id, lease_id, slot, digest, segments, edges, held.prefix.given)
        reply = e.EnvironmentReplied(2, Digest(f"{edge}, and a reply")) if slot.sample % 2 else None
        return e.RolloutSubmitted(peer_id, lease_id, slot, digest, own, (edge,), (), reply)

    def check(self) -> None:
        """What was acknowledged is on disk, and what is on disk holds together."""
        self.read()
        assert self.reader is not None
        recovered = self.reader.recover()
        assert encode_state(recovered) == encode_state(self.account.state), "opening gives another state than all facts"
        check(recovered)
        self.reader.check_replay()
        self.reader.check_content(recovered)
        assert self.granted <= self.account.leases, "an acknowledged lease is lost"
        for slot, digest in self.acknowledged.items():
            assert self.account.accepted.get(slot) == digest, "an acknowledged rollout is lost, or another one"
        assert self.turns <= self.account.turns, "an acknowledged turn is lost"
        newest = self.reader.newest_manifest()
        head = self.account.state.head
        said = int(newest.payload.split()[0]) if newest is not None else None
        assert said == (head.version if head is not None else None), "the newest manifest is not the head's"
