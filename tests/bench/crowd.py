"""Thousands of simulated nodes that speak to the coordinator's shell as its control service does, without sockets.

They send the wire's messages: heartbeats, wishes for work, pieces of every slot under way, rollouts. Slots are filled
under the version that their node had when it began. Most signatures of pieces are left out, since a piece's is looked
at only when its slot goes on elsewhere. `EmptyDesk` is for a rehearsal, which tells what the nodes themselves cost.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.control_service import ControlService
from coordinator.core.events import NodeSeen, Presence
from coordinator.hearsay import presence_of
from protocol.errors import JournalError, LeaseUnknownError, WorkRefusedError
from protocol.ids import Digest, LeaseId, RunId, Version
from protocol.keys import Identity
from protocol.rollout import Piece, pack_ids, pack_logprobs, sign_piece
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import piece_message, slot_key

LEASES_A_NODE = 5
HEARTBEAT_S, PIECE_S, TURN_S = 10.0, 8.0, 0.05
PIECE_TOKENS = 32
MIN_PIECES, MAX_PIECES = 11, 22
GIVEN_BACK, FORGOTTEN = 0.04, 0.01
"""Of the slots: nodes give so many back, and forget so many, whose leases run out."""

NUM_BEFORE_LEFT = 3
STOP_ID = 1
IDS = tuple(2 + position % 50 for position in range(PIECE_TOKENS))
LOGPROBS = (-0.5,) * PIECE_TOKENS
PACKED_IDS, PACKED_LOGPROBS, PACKED_STOP = pack_ids(IDS), pack_logprobs(LOGPROBS), pack_ids((STOP_ID,))
NO_SIGNATURE = bytes(64)


@dataclass(slots=True)
class Running:
    """A slot that a node fills under one version; `prefix` is what came with it."""

    lease_id: str
    slot: common_pb2.Slot
    version: int
    fate: str
    num_left: int
    start: int
    prefix: list[common_pb2.Piece]
    num_sent: int = 0
    message: control_pb2.SlotProgress | None = None


@dataclass(slots=True)
class Node:
    """A simulated node."""

    identity: Identity
    presence: Presence
    running: list[Running] = field(default_factory=list)
    num_begun: int = 0
    is_busy: bool = False


@dataclass(slots=True)
class Tally:
    """What the crowd did; `num_late` turns of nodes were left out, since the turn before was not over."""

    num_beats: int = 0
    num_leases: int = 0
    num_pieces: int = 0
    num_accepted: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    num_idle: int = 0
    num_late: int = 0


class Desk(Protocol):
    """Where nodes are served."""

    async def beat(self, node: Node, message: control_pb2.Heartbeat) -> None: ...
    async def lease(self, node: Node, message: control_pb2.LeaseWorkRequest) -> control_pb2.LeaseWorkResponse: ...
    def receive(self, node: Node, message: control_pb2.SubmitPiecesRequest) -> Sequence[common_pb2.Slot]: ...
    async def take(self, node: Node, message: control_pb2.SubmitRolloutsRequest) -> str: ...
    async def take_back(self, node: Node, message: control_pb2.ReturnLeaseRequest) -> None: ...


class RealDesk:
    """The coordinator's own services, behind the sockets."""

    def __init__(self, service: ControlService) -> None:
        self._office, self._work, self._submissions = service._office, service._work, service._submissions

    async def beat(self, node: Node, message: control_pb2.Heartbeat) -> None:
        node.presence = presence_of(message, node.presence)
        await self._office.authority.submit(NodeSeen(node.identity.peer_id, node.presence))

    async def lease(self, node: Node, message: control_pb2.LeaseWorkRequest) -> control_pb2.LeaseWorkResponse:
        return await self._work.lease(node.identity.peer_id, message)

    def receive(self, node: Node, message: control_pb2.SubmitPiecesRequest) -> Sequence[common_pb2.Slot]:
        return self._work.receive(node.identity.peer_id, message).unwanted

    async def take(self, node: Node, message: control_pb2.SubmitRolloutsRequest) -> str:
        response = await self._submissions.take(node.identity.peer_id, message)
        await self._work.settle(node.identity.peer_id, LeaseId(message.lease_id))
        return response.receipts[0].outcome

    async def take_back(self, node: Node, message: control_pb2.ReturnLeaseRequest) -> None:
        with contextlib.suppress(LeaseUnknownError):  # it ran out meanwhile
            await self._work.take_back(node.identity.peer_id, message)


class EmptyDesk:
    """Nobody: what a rehearsal costs is the nodes' own work."""

    def __init__(self) -> None:
        self._num_leases = 0

    async def beat(self, node: Node, message: control_pb2.Heartbeat) -> None:
        pass

    async def lease(self, node: Node, message: control_pb2.LeaseWorkRequest) -> control_pb2.LeaseWorkResponse:
        self._num_leases += 1
        task = common_pb2.Task(environment="flat", seed=7, index=self._num_leases)
        work = control_pb2.SlotWork(slot=common_pb2.Slot(version=0, task=task), prompt_digest="0" * 64)
        return control_pb2.LeaseWorkResponse(lease_id=f"{self._num_leases:016x}", slots=[work], remaining_s=60.0)

    def receive(self, node: Node, message: control_pb2.SubmitPiecesRequest) -> Sequence[common_pb2.Slot]:
        return ()

    async def take(self, node: Node, message: control_pb2.SubmitRolloutsRequest) -> str:
        return "ACCEPTED"

    async def take_back(self, node: Node, message: control_pb2.ReturnLeaseRequest) -> None:
        pass


class Crowd:
    """The nodes, and the clock that wakes them. `head` is the version that all have loaded."""

    def __init__(self, nodes: list[Node], desk: Desk, run_id: RunId) -> None:
        self._nodes, self._desk, self._run_id = nodes, desk, run_id
        self._chance = random.Random(7)
        self._errands: set[asyncio.Task[None]] = set()
        self.head: tuple[Version, Digest] = (Version(0), Digest(""))
        self.tally = Tally()

    async def run(self) -> None:
        """Each turn wakes the nodes whose time has come; until cancelled."""
        began_s, turn = time.monotonic(), 0
        beats, pieces = self._rota(HEARTBEAT_S), self._rota(PIECE_S)
        while True:
            for node in beats[turn % len(beats)]:
                self._send(self._beat(node))
            for node in pieces[turn % len(pieces)]:
                self._work(node)
                await asyncio.sleep(0)  # each is a call of its own
            turn += 1
            await asyncio.sleep(max(0.0, began_s + turn * TURN_S - time.monotonic()))

    def _rota(self, every_s: float) -> list[list[Node]]:
        num_turns = round(every_s / TURN_S)
        return [self._nodes[first::num_turns] for first in range(num_turns)]

    def _send(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._note_done)

    def _note_done(self, task: "asyncio.Task[None]") -> None:
        self._errands.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), JournalError):  # it is stopping
            task.result()

    async def _beat(self, node: Node) -> None:
        version, root = self.head
        await self._desk.beat(
            node, control_pb2.Heartbeat(version=version, root=root, versions_held=[version], activity="generating")
        )
        self.tally.num_beats += 1

    def _work(self, node: Node) -> None:
        """One piece of each slot; slots that are done go in, and others take their places."""
        if node.is_busy:
            self.tally.num_late += 1
            return
        self._stream(node)
        if len(node.running) < LEASES_A_NODE or any(running.num_left <= 0 for running in node.running):
            node.is_busy = True
            self._send(self._turn_over(node))

    async def _turn_over(self, node: Node) -> None:
        for running in [running for running in node.running if running.num_left <= 0]:
            node.running.remove(running)
            await self._end(node, running)
        while len(node.running) < LEASES_A_NODE and await self._lease(node):
            if node.num_begun <= LEASES_A_NODE:
                break  # at first one a turn
        node.is_busy = False

    def _stream(self, node: Node) -> None:
        sending = [self._next_piece(node, running) for running in node.running]
        if not sending:
            return
        unwanted = self._desk.receive(node, control_pb2.SubmitPiecesRequest(progress=sending))
        self.tally.num_pieces += len(sending)
        for slot in unwanted:
            node.running = [running for running in node.running if running.slot != slot]

    def _next_piece(self, node: Node, running: Running) -> control_pb2.SlotProgress:
        """What a node signs is checked when it goes on elsewhere: only pieces that will are signed here. The others of
        a slot are one message that is sent again and again, since the desk keeps what it says and not the message."""
        if running.message is None:
            piece = common_pb2.Piece(
                node=node.identity.peer_id,
                version=running.version,
                token_ids=PACKED_IDS,
                logprobs=PACKED_LOGPROBS,
                signature=NO_SIGNATURE,
            )
            running.message = control_pb2.SlotProgress(lease_id=running.lease_id, slot=running.slot, pieces=[piece])
        (sent,) = running.message.pieces
        sent.start = running.start
        if running.fate != "filled":
            plain = Piece(node.identity.peer_id, Version(running.version), running.start, IDS, LOGPROBS)
            key = slot_key(running.slot)
            sent.signature = sign_piece(node.identity, run_id=self._run_id, slot=key, piece=plain).signature
        running.start += PIECE_TOKENS
        running.num_sent += 1
        running.num_left -= 1
        return running.message

    async def _end(self, node: Node, running: Running) -> None:
        if running.fate == "given back":
            await self._desk.take_back(node, control_pb2.ReturnLeaseRequest(lease_id=running.lease_id, reason="test"))
        if running.fate != "filled":
            return
        count, key = running.num_sent, slot_key(running.slot)
        data = ((PACKED_IDS * count)[:-4] + PACKED_STOP, PACKED_LOGPROBS * count)
        start = running.start - PIECE_TOKENS * count
        piece = Piece.of_data(node.identity.peer_id, Version(running.version), start, data, b"")
        own = piece_message(sign_piece(node.identity, run_id=self._run_id, slot=key, piece=piece))
        rollout = control_pb2.Rollout(slot=running.slot, pieces=[*running.prefix, own], finish_reason="stop")
        request = control_pb2.SubmitRolloutsRequest(lease_id=running.lease_id, rollouts=[rollout])
        outcome = await self._desk.take(node, request)
        self.tally.num_accepted += outcome == "ACCEPTED"
        if outcome not in ("ACCEPTED", "VERSION_TOO_OLD"):
            self.tally.bad[outcome] += 1

    async def _lease(self, node: Node) -> bool:
        version, root = self.head
        try:
            lease = await self._desk.lease(node, control_pb2.LeaseWorkRequest(version=version, root=root, num_slots=1))
        except WorkRefusedError:
            self.tally.num_idle += 1
            return False
        self.tally.num_leases += 1
        for work in lease.slots:
            start = sum(len(piece.token_ids) // 4 for piece in work.pieces)
            node.num_begun += 1
            running = self._begin(lease.lease_id, work, version=version, start=start)
            if node.num_begun <= LEASES_A_NODE and running.fate == "filled":  # so that not all end at once
                running.num_left = self._chance.randint(1, MAX_PIECES)
            node.running.append(running)
        return True

    def _begin(self, lease_id: str, work: control_pb2.SlotWork, *, version: int, start: int) -> Running:
        """Slots that another node left before are filled now."""
        draw, num_pieces = self._chance.random(), self._chance.randint(MIN_PIECES, MAX_PIECES)
        num_left = max(1, num_pieces - start // PIECE_TOKENS)
        fate = "filled"
        if start == 0 and draw < FORGOTTEN + GIVEN_BACK:
            fate, num_left = "forgotten" if draw < FORGOTTEN else "given back", NUM_BEFORE_LEFT
        return Running(lease_id, work.slot, version, fate, num_left, start, list(work.pieces))
