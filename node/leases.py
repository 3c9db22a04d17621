"""One lease on a rollout node: generation, pieces, signing, handing in. Impure: the child and the coordinator.

Invariants: a finished slot is handed in whole, first the pieces that came with the lease as they came, then this node's
own, one for each version; whatever ends the work early, the lease is given back unless it is known to be over, with the
word whether this node failed at it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from node.compute.messages import Done, Generate, SlotAdvanced, SlotFilled, SlotOrder, StopSlots
from node.context import Node
from node.orders import Lease, SlotWork
from node.pieces import PieceSender
from node.slot_orders import make_orders
from protocol.child import ChildProcess
from protocol.errors import EngineError, HexcombError, UnreachableError, UsageError, WorkRefusedError
from protocol.ids import SlotKey, Version
from protocol.rollout import FinishReason, Piece, Rollout, sign_piece

GATHER_S = 0.3
MAX_BATCH = 32
MAX_ROLLOUTS_A_CALL = 1024
MAX_PIECES_A_CALL = 2048
"""The coordinator refuses calls that are larger than twice this. A single rollout goes alone, whatever its size."""
EVENTS_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
PIPE_DEADLINE_S = 7 * 86_400.0
"""What ends generation is the lease, whose end may move; the pipe needs a number all the same."""
MAX_QUEUED = 4096
FAULTS = ("ROLLOUT_MALFORMED", "UNAUTHENTICATED")
"""Receipts that blame the rollout itself, not the moment at which it came."""

log = structlog.get_logger("leases")


@dataclass(slots=True)
class LeaseWork:
    """The work on one lease; `run` does it once. `filled` takes the child's finished samples for this lease, of which
    `num_ended` have come, `advance` its tokens under way; `on_generated` is called when the engine is done with it."""

    node: Node
    child: ChildProcess
    lease: Lease
    sender: PieceSender
    on_generated: Callable[[], None]
    filled: asyncio.Queue[SlotFilled] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    is_over: bool = False
    is_generating: bool = True
    is_engine_lost: bool = False
    num_ended: int = 0
    num_taken: int = 0
    num_stopped: int = 0
    _open: dict[str, SlotWork] = field(default_factory=dict)
    _to_stop: set[str] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _fault: str = ""
    _ends_s: float = 0.0
    _limit: asyncio.Timeout | None = None

    @property
    def num_running(self) -> int:
        """Samples that the engine has not ended."""
        return max(0, len(self.lease.slots) - self.num_ended) if self.is_generating else 0

    def __post_init__(self) -> None:
        self._open = {str(work.slot): work for work in self.lease.slots}
        self._ends_s = time.monotonic() + self.lease.remaining_s

    async def run(self) -> None:
        """Fills what can be filled. Raises `EngineError` when the child is lost."""
        reason = "some slots could not be filled"
        try:
            await self._fill(await self._orders())
        except UnreachableError as error:
            reason = error.sentence()
            log.warning("lease not finished", lease=self.lease.lease_id, why=reason)
        except WorkRefusedError as error:
            self.is_over = error.code == "LEASE_UNKNOWN"
            reason = error.sentence()
            log.warning("lease refused", lease=self.lease.lease_id, code=error.code, why=error.why)
        except (HexcombError, asyncio.CancelledError) as error:
            is_fault = isinstance(error, EngineError) or self.child.is_closed or self.is_engine_lost
            await self._give_back(str(error) or "the node stops this work", is_fault=is_fault)
            raise
        finally:
            self.is_generating = False
            self._open.clear()
            for work in self.lease.slots:
                self.sender.forget(self.lease.lease_id, work.slot)
        if self.num_taken + self.num_stopped < len(self.lease.slots):
            await self._give_back(self._fault or reason, is_fault=bool(self._fault))

    def advance(self, event: SlotAdvanced) -> None:
        """New tokens of a slot: signed, and on their way to the coordinator."""
        work = self._open.get(event.slot)
        if work is None:
            return
        piece = Piece(self.node.peer_id, Version(event.version), event.start, event.token_ids, event.logprobs)
        self.sender.add(self.lease.lease_id, work.slot, self._signed(work.slot, piece))

    def stop(self, slots: Iterable[SlotKey]) -> None:
        """The coordinator no longer wants these slots filled; those that are not under way here are ignored."""
        for slot in slots:
            if self._open.pop(str(slot), None) is not None:
                self.sender.forget(self.lease.lease_id, slot)
                self.node.state.counts["slots/stopped"] += 1
                self.num_stopped += 1
                self._to_stop.add(str(slot))
        if self._to_stop:
            self._stopping.set()

    def prolong(self, remaining_s: float) -> None:
        """The lease lasts so many seconds from now, if that is longer than was known."""
        more_s = time.monotonic() + remaining_s - self._ends_s
        if more_s <= 0:
            return
        self._ends_s += more_s
        if self._limit is not None and (when_s := self._limit.when()) is not None and not self._limit.expired():
            self._limit.reschedule(when_s + more_s)

    async def _orders(self) -> list[SlotOrder]:
        orders, left_out = await make_orders(self.node, self.child, self.lease)
        for slot in left_out:
            self._open.pop(str(slot.slot), None)
            self._fault = self._fault or (slot.why if slot.is_fault else "")
        return [order for order in orders if order.slot in self._open]

    async def _fill(self, orders: list[SlotOrder]) -> None:
        if not orders:
            return
        generating = asyncio.create_task(self._generate(orders))
        stopping = asyncio.create_task(self._pass_on_stops())
        try:
            await self._hand_in_all(len(orders), generating)
            await generating
        finally:
            generating.cancel()
            stopping.cancel()
            await asyncio.gather(generating, stopping, return_exceptions=True)

    async def _generate(self, orders: list[SlotOrder]) -> Done:
        """The engine's part, which ends with the lease at the latest. Raises `UnreachableError` then."""
        request = Generate(self.lease.lease_id, tuple(orders))
        try:
            async with asyncio.timeout(max(self._ends_s - time.monotonic(), 1.0)) as self._limit:
                return await self.child.request(request, Done, deadline_s=PIPE_DEADLINE_S)
        except TimeoutError:
            self._fault = "the lease ran out before its slots were filled"
            raise UnreachableError(f"lease {self.lease.lease_id} was not finished", why=self._fault) from None
        finally:
            self._limit, self.is_generating = None, False
            self.on_generated()

    async def _pass_on_stops(self) -> None:
        while True:
            await self._stopping.wait()
            self._stopping.clear()
            names, self._to_stop = tuple(self._to_stop), set()
            try:
                await self.child.request(StopSlots(self.lease.lease_id, names), Done, deadline_s=STOP_DEADLINE_S)
            except HexcombError as error:  # where it is lost, generation says so too
                log.warning("slots not stopped", lease=self.lease.lease_id, why=error.sentence())

    async def _hand_in_all(self, num_orders: int, generating: "asyncio.Task[Done]") -> None:
        """Takes finished slots as they come, and hands them in by batches, until all have come or no more
        can."""
        num_come = 0
        while num_come < num_orders:
            batch = await self._gather(generating)
            if not batch:
                return
            num_come += len(batch)
            rollouts = [rollout for event in batch if (rollout := self._rollout(event)) is not None]
            for part in _parts(rollouts):
                await self._submit(part)

    async def _gather(self, generating: "asyncio.Task[Done]") -> list[SlotFilled]:
        """What finished within a moment after the first; empty when generation has ended and nothing comes
        any more."""
        taking = asyncio.create_task(self.filled.get())
        await asyncio.wait({taking, generating}, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():  # its last events may still be on their way from the pipe
            await asyncio.wait({taking}, timeout=0 if _failed(generating) else EVENTS_DEADLINE_S)
        if not taking.done():
            taking.cancel()
            return []
        batch = [taking.result()]
        gathered_s = time.monotonic() + GATHER_S
        while len(batch) < MAX_BATCH and (wait_s := gathered_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(wait_s):  # wait_for may swallow a cancellation
                    batch.append(await self.filled.get())
            except TimeoutError:
                break
        return batch

    async def _submit(self, rollouts: list[Rollout]) -> None:
        """Hands in until the coordinator answers or the lease has ended. A call that it cannot take at all is a
        fault of these slots alone."""
        while True:
            try:
                receipts = await self.node.control.submit(self.lease.lease_id, rollouts)
                break
            except UsageError as error:
                self._fault = self._fault or error.sentence()
                log.warning("rollouts refused", lease=self.lease.lease_id, num=len(rollouts), why=error.sentence())
                return
            except UnreachableError:
                if time.monotonic() >= self._ends_s:
                    raise
        for receipt in receipts:
            self.node.state.counts[f"receipt/{receipt.outcome}"] += 1
            self.num_taken += receipt.is_taken
            if not receipt.is_taken:
                log.warning("rollout refused", slot=str(receipt.slot), outcome=receipt.outcome, why=receipt.detail)
            if receipt.outcome in FAULTS:
                self._fault = self._fault or f"a rollout was refused: {receipt.outcome}"

    def _rollout(self, event: SlotFilled) -> Rollout | None:
        """The signed rollout, or None for a sample that was cut off or is no longer wanted."""
        work, reason = self._open.pop(event.slot, None), _finish_reason(event.finish_reason)
        if work is None:
            return None
        self.sender.forget(self.lease.lease_id, work.slot)
        if reason is None or not event.token_ids:
            self.node.state.counts["slots/aborted"] += 1
            self._fault = self._fault or f"the engine did not finish a sample: {event.finish_reason}"
            return None
        pieces = list(work.pieces)
        first = sum(len(piece.token_ids) for piece in pieces)
        start = 0
        for version, num_tokens in event.segments:
            stop = start + num_tokens
            ids, logprobs = event.token_ids[start:stop], event.logprobs[start:stop]
            piece = Piece(self.node.peer_id, Version(version), first + start, ids, logprobs)
            pieces.append(self._signed(work.slot, piece))
            start = stop
        self.node.state.rate.add(start, now_s=time.monotonic())
        self.node.state.counts["slots/filled"] += 1
        self.node.state.counts["slots/gone on with"] += bool(work.pieces)
        return Rollout(work.slot, tuple(pieces), reason)

    def _signed(self, slot: SlotKey, piece: Piece) -> Piece:
        return sign_piece(self.node.home.identity, run_id=self.node.run_id, slot=slot, piece=piece)

    async def _give_back(self, reason: str, *, is_fault: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        try:
            await self.node.control.return_lease(self.lease.lease_id, reason=reason[:200], is_fault=is_fault)
        except HexcombError as error:
            log.info("lease not given back; it will expire", lease=self.lease.lease_id, why=error.sentence())


def _parts(rollouts: list[Rollout]) -> Iterator[list[Rollout]]:
    """Rollouts in calls of at most `MAX_PIECES_A_CALL` pieces and `MAX_ROLLOUTS_A_CALL` rollouts, in order."""
    part, num_pieces = list[Rollout](), 0
    for rollout in rollouts:
        num_pieces += len(rollout.pieces)
        if part and (num_pieces > MAX_PIECES_A_CALL or len(part) >= MAX_ROLLOUTS_A_CALL):
            yield part
            part, num_pieces = [], len(rollout.pieces)
        part.append(rollout)
    if part:
        yield part


def _finish_reason(text: str) -> FinishReason | None:
    match text:
        case "stop" | "length":
            return text
        case _:
            return None


def _failed(task: "asyncio.Task[Done]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
