"""The control plane as nodes call it: checks who speaks and what was said, then asks the core. Impure: gRPC.

Every call is by an enrolled key over mutual TLS. Shapes and signatures are checked here, before the core hears of
anything; leases, versions and order are the core's. A call that is refused changes nothing.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
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
from coordinator.hearsay import capability_of, presence_of
from coordinator.home import CoordinatorHome
from coordinator.join_service import Registrar
from coordinator.sessions import Outbox, Sessions
from protocol.errors import HexcombError, NotEnrolledError, UsageError
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
SAMPLES_A_MESSAGE = 256

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

    async def Session(
        self, request_iterator: AsyncIterator[control_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[control_pb2.SessionResponse]:
        office = self._office
        peer_id = await self._caller(context)
        outbox = office.sessions.open(peer_id)
        reader = asyncio.ensure_future(self._listen(peer_id, request_iterator, outbox))
        closing = asyncio.ensure_future(outbox.closed.wait())
        try:
            while not (reader.done() or closing.done()):
                message = asyncio.ensure_future(outbox.messages.get())
                await asyncio.wait({reader, closing, message}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    yield message.result()
                message.cancel()
            if reader.done() and (error := reader.exception()) is not None:
                raise error
        except HexcombError as error:
            await abort_with(context, error)
        except TimeoutError:
            pass
        finally:
            reader.cancel()
            closing.cancel()
            if office.sessions.close(peer_id, outbox):
                await office.authority.submit(SessionEnded(peer_id))

    async def _listen(
        self, peer_id: PeerId, requests: AsyncIterator[control_pb2.SessionRequest], outbox: Outbox
    ) -> None:
        """Hello, then heartbeats, until the stream ends or falls silent."""
        office = self._office
        async with asyncio.timeout(HELLO_DEADLINE_S):
            first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise UsageError("the session was refused", why="its first message is not a hello")
        presence = presence_of(first.hello, None)
        await office.authority.submit(NodeSeen(peer_id, presence))
        if (capability := capability_of(first.hello)) is not None:
            await office.authority.submit(CapabilityLearned(peer_id, capability))
        for message in await office.announcer.greeting(peer_id):
            outbox.put(message)
        while True:
            async with asyncio.timeout(3 * office.spec.heartbeat_s):
                request = await anext(requests, None)
            if request is None:
                return
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
            prompts = await office.grader.prompts([slot.task for slot in grant.slots])
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
            if len(request.rollouts) > MAX_ROLLOUTS_A_CALL:
                raise UsageError("the rollouts were refused", why=f"there are more than {MAX_ROLLOUTS_A_CALL}")
            lease_id = LeaseId(request.lease_id)
            receipts = await asyncio.gather(*(self._take(peer_id, lease_id, message) for message in request.rollouts))
            return control_pb2.SubmitRolloutsResponse(receipts=receipts)

        return await self._serve(context, answer)

    async def _take(
        self, peer_id: PeerId, lease_id: LeaseId, message: control_pb2.Rollout
    ) -> control_pb2.RolloutReceipt:
        """Gate 2 for one rollout; what is wrong with it does not touch its neighbours."""
        try:
            rollout = self._checked(message)
            event = _submitted(peer_id, lease_id, rollout)
            receipt = await self._office.authority.submit(event, (rollout_attachment(rollout),))
        except HexcombError as error:
            return control_pb2.RolloutReceipt(slot=message.slot, outcome=error.code, detail=error.sentence())
        return control_pb2.RolloutReceipt(slot=message.slot, outcome=receipt.outcome, detail=receipt.detail)

    def _checked(self, message: control_pb2.Rollout) -> Rollout:
        """The rollout, once its shape, ranges and signatures hold; a refusal is counted as the core counts its own."""
        office = self._office
        try:
            rollout = rollout_of(message)
            check_rollout(rollout, office.spec.sampling)
            verify_pieces(rollout, run_id=office.spec.run_id)
        except HexcombError as error:
            office.authority.refusals[error.code] += 1
            raise
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

        samples = await self._serve(context, answer)
        for start in range(0, max(1, len(samples)), SAMPLES_A_MESSAGE):
            part = samples[start : start + SAMPLES_A_MESSAGE]
            yield control_pb2.FetchBatchResponse(samples=[sample_message(sample) for sample in part])

    async def _share(self, peer_id: PeerId, round_id: RoundId) -> list[TrainSample]:
        office = self._office
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
            body = Body.from_bytes(request.body)
            event = VersionAttested(peer_id, RoundId(request.round_id), body, dict(request.metrics))
            await self._office.authority.submit(event)
            return control_pb2.AttestVersionResponse()

        return await self._serve(context, answer)

    async def FailRound(self, request: control_pb2.FailRoundRequest, context: Context) -> control_pb2.FailRoundResponse:
        async def answer(peer_id: PeerId) -> control_pb2.FailRoundResponse:
            suspects = tuple(PeerId(suspect) for suspect in request.suspects)
            event = RoundFailed(peer_id, RoundId(request.round_id), suspects, request.reason[:500])
            await self._office.authority.submit(event)
            return control_pb2.FailRoundResponse()

        return await self._serve(context, answer)

    async def SubmitEvaluation(
        self, request: control_pb2.SubmitEvaluationRequest, context: Context
    ) -> control_pb2.SubmitEvaluationResponse:
        async def answer(peer_id: PeerId) -> control_pb2.SubmitEvaluationResponse:
            await self._office.evaluations.take(Version(request.version), prompts_of(request.completions))
            return control_pb2.SubmitEvaluationResponse()

        return await self._serve(context, answer)

    async def GetManifest(
        self, request: control_pb2.GetManifestRequest, context: Context
    ) -> control_pb2.GetManifestResponse:
        async def answer(peer_id: PeerId) -> control_pb2.GetManifestResponse:
            head = self._office.authority.core.state.head
            version = head.version if request.version < 0 and head else Version(request.version)
            return control_pb2.GetManifestResponse(announced=await self._office.announcer.announced(version))

        return await self._serve(context, answer)

    async def RenewLeaf(self, request: control_pb2.RenewLeafRequest, context: Context) -> control_pb2.RenewLeafResponse:
        async def answer(peer_id: PeerId) -> control_pb2.RenewLeafResponse:
            leaf, stamp = self._office.registrar.sign(peer_id, request.certificate_request)
            return control_pb2.RenewLeafResponse(leaf_certificate=leaf, membership=stamp)

        return await self._serve(context, answer)

    async def _serve(self, context: Context, answer: Callable[[PeerId], Awaitable[T]]) -> T:
        """The answer to an enrolled caller; an error of the tree ends the call."""
        peer_id = await self._caller(context)
        try:
            return await answer(peer_id)
        except HexcombError as error:
            await abort_with(context, error)

    async def _caller(self, context: Context) -> PeerId:
        office = self._office
        try:
            key = office.home.identity.public_bytes
            peer_id = caller_of(context, coordinator_key=key, now_ms=office.clock())
            if peer_id not in office.authority.core.state.nodes:
                raise NotEnrolledError("the call was refused", why=f"{peer_id} has no place in this run")
        except HexcombError as error:
            office.authority.refusals[error.code] += 1
            await abort_with(context, error)
        return peer_id


def rollout_attachment(rollout: Rollout) -> tuple[SlotKey, bytes]:
    """The rollout as the journal keeps it beside its fact."""
    return rollout.slot, rollout_message(rollout).SerializeToString()


def _submitted(peer_id: PeerId, lease_id: LeaseId, rollout: Rollout) -> RolloutSubmitted:
    segments = tuple((piece.version, len(piece.token_ids)) for piece in rollout.pieces)
    return RolloutSubmitted(peer_id, lease_id, rollout.slot, rollout.digest, segments)


def _digest(text: str) -> Digest:
    return Digest(text[:64])
