"""The control plane as nodes call it: checks who speaks and what was said, then asks the core. Impure: gRPC.

Every call is by an enrolled key over mutual TLS. Shapes and signatures are checked here, before the core hears of
anything; leases, versions and order are the core's. A call that is refused changes nothing.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from coordinator.announcements import Announcer
from coordinator.authority import Authority
from coordinator.core.events import (
    CapabilityLearned,
    LeaseReturned,
    NodeSeen,
    RolloutSubmitted,
    RoundFailed,
    SessionEnded,
    VersionAttested,
    WorkRequested,
)
from coordinator.evaluations import Evaluations
from coordinator.grader import Grader
from coordinator.hearsay import capability_of, metrics_of, presence_of, printable
from coordinator.home import CoordinatorHome
from coordinator.join_service import Registrar, counted
from coordinator.sessions import Outbox, Sessions
from protocol.errors import HexcombError, JournalError, NotEnrolledError, NoWorkError, UnreachableError, UsageError
from protocol.grpc_errors import abort_with
from protocol.ids import Digest, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.manifest import Body
from protocol.rollout import Rollout, check_rollout, pack_ids, verify_pieces
from protocol.round import TrainSample
from protocol.run import RunSpec
from protocol.tasks import prompt_digest
from protocol.tls import caller_of
from protocol.v1 import control_pb2, control_pb2_grpc
from protocol.wire import prompts_of, rollout_message, rollout_of, sample_message, slot_message

HELLO_DEADLINE_S = 15.0
MAX_SLOTS_A_LEASE = 1024
MAX_ROLLOUTS_A_CALL = 1024
MAX_PIECES_A_CALL = 4096
MAX_CALLS_WAITING = 8
"""Each costs a check of a signature: so many take about a second."""

MAX_BATCH_MESSAGE_BYTES = 4 << 20
MAX_REASON = 300

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Office:
    """What the control service works with."""

    home: CoordinatorHome
    spec: RunSpec
    authority: Authority
    registrar: Registrar
    sessions: Sessions
    announcer: Announcer
    grader: Grader
    evaluations: Evaluations
    clock: Callable[[], int]


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Serves enrolled nodes."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="signatures")
        self._turns: dict[PeerId, asyncio.Lock] = {}
        self._waiting: Counter[PeerId] = Counter()

    async def Session(  # type: ignore[override]  # it writes by itself, so that a write can be given up
        self, request_iterator: AsyncIterator[control_pb2.SessionRequest], context: Context
    ) -> None:
        office = self._office
        peer_id = await self._caller(context)
        outbox = Outbox()
        parts: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._listen(peer_id, request_iterator, outbox)),
            asyncio.ensure_future(_speak(outbox, context)),
            outbox.ended,
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            end = next(iter(done)).result()
        except HexcombError as error:
            end = error
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            if office.sessions.close(peer_id, outbox):
                await office.authority.submit(SessionEnded(peer_id))
        if end is not None:
            office.authority.refusals[end.code] += 1
            await abort_with(context, end)

    async def _listen(
        self, peer_id: PeerId, requests: AsyncIterator[control_pb2.SessionRequest], outbox: Outbox
    ) -> HexcombError | None:
        """Hello, then heartbeats, until the stream ends or falls silent; what goes down begins with the welcome."""
        office = self._office
        first = await _next(requests, deadline_s=HELLO_DEADLINE_S)
        if first is None or first.WhichOneof("message") != "hello":
            return UsageError("the session was refused", why="its first message is not a hello")
        presence = presence_of(first.hello, None)
        outbox.put(office.announcer.welcome())
        office.sessions.open(peer_id, outbox)
        await office.authority.submit(NodeSeen(peer_id, presence))
        if (capability := capability_of(first.hello)) is not None:
            await office.authority.submit(CapabilityLearned(peer_id, capability))
        for message in await office.announcer.greeting(peer_id):
            outbox.put(message)
        while True:
            request = await _next(requests, deadline_s=3 * office.spec.heartbeat_s)
            if request is None:
                return None
            if request.WhichOneof("message") == "heartbeat":
                presence = presence_of(request.heartbeat, presence)
                await office.authority.submit(NodeSeen(peer_id, presence))

    async def LeaseWork(self, request: control_pb2.LeaseWorkRequest, context: Context) -> control_pb2.LeaseWorkResponse:
        async def answer(peer_id: PeerId) -> control_pb2.LeaseWorkResponse:
            office = self._office
            grant = await office.authority.submit(
                WorkRequested(
                    peer_id=peer_id,
                    version=Version(request.version),
                    root=_digest(request.root),
                    num_slots=max(1, min(request.num_slots, MAX_SLOTS_A_LEASE)),
                    lease_id=LeaseId(secrets.token_hex(8)),
                )
            )
            try:
                prompts = await office.grader.prompts([slot.task for slot in grant.slots])
            except (HexcombError, asyncio.CancelledError):  # nobody would work on them until the lease runs out
                await office.authority.submit(LeaseReturned(peer_id, grant.lease_id))
                raise
            works = [
                control_pb2.SlotWork(
                    slot=slot_message(slot), prompt_digest=prompt_digest(ids), prompt_ids=pack_ids(ids)
                )
                for slot, ids in zip(grant.slots, prompts, strict=True)
            ]
            remaining_s = (grant.deadline_ms - office.clock()) / 1000
            return control_pb2.LeaseWorkResponse(lease_id=grant.lease_id, slots=works, remaining_s=remaining_s)

        return await self._serve(context, answer)

    async def SubmitRollouts(
        self, request: control_pb2.SubmitRolloutsRequest, context: Context
    ) -> control_pb2.SubmitRolloutsResponse:
        async def answer(peer_id: PeerId) -> control_pb2.SubmitRolloutsResponse:
            with counted(self._office.authority):
                _check_size(request)
            loop, lease_id = asyncio.get_running_loop(), LeaseId(request.lease_id)
            async with self._turn_of(peer_id):
                checked = await loop.run_in_executor(self._checker, lambda: [self._check(m) for m in request.rollouts])
            takes = (self._take(peer_id, lease_id, *pair) for pair in zip(request.rollouts, checked, strict=True))
            return control_pb2.SubmitRolloutsResponse(receipts=await asyncio.gather(*takes))

        return await self._serve(context, answer)

    @contextlib.asynccontextmanager
    async def _turn_of(self, peer_id: PeerId) -> AsyncIterator[None]:
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
        self, peer_id: PeerId, lease_id: LeaseId, message: control_pb2.Rollout, checked: Rollout | HexcombError
    ) -> control_pb2.RolloutReceipt:
        """Gate 2 for one rollout; what is wrong with it does not touch its neighbours."""
        authority = self._office.authority
        try:
            if isinstance(checked, HexcombError):
                with counted(authority):
                    raise checked
            receipt = await authority.submit(_submitted(peer_id, lease_id, checked), (rollout_attachment(checked),))
        except JournalError:  # no verdict on this rollout: the call fails, and the node repeats it
            raise
        except HexcombError as error:
            return control_pb2.RolloutReceipt(slot=message.slot, outcome=error.code, detail=error.sentence())
        return control_pb2.RolloutReceipt(slot=message.slot, outcome=receipt.outcome, detail=receipt.detail)

    def _check(self, message: control_pb2.Rollout) -> Rollout | HexcombError:
        """The rollout if its shape, ranges, signers and signatures hold. Runs in a thread: signatures take time."""
        spec, nodes = self._office.spec, self._office.authority.core.state.nodes
        try:
            rollout = rollout_of(message)
            check_rollout(rollout, spec.sampling)
            verify_pieces(rollout, run_id=spec.run_id)
        except HexcombError as error:
            return error
        stranger = next((piece.node for piece in rollout.pieces if piece.node not in nodes), None)
        if stranger is not None:
            return NotEnrolledError(
                f"the rollout for slot {rollout.slot} was refused",
                why=f"its signer {stranger} has no place in this run",
            )
        return rollout

    async def ReturnLease(
        self, request: control_pb2.ReturnLeaseRequest, context: Context
    ) -> control_pb2.ReturnLeaseResponse:
        async def answer(peer_id: PeerId) -> control_pb2.ReturnLeaseResponse:
            await self._office.authority.submit(LeaseReturned(peer_id, LeaseId(request.lease_id)))
            return control_pb2.ReturnLeaseResponse()

        return await self._serve(context, answer)

    async def FetchBatch(
        self, request: control_pb2.FetchBatchRequest, context: Context
    ) -> AsyncIterator[control_pb2.FetchBatchResponse]:
        async def answer(peer_id: PeerId) -> list[TrainSample]:
            return await self._share(peer_id, RoundId(request.round_id))

        for message in batch_messages(await self._serve(context, answer)):
            yield message

    async def _share(self, peer_id: PeerId, round_id: RoundId) -> list[TrainSample]:
        office = self._office
        with counted(office.authority):
            items = office.authority.core.share_of(round_id, peer_id)
        prompts = await office.grader.prompts([item.slot.task for item in items])
        bodies = await office.authority.rollout_bodies([item.slot for item in items])
        samples = []
        for item, prompt_ids, data in zip(items, prompts, bodies, strict=True):
            rollout = rollout_of(control_pb2.Rollout.FromString(data))
            samples.append(
                TrainSample(
                    slot=str(item.slot),
                    prompt_ids=prompt_ids,
                    completion_ids=rollout.token_ids,
                    logprobs=rollout.logprobs,
                    mask=item.mask,
                    segments=item.segments,
                    advantage=item.advantage,
                )
            )
        return samples

    async def AttestVersion(
        self, request: control_pb2.AttestVersionRequest, context: Context
    ) -> control_pb2.AttestVersionResponse:
        async def answer(peer_id: PeerId) -> control_pb2.AttestVersionResponse:
            with counted(self._office.authority):
                body = Body.from_bytes(request.body)
            event = VersionAttested(peer_id, RoundId(request.round_id), body, metrics_of(request.metrics))
            await self._office.authority.submit(event)
            return control_pb2.AttestVersionResponse()

        return await self._serve(context, answer)

    async def FailRound(self, request: control_pb2.FailRoundRequest, context: Context) -> control_pb2.FailRoundResponse:
        async def answer(peer_id: PeerId) -> control_pb2.FailRoundResponse:
            suspects = tuple(PeerId(suspect) for suspect in request.suspects)
            event = RoundFailed(peer_id, RoundId(request.round_id), suspects, printable(request.reason, MAX_REASON))
            await self._office.authority.submit(event)
            return control_pb2.FailRoundResponse()

        return await self._serve(context, answer)

    async def SubmitEvaluation(
        self, request: control_pb2.SubmitEvaluationRequest, context: Context
    ) -> control_pb2.SubmitEvaluationResponse:
        async def answer(peer_id: PeerId) -> control_pb2.SubmitEvaluationResponse:
            with counted(self._office.authority):
                completions = prompts_of(request.completions)
                await self._office.evaluations.take(peer_id, Version(request.version), completions)
            return control_pb2.SubmitEvaluationResponse()

        return await self._serve(context, answer)

    async def GetManifest(
        self, request: control_pb2.GetManifestRequest, context: Context
    ) -> control_pb2.GetManifestResponse:
        async def answer(peer_id: PeerId) -> control_pb2.GetManifestResponse:
            head = self._office.authority.core.state.head
            version = head.version if request.version < 0 and head else Version(request.version)
            with counted(self._office.authority):
                announced = await self._office.announcer.announced(version)
            return control_pb2.GetManifestResponse(announced=announced)

        return await self._serve(context, answer)

    async def RenewLeaf(self, request: control_pb2.RenewLeafRequest, context: Context) -> control_pb2.RenewLeafResponse:
        async def answer(peer_id: PeerId) -> control_pb2.RenewLeafResponse:
            with counted(self._office.authority):
                leaf, stamp = self._office.registrar.sign(peer_id, request.certificate_request)
            return control_pb2.RenewLeafResponse(leaf_certificate=leaf, membership=stamp)

        return await self._serve(context, answer)

    async def _serve(self, context: Context, answer: Callable[[PeerId], Awaitable[T]]) -> T:
        """The answer to an enrolled caller; an error of the tree ends the call."""
        peer_id = await self._caller(context)
        try:
            return await answer(peer_id)
        except JournalError as error:  # to the node this is a coordinator that is away: it tries again
            gone = UnreachableError("the coordinator is stopping", why=error.what, remedy="Try again when it is back.")
            await abort_with(context, gone)
        except HexcombError as error:
            await abort_with(context, error)

    async def _caller(self, context: Context) -> PeerId:
        office = self._office
        try:
            with counted(office.authority):
                key = office.home.identity.public_bytes
                peer_id = caller_of(context, coordinator_key=key, now_ms=office.clock())
                if peer_id not in office.authority.core.state.nodes:
                    raise NotEnrolledError("the call was refused", why=f"{peer_id} has no place in this run")
        except HexcombError as error:
            await abort_with(context, error)
        return peer_id


async def _speak(outbox: Outbox, context: Context) -> None:
    """Writes what waits, until cancelled; blocks where the node does not read."""
    while True:
        await context.write(await outbox.messages.get())


async def _next(
    requests: AsyncIterator[control_pb2.SessionRequest], *, deadline_s: float
) -> control_pb2.SessionRequest | None:
    """The next message of a stream, None at its end. Raises `UnreachableError` when none comes in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await anext(requests, None)
    except TimeoutError as error:
        raise UnreachableError("the session was ended", why=f"the node said nothing for {deadline_s:g} s") from error


def batch_messages(samples: Iterable[TrainSample]) -> Iterator[control_pb2.FetchBatchResponse]:
    """The samples in messages that gRPC takes, whatever their length; at least one message."""
    part, num_bytes = control_pb2.FetchBatchResponse(), 0
    for sample in samples:
        message = sample_message(sample)
        if part.samples and num_bytes + message.ByteSize() > MAX_BATCH_MESSAGE_BYTES:
            yield part
            part, num_bytes = control_pb2.FetchBatchResponse(), 0
        part.samples.append(message)
        num_bytes += message.ByteSize()
    yield part


def _check_size(request: control_pb2.SubmitRolloutsRequest) -> None:
    num_pieces = sum(len(rollout.pieces) for rollout in request.rollouts)
    if len(request.rollouts) > MAX_ROLLOUTS_A_CALL or num_pieces > MAX_PIECES_A_CALL:
        raise UsageError(
            "the rollouts were refused",
            why=f"there are more than {MAX_ROLLOUTS_A_CALL}, or more than {MAX_PIECES_A_CALL} pieces in them",
            remedy="Hand them in by smaller parts.",
        )


def rollout_attachment(rollout: Rollout) -> tuple[SlotKey, bytes]:
    """The rollout as the journal keeps it beside its fact."""
    return rollout.slot, rollout_message(rollout).SerializeToString()


def _submitted(peer_id: PeerId, lease_id: LeaseId, rollout: Rollout) -> RolloutSubmitted:
    segments = tuple((piece.version, len(piece.token_ids)) for piece in rollout.pieces)
    return RolloutSubmitted(peer_id, lease_id, rollout.slot, rollout.digest, segments)


def _digest(text: str) -> Digest:
    return Digest(text[:64])
