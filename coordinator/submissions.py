"""Gate 2 as nodes call it: filled slots are checked in a thread, then judged by the core. Impure: a thread.

Shapes, ranges and signatures are checked here, before the core hears of anything; leases, versions and order are the
core's. What is wrong with one rollout does not touch its neighbours.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coordinator.authority import Authority
from coordinator.core.events import RolloutSubmitted
from coordinator.join_service import counted
from protocol.errors import HexcombError, JournalError, NotEnrolledError, NoWorkError, UsageError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey
from protocol.rollout import Rollout, check_rollout, edges_of, verify_pieces
from protocol.run import RunSpec
from protocol.v1 import control_pb2
from protocol.wire import rollout_message, rollout_of

MAX_ROLLOUTS_A_CALL = 1024
MAX_PIECES_A_CALL = 4096
MAX_CALLS_WAITING = 8
"""Each costs a check of a signature: so many take about a second."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A rollout that has the shape and the signatures that it must have, and what the core is told of it."""

    rollout: Rollout
    edges: tuple[Digest, ...]


class Submissions:
    """Takes filled slots."""

    def __init__(self, authority: Authority, spec: RunSpec) -> None:
        self._authority, self._spec = authority, spec
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="signatures")
        self._turns: dict[PeerId, asyncio.Lock] = {}
        self._waiting: Counter[PeerId] = Counter()

    async def take(
        self, peer_id: PeerId, request: control_pb2.SubmitRolloutsRequest
    ) -> control_pb2.SubmitRolloutsResponse:
        """One receipt for each rollout, in order. Raises `UsageError`, `NoWorkError` or `JournalError`."""
        with counted(self._authority):
            num_pieces = sum(len(rollout.pieces) for rollout in request.rollouts)
            check_size(len(request.rollouts), num_pieces, max_slots=MAX_ROLLOUTS_A_CALL)
        loop, lease_id = asyncio.get_running_loop(), LeaseId(request.lease_id)
        async with self.turn_of(peer_id):
            checked = await loop.run_in_executor(self._checker, lambda: [self._check(m) for m in request.rollouts])
        takes = (self._take(peer_id, lease_id, *pair) for pair in zip(request.rollouts, checked, strict=True))
        return control_pb2.SubmitRolloutsResponse(receipts=await asyncio.gather(*takes))

    @contextlib.asynccontextmanager
    async def turn_of(self, peer_id: PeerId) -> AsyncIterator[None]:
        """One call of a node at a time has its signatures checked, so that a flood from one holds up nobody else.
        Raises `NoWorkError` when too many of its calls wait."""
        if self._waiting[peer_id] >= MAX_CALLS_WAITING:
            raise NoWorkError("the rollouts were not taken", why="too many calls of this node wait already")
        self._waiting[peer_id] += 1
        try:
            async with self._turns.setdefault(peer_id, asyncio.Lock()):
                yield
        finally:
            self._waiting[peer_id] -= 1

    async def _take(
        self, peer_id: PeerId, lease_id: LeaseId, message: control_pb2.Rollout, checked: Checked | HexcombError
    ) -> control_pb2.RolloutReceipt:
        try:
            if isinstance(checked, HexcombError):
                with counted(self._authority):
                    raise checked
            rollout = checked.rollout
            segments = tuple((piece.version, len(piece.token_ids)) for piece in rollout.pieces)
            event = RolloutSubmitted(peer_id, lease_id, rollout.slot, rollout.digest, segments, checked.edges)
            receipt = await self._authority.submit(event, (rollout_attachment(rollout),))
        except JournalError:  # no verdict on this rollout: the call fails, and the node repeats it
            raise
        except HexcombError as error:
            return control_pb2.RolloutReceipt(slot=message.slot, outcome=error.code, detail=error.sentence())
        return control_pb2.RolloutReceipt(slot=message.slot, outcome=receipt.outcome, detail=receipt.detail)

    def _check(self, message: control_pb2.Rollout) -> Checked | HexcombError:
        """The rollout if its shape, ranges, signers and signatures hold. Runs in a thread: signatures take time."""
        spec, state = self._spec, self._authority.core.state
        try:
            rollout = rollout_of(message)
            check_rollout(rollout, spec.sampling)
            verify_pieces(rollout, run_id=spec.run_id)
        except HexcombError as error:
            return error
        stranger = next((piece.node for piece in rollout.pieces if piece.node not in state.nodes), None)
        if stranger is not None:
            return NotEnrolledError(
                f"the rollout for slot {rollout.slot} was refused",
                why=f"its signer {stranger} has no place in this run",
            )
        slot = state.find(rollout.slot)
        goes_on = len(rollout.pieces) > 1 or (slot is not None and slot.prefix is not None)
        return Checked(rollout, tuple(edges_of(rollout.slot, rollout.pieces)) if goes_on else ())


def check_size(num_slots: int, num_pieces: int, *, max_slots: int = MAX_PIECES_A_CALL) -> None:
    """Raises `UsageError` on a call that would hold up others."""
    if num_slots > max_slots or num_pieces > MAX_PIECES_A_CALL:
        raise UsageError(
            "the call was refused",
            why=f"it names more than {max_slots} slots, or has more than {MAX_PIECES_A_CALL} pieces",
            remedy="Hand them in by smaller parts.",
        )


def rollout_attachment(rollout: Rollout) -> tuple[SlotKey, bytes]:
    """The rollout as the journal keeps it beside its fact."""
    return rollout.slot, rollout_message(rollout).SerializeToString()
