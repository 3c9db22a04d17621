"""The pieces of all slots under way, in memory and in a file, until their slots are filled or end. Impure: files.

Received is not accepted: nothing here is synced to disk, and what the core learns of it (`PiecesReceived`) is soft.
Invariants: only the node that holds a slot under an open lease adds to it, at most `max_new_tokens` tokens, so that
memory is bounded by what is under lease and the file by a multiple of that; a slot that moves keeps exactly the prefix
that the core says; what the core was told of is in the file.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from coordinator.authority import Authority
from coordinator.core.events import PiecesReceived, SlotProgress
from coordinator.core.state import Prefix, State
from coordinator.piece_file import PieceFile
from coordinator.received import Received, edge_digest, prefix_in
from protocol.errors import RolloutMalformedError
from protocol.ids import LeaseId, PeerId, SlotKey, Version
from protocol.rollout import Piece
from protocol.run import RunSpec
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import piece_message, slot_key

TICK_S = 0.5
MAX_TOLD = 2048
"""Slots in one event, so that the core is not busy with one for long."""

SWEEP_TICKS = 16
"""In so many ticks each slot is looked at once."""

MIN_FILE_BYTES = 16 << 20
"""A smaller file is never rewritten; a larger one when less than half of it is of slots under way."""

MAX_WAITING_BYTES = 64 << 20
"""For the file; beyond it nothing waits, and the whole file is written anew from memory."""

RETRY_TICKS = 20

Place = tuple[int, int]
"""A slot by its group's index and its sample."""

log = structlog.get_logger()


@dataclass(slots=True)
class Answer:
    """What a node is told of its slots: those that it does not hold, and those with a hole, with the position from
    which it must hand in again. `lease_ids` are those that it named."""

    unwanted: list[common_pb2.Slot] = field(default_factory=list)
    gaps: list[tuple[common_pb2.Slot, int]] = field(default_factory=list)
    lease_ids: set[LeaseId] = field(default_factory=set)


class PieceStore:
    """All slots under way. `run` writes, tells the core and forgets; `close` comes after it."""

    def __init__(self, path: Path, authority: Authority, spec: RunSpec) -> None:
        self._authority, self._spec = authority, spec
        self._file = PieceFile(path)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pieces")
        self._slots: dict[Place, Received] = {}
        self._news: deque[Received] = deque()
        self._unswept: deque[Place] = deque()
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0
        self._must_rewrite, self._rest_ticks = False, 0
        self.num_bytes = 0
        self._read_back()

    @property
    def num_slots(self) -> int:
        """Of which something was received or may come."""
        return len(self._slots)

    @property
    def num_file_bytes(self) -> int:
        """On disk."""
        return self._file.num_bytes

    def frames(self, slot: SlotKey) -> tuple[bytes, ...]:
        """What is kept of a slot: serialized `SlotProgress` messages, in order."""
        received = self._slots.get((slot.task.index, slot.sample))
        return tuple(received.frames) if received is not None and received.key == slot else ()

    def receive(self, peer_id: PeerId, progress: Iterable[control_pb2.SlotProgress]) -> Answer:
        """Keeps new pieces of slots that the caller holds. Bad ones are counted as refusals and dropped, and do not
        touch their neighbours."""
        answer, state = Answer(), self._authority.core.state
        head = state.head.version if state.head else Version(-1)
        for message in progress:
            lease_id, slot = LeaseId(message.lease_id), message.slot
            answer.lease_ids.add(lease_id)
            received = self._held(state, peer_id, lease_id, slot)
            if received is None:
                answer.unwanted.append(slot)
                continue
            num_bytes = received.num_bytes
            try:
                has_hole = received.take(message, peer_id, spec=self._spec, head=head)
            except RolloutMalformedError as refusal:
                self._authority.refusals[refusal.code] += 1
                continue
            if has_hole:
                answer.gaps.append((slot, received.num_tokens))
            if received.num_bytes > num_bytes:
                self._note(received, received.frames[-1])
        return answer

    def keep(self, slot: SlotKey, lease_id: LeaseId, pieces: Iterable[Piece]) -> None:
        """All of a slot, in the place of what was received of it under its lease."""
        place = (slot.task.index, slot.sample)
        self._forget(place)
        received = self._slots[place] = Received.of(slot, lease_id)
        self._note(received, received.adopt(map(piece_message, pieces)))

    async def flush(self) -> None:
        """Brings the file up to date at once."""
        await self._write()

    async def run(self) -> None:
        """Until cancelled; what waits for the file is written then."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            await self._write()

    async def tick(self) -> None:
        """One turn of `run`: what came on is written, then told."""
        events = await self._draw_up()
        await self._write()
        for event in events:
            await self._authority.submit(event)
        self._sweep()

    def close(self) -> None:
        """Ends the use of the file."""
        self._writer.shutdown()
        self._file.close()

    def _held(self, state: State, peer_id: PeerId, lease_id: LeaseId, slot: common_pb2.Slot) -> Received | None:
        """What is kept of the slot, if the caller holds it under that lease."""
        task, sample = slot.task, slot.sample
        lease, group = state.leases.get(lease_id), state.groups.get(task.index)
        if lease is None or group is None or lease.peer_id != peer_id or not 0 <= sample < len(group.slots):
            return None
        held, key = group.slots[sample], group.task
        if held.lease_id != lease_id or held.status != "leased" or group.version != slot.version:
            return None
        if key.environment != task.environment or key.seed != task.seed:
            return None
        received = self._slots.get((key.index, sample))
        if received is not None and received.lease_id == lease_id:
            return received
        return self._begin(group.key(sample), lease_id, held.prefix)

    def _begin(self, slot: SlotKey, lease_id: LeaseId, prefix: Prefix | None) -> Received:
        """A slot under a new lease, with what the core says that it goes on from."""
        place = (slot.task.index, slot.sample)
        before = self._forget(place)
        pieces = prefix_in(before.frames, slot, prefix) if before is not None and prefix is not None else []
        received = Received.of(slot, lease_id, headless=prefix is not None and not pieces)
        self._slots[place] = received
        if pieces:
            self._note(received, received.adopt(pieces))
        return received

    def _note(self, received: Received, frame: bytes) -> None:
        """A slot came on by a frame: the file and the core are to have it."""
        self.num_bytes += len(frame)
        self._num_waiting_bytes += len(frame)
        self._waiting.append(frame)
        if not received.is_news:
            received.is_news = True
            self._news.append(received)
        if self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._drop_waiting()
            self._must_rewrite = True

    def _forget(self, place: Place) -> Received | None:
        received = self._slots.pop(place, None)
        if received is not None:
            self.num_bytes -= received.num_bytes
        return received

    def _drop_waiting(self) -> list[bytes]:
        waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        return waiting

    async def _write(self) -> None:
        """Brings the file up to date. A disk that cannot be written costs no more than what it would have kept."""
        if self._rest_ticks > 0:
            self._rest_ticks -= 1
            return
        is_bloated = self._file.num_bytes > max(MIN_FILE_BYTES, 2 * self.num_bytes)
        waiting, loop = self._drop_waiting(), asyncio.get_running_loop()
        try:
            if self._must_rewrite or is_bloated:
                kept = [frame for received in self._slots.values() for frame in received.frames]
                await loop.run_in_executor(self._writer, self._file.replace, kept)
                self._must_rewrite = False
            elif waiting:
                await loop.run_in_executor(self._writer, self._file.append, waiting)
        except OSError as error:
            log.error("pieces are not written", why=str(error), consequence="a restart would lose them")
            self._must_rewrite, self._rest_ticks = True, RETRY_TICKS

    async def _draw_up(self) -> list[PiecesReceived]:
        """What the core is to hear: how far slots have come since the last time. It is sent once it is in the file."""
        events, num_news = list[PiecesReceived](), len(self._news)
        while num_news > 0:
            some = [self._news.popleft() for _ in range(min(num_news, MAX_TOLD))]
            num_news -= len(some)
            progress = tuple(said for received in some if (said := self._progress(received)) is not None)
            if progress:
                events.append(PiecesReceived(progress))
            await asyncio.sleep(0)  # others have their turn
        return events

    def _progress(self, received: Received) -> SlotProgress | None:
        """How far a slot has come; nothing of one that is over, whose last tokens would be a prefix for nobody."""
        received.is_news = False
        lease = self._authority.core.state.leases.get(received.lease_id)
        if lease is None or not received.segments or received.is_over(self._spec):
            return None
        segments = tuple(received.segments)
        edge, given = edge_digest(received), tuple(received.given)
        return SlotProgress(lease.peer_id, received.lease_id, received.key, segments, edge, given)

    def _sweep(self) -> None:
        """Forgets slots that no longer run, a few in each tick."""
        if not self._unswept:
            self._unswept.extend(self._slots)
        for _ in range(min(len(self._unswept), len(self._slots) // SWEEP_TICKS + 1)):
            place = self._unswept.popleft()
            received = self._slots.get(place)
            if received is not None and not self._is_running(received.key):
                self._forget(place)

    def _is_running(self, key: SlotKey) -> bool:
        slot = self._authority.core.state.find(key)
        return slot is not None and slot.status in ("waiting", "leased")

    def _read_back(self) -> None:
        """What an earlier process kept of slots that still run; the core hears of those that are under lease."""
        for frame in self._file.read():
            try:
                message = control_pb2.SlotProgress.FromString(frame)
            except DecodeError:  # of another release
                continue
            if not message.pieces:
                continue
            key, lease_id, start = slot_key(message.slot), LeaseId(message.lease_id), message.pieces[0].start
            place = (key.task.index, key.sample)
            received = self._slots.get(place)
            if start == 0:
                received = self._slots[place] = Received.of(key, lease_id)
            elif received is None or (received.key, received.lease_id, received.num_tokens) != (key, lease_id, start):
                continue
            received.reload(message, frame)
        for place in [place for place, received in self._slots.items() if not self._is_running(received.key)]:
            del self._slots[place]
        self.num_bytes = sum(received.num_bytes for received in self._slots.values())
        for received in self._slots.values():
            received.is_news = True
            self._news.append(received)
