"""Pieces of slots under way, on their way to the coordinator. Impure: the clock.

`PieceSender` gathers the pieces of all leases and hands them in together, so that another node can go on where this one
is lost. Invariants: at most one call is in flight; the pieces of a slot leave in order and without a hole; what waits
is bounded; what was handed in is held, for a coordinator that lost it, only while its slot is worked on. Received is
not accepted: a finished rollout is handed in whole.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from node.backoff import backoff_s
from node.orders import PiecesReceived
from protocol.errors import HexcombError
from protocol.ids import LeaseId, SlotKey
from protocol.rollout import Piece

MAX_HELD = 32_768
"""Pieces that are not handed in yet."""
MAX_CALL = 2_048
MUCH = 256
"""So many pieces do not wait for the interval to end, but for an eighth of it."""

log = structlog.get_logger("pieces")


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """New pieces of a slot that is filled under a lease, in order."""

    lease_id: LeaseId
    slot: SlotKey
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class _Stream:
    """The pieces of one slot, of which the first `num_in` were handed in. Once it is cut nothing more of it is handed
    in, since that would leave a hole."""

    pieces: list[Piece] = field(default_factory=list)
    num_in: int = 0
    is_cut: bool = False

    def rewind(self, position: int) -> None:
        """The coordinator lacks the tokens from `position` on."""
        starts = [piece.start for piece in self.pieces]
        if position in starts:
            self.num_in = starts.index(position)
        else:  # they are no piece of this node's
            self.cut()

    def cut(self) -> None:
        """Ends it."""
        self.is_cut = True
        del self.pieces[self.num_in :]


@dataclass(slots=True)
class PieceSender:
    """Hands pieces in by `submit` about every `interval_s`. `on_unwanted` is told of slots to stop, `on_time` of the
    seconds until a lease ends."""

    submit: Callable[[Sequence[SlotProgress]], Awaitable[PiecesReceived]]
    interval_s: float
    counts: Counter[str]
    on_unwanted: Callable[[LeaseId, SlotKey], None]
    on_time: Callable[[LeaseId, float], None]
    _streams: dict[tuple[LeaseId, SlotKey], _Stream] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _last_s: float = float("-inf")

    def add(self, lease_id: LeaseId, slot: SlotKey, piece: Piece) -> None:
        """The next piece of a slot."""
        stream = self._streams.setdefault((lease_id, slot), _Stream())
        if stream.is_cut or self._num_waiting() >= MAX_HELD:
            self.counts["pieces/no room"] += 1
            stream.is_cut = True  # what is held already still goes
            return
        stream.pieces.append(piece)
        self._news.set()

    def forget(self, lease_id: LeaseId, slot: SlotKey) -> None:
        """The slot is not worked on any more."""
        self._streams.pop((lease_id, slot), None)

    async def run(self) -> None:
        """Until cancelled. A call that fails is made again, with what is still wanted then."""
        num_failures = 0
        while True:
            await self._wait_until_due()
            progress = list(self._take())
            try:
                received = await self.submit(progress)
            except HexcombError as error:
                wait_s = backoff_s(num_failures, chance=random.random(), base_s=self.interval_s)
                num_failures += 1
                self.counts["pieces/calls failed"] += 1
                log.info("pieces not handed in", code=error.code, why=error.sentence(), next_in_s=round(wait_s, 1))
                await asyncio.sleep(wait_s)
                continue
            num_failures, self._last_s = 0, time.monotonic()
            self._note(progress, received)

    async def _wait_until_due(self) -> None:
        while True:
            self._news.clear()
            num_waiting = self._num_waiting()
            interval_s = self.interval_s / 8 if num_waiting >= MUCH else self.interval_s
            wait_s = self._last_s + interval_s - time.monotonic()
            if num_waiting and wait_s <= 0:
                return
            try:
                async with asyncio.timeout(wait_s if num_waiting else None):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _num_waiting(self) -> int:
        return sum(len(stream.pieces) - stream.num_in for stream in self._streams.values())

    def _take(self) -> Iterator[SlotProgress]:
        room = MAX_CALL
        for (lease_id, slot), stream in self._streams.items():
            pieces = tuple(stream.pieces[stream.num_in : stream.num_in + room])
            room -= len(pieces)
            if pieces:
                yield SlotProgress(lease_id, slot, pieces)

    def _note(self, progress: Sequence[SlotProgress], received: PiecesReceived) -> None:
        """The coordinator's answer, which may be of a slot that has ended meanwhile."""
        unwanted, gaps = frozenset(received.unwanted), dict(received.gaps)
        for item in progress:
            self.counts["pieces/handed in"] += len(item.pieces)
            stream = self._streams.get((item.lease_id, item.slot))
            if stream is None:
                continue
            stream.num_in += len(item.pieces)
            if item.slot in unwanted:
                self.forget(item.lease_id, item.slot)
                self.on_unwanted(item.lease_id, item.slot)
            elif item.slot in gaps:
                self.counts["pieces/gaps"] += 1
                stream.rewind(gaps[item.slot])
        for lease_id, remaining_s in received.remaining_s:
            self.on_time(lease_id, remaining_s)
