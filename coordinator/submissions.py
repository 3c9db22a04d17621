"""Gate 2 as nodes call it: filled slots are checked a few at a time, then judged by the core. Impure: asyncio.

Shapes, ranges and signatures are checked here, before the core hears of anything; leases, versions and order are the
core's. What is wrong with one rollout does not touch its neighbours. Where the environment replies, it is asked in
between.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import structlog

from coordinator.authority import Answer as Verdict
from coordinator.authority import Authority, Wish
from coordinator.core.events import RolloutSubmitted, TurnsAwaited
from coordinator.core.replies import Receipt
from coordinator.join_service import counted
from coordinator.turns import Answer, Turns
from protocol.errors import (
    HexcombError,
    JournalError,
    NotEnrolledError,
    NoWorkError,
    RolloutMalformedError,
    UnreachableError,
    UsageError,
)
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.rollout import Rollout, check_rollout, edges_of, verify_piece
from protocol.run import RunSpec
from protocol.v1 import control_pb2
from protocol.wire import rollout_of

log = structlog.get_logger()

MAX_ROLLOUTS_A_CALL = 1024
MAX_PIECES_A_CALL = 4096
MAX_CALLS_WAITING = 8
MAX_ASKED = 8
"""So many turns are put to the environment before the core hears of them."""

AWAIT_S = 2.0
"""So often the core hears that the environment is still being asked."""

CHECKS_A_TURN = 8
"""So many signatures take about a millisecond: a thread of their own would wait longer for the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A rollout that has the shape and the signatures that it must have, what the core is told of it, and the bytes
    that the journal keeps."""

    rollout: Rollout
    edges: tuple[Digest, ...]
    body: bytes


class Submissions:
    """Takes filled slots."""

    def __init__(self, authority: Authority, spec: RunSpec, turns: Turns | None = None) -> None:
        self._authority, self._spec, self._turns = authority, spec, turns
        self._signer = turns.peer_id if turns is not None else None
        self._num_checks = 0
        self._locks: dict[PeerId, asyncio.Lock] = {}
        self._waiting: Counter[PeerId] = Counter()
        self._talks: dict[PeerId, asyncio.Lock] = {}
        self._asking: dict[asyncio.Task[list[Verdict]], PeerId] = {}

    async def take(
        self, peer_id: PeerId, request: control_pb2.SubmitRolloutsRequest
    ) -> control_pb2.SubmitRolloutsResponse:
        """One receipt for each rollout, in order. Raises `UsageError`, `NoWorkError` or `JournalError`."""
        with counted(self._authority):
            num_pieces = sum(len(rollout.pieces) for rollout in request.rollouts)
            check_size(len(request.rollouts), num_pieces, max_slots=MAX_ROLLOUTS_A_CALL)
        async with self.turn_of(peer_id):
            checked = [await self._check(message) for message in request.rollouts]
        lease_id, good = LeaseId(request.lease_id), [item for item in checked if isinstance(item, Checked)]
        answers = iter(await self._judge(peer_id, lease_id, good))
        results = [next(answers) if isinstance(item, Checked) else self._count(item) for item in checked]
        receipts = map(_receipt, request.rollouts, results)
        return control_pb2.SubmitRolloutsResponse(receipts=receipts)

    async def _judge(self, peer_id: PeerId, lease_id: LeaseId, good: Sequence[Checked]) -> list[Verdict]:
        """What the core says. Where the environment is asked before, that goes on after a caller that does not wait,
        and is over before the caller's next word. Raises `UnreachableError` when too many of a node's calls wait."""
        if self._turns is None:
            return await self._authority.submit_all([_wish(peer_id, lease_id, item, None) for item in good])
        if sum(peer == peer_id for peer in self._asking.values()) >= MAX_CALLS_WAITING:
            raise UnreachableError("the rollouts were not taken", why="earlier ones of this node wait for replies")
        asking = asyncio.create_task(self._see_through(self._turns, peer_id, lease_id, good))
        self._asking[asking] = peer_id
        asking.add_done_callback(self._forget)
        return await asyncio.shield(asking)

    async def _see_through(
        self, turns: Turns, peer_id: PeerId, lease_id: LeaseId, good: Sequence[Checked]
    ) -> list[Verdict]:
        """Asks and judges. The core hears of it before, so that nobody takes over what is handed in, and as long as it
        takes, since it is not the node that is slow."""
        awaited = TurnsAwaited(peer_id, lease_id, tuple(item.rollout.slot for item in good))
        await self._authority.submit(awaited)
        judging = asyncio.create_task(self._ask_and_judge(turns, peer_id, lease_id, good))
        while not (await asyncio.wait({judging}, timeout=AWAIT_S))[0]:
            with contextlib.suppress(JournalError):  # then judging ends by it, too
                await self._authority.submit(awaited)
        return judging.result()

    async def _ask_and_judge(
        self, turns: Turns, peer_id: PeerId, lease_id: LeaseId, good: Sequence[Checked]
    ) -> list[Verdict]:
        """A few at a time: what was replied to is taken before the next ones are asked about."""
        verdicts: list[Verdict] = []
        async with self._talks.setdefault(peer_id, asyncio.Lock()):
            for some in _parts(good):
                replies = await turns.answers(peer_id, lease_id, [(item.rollout, item.edges) for item in some])
                wishes = [_wish(peer_id, lease_id, item, said) for item, said in zip(some, replies, strict=True)]
                verdicts += await self._authority.submit_all(wishes)
        return verdicts

    def _forget(self, asked: asyncio.Task[list[Verdict]]) -> None:
        del self._asking[asked]
        if not asked.cancelled() and (error := asked.exception()) is not None:
            log.info("turns were not taken", why=str(error))  # whoever waited was told, and asks again

    @contextlib.asynccontextmanager
    async def turn_of(self, peer_id: PeerId) -> AsyncIterator[None]:
        """One call of a node at a time has its signatures checked, so that a flood from one holds up nobody else.
        Raises `NoWorkError` when too many of its calls wait."""
        if self._waiting[peer_id] >= MAX_CALLS_WAITING:
            raise NoWorkError("the rollouts were not taken", why="too many calls of this node wait already")
        self._waiting[peer_id] += 1
        try:
            async with self._locks.setdefault(peer_id, asyncio.Lock()):
                yield
        finally:
            self._waiting[peer_id] -= 1

    def _count(self, refusal: HexcombError) -> HexcombError:
        self._authority.refusals[refusal.code] += 1
        return refusal

    async def _check(self, message: control_pb2.Rollout) -> Checked | HexcombError:
        """The rollout if its shape, ranges, signers and signatures hold. Others have their turn in between."""
        spec, state = self._spec, self._authority.core.state
        try:
            rollout = rollout_of(message)
            check_rollout(rollout, spec.sampling)
            for piece in rollout.pieces:
                await self._pause()
                verify_piece(piece, slot=rollout.slot, run_id=spec.run_id)
        except HexcombError as error:
            return error
        if any(piece.node != self._signer for piece in rollout.pieces if not piece.is_sampled):
            return RolloutMalformedError(
                f"the rollout for slot {rollout.slot} was refused",
                why="a piece without log-probabilities in it is not the coordinator's",
                remedy="Hand in what was sampled; the coordinator asks the environment.",
            )
        sampled = (piece for piece in rollout.pieces if piece.is_sampled)
        stranger = next((piece.node for piece in sampled if piece.node not in state.nodes), None)
        if stranger is not None:
            return NotEnrolledError(
                f"the rollout for slot {rollout.slot} was refused",
                why=f"its signer {stranger} has no place in this run",
            )
        slot = state.find(rollout.slot)
        goes_on = len(rollout.pieces) > 1 or (slot is not None and slot.prefix is not None) or self._turns is not None
        edges = tuple(edges_of(rollout.slot, rollout.pieces)) if goes_on else ()
        message.DiscardUnknownFields()
        return Checked(rollout, edges, message.SerializeToString())

    async def _pause(self) -> None:
        """Lets others have their turn after every `CHECKS_A_TURN` signatures, whoever's they were."""
        self._num_checks += 1
        if self._num_checks % CHECKS_A_TURN == 0:
            await asyncio.sleep(0)


def _parts(good: Sequence[Checked]) -> Iterator[list[Checked]]:
    """At most `MAX_ASKED` rollouts, each of another slot, in order: what becomes of one decides what a second one of
    its slot is."""
    part = dict[SlotKey, Checked]()
    for item in good:
        if len(part) >= MAX_ASKED or item.rollout.slot in part:
            yield list(part.values())
            part = {}
        part[item.rollout.slot] = item
    if part:
        yield list(part.values())


def _wish(peer_id: PeerId, lease_id: LeaseId, checked: Checked, reply: Answer) -> Wish:
    rollout, segments = checked.rollout, _segments_of(checked.rollout)
    event = RolloutSubmitted(
        peer_id, lease_id, rollout.slot, rollout.digest, segments, checked.edges, rollout.given, reply
    )
    return event, ((rollout.slot, checked.body),)


def _segments_of(rollout: Rollout) -> tuple[tuple[Version, int], ...]:
    """(version, number of tokens), one for each version however many pieces it has: the state keeps them long."""
    lengths: dict[Version, int] = {}
    for piece in rollout.pieces:  # their versions do not go backwards
        lengths[piece.version] = lengths.get(piece.version, 0) + len(piece.token_ids)
    return tuple(lengths.items())


def _receipt(message: control_pb2.Rollout, result: Verdict) -> control_pb2.RolloutReceipt:
    if isinstance(result, HexcombError):
        return control_pb2.RolloutReceipt(slot=message.slot, outcome=result.code, detail=result.sentence())
    assert isinstance(result, Receipt)
    return control_pb2.RolloutReceipt(slot=message.slot, outcome=result.outcome, detail=result.detail)


def check_size(num_slots: int, num_pieces: int, *, max_slots: int = MAX_PIECES_A_CALL) -> None:
    """Raises `UsageError` on a call that would hold up others."""
    if num_slots > max_slots or num_pieces > MAX_PIECES_A_CALL:
        raise UsageError(
            "the call was refused",
            why=f"it names more than {max_slots} slots, or has more than {MAX_PIECES_A_CALL} pieces",
            remedy="Hand them in by smaller parts.",
        )
