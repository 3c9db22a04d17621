"""The control plane as nodes call it: says who speaks, and passes on what was said. Impure: gRPC.

Every call is by an enrolled key over mutual TLS. A call that is refused changes nothing; an error of the tree ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from coordinator.batches import share_messages
from coordinator.callers import Callers, Context
from coordinator.core.events import CapabilityLearned, NodeSeen, RoundFailed, SessionEnded, VersionAttested
from coordinator.hearsay import canary_of, capability_of, metrics_of, presence_of, printable
from coordinator.join_service import counted
from coordinator.office import Office
from coordinator.sessions import Outbox
from coordinator.submissions import Submissions
from coordinator.turns import Turns
from coordinator.work_service import MAX_REASON, WorkService
from protocol.errors import HexcombError, JournalError, UnreachableError, UsageError
from protocol.grpc_errors import abort_with
from protocol.ids import LeaseId, PeerId, RoundId, Version
from protocol.manifest import Body
from protocol.v1 import control_pb2, control_pb2_grpc
from protocol.wire import prompts_of

HELLO_DEADLINE_S = 15.0

T = TypeVar("T")


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Serves enrolled nodes."""

    def __init__(self, office: Office, work: WorkService) -> None:
        self._office, self._work = office, work
        self._submissions = Submissions(office.authority, office.spec, _turns(office))
        self._callers = Callers(office.authority, coordinator_key=office.home.identity.public_bytes)

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
        await self._work.note_boot(peer_id, first.hello.boot_id)
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
        return await self._serve(context, lambda peer_id: self._work.lease(peer_id, request))

    async def SubmitPieces(
        self, request: control_pb2.SubmitPiecesRequest, context: Context
    ) -> control_pb2.SubmitPiecesResponse:
        async def answer(peer_id: PeerId) -> control_pb2.SubmitPiecesResponse:
            return self._work.receive(peer_id, request)

        return await self._serve(context, answer)

    async def SubmitRollouts(
        self, request: control_pb2.SubmitRolloutsRequest, context: Context
    ) -> control_pb2.SubmitRolloutsResponse:
        async def answer(peer_id: PeerId) -> control_pb2.SubmitRolloutsResponse:
            response = await self._submissions.take(peer_id, request)
            await self._work.settle(peer_id, LeaseId(request.lease_id))
            return response

        return await self._serve(context, answer)

    async def ReturnLease(
        self, request: control_pb2.ReturnLeaseRequest, context: Context
    ) -> control_pb2.ReturnLeaseResponse:
        async def answer(peer_id: PeerId) -> control_pb2.ReturnLeaseResponse:
            await self._work.take_back(peer_id, request)
            return control_pb2.ReturnLeaseResponse()

        return await self._serve(context, answer)

    async def FetchBatch(
        self, request: control_pb2.FetchBatchRequest, context: Context
    ) -> AsyncIterator[control_pb2.FetchBatchResponse]:
        office, peer_id = self._office, await self._caller(context)
        messages = share_messages(office.authority, office.grader, RoundId(request.round_id), peer_id)
        while (message := await self._or_abort(context, anext(messages, None))) is not None:
            yield message

    async def AttestVersion(
        self, request: control_pb2.AttestVersionRequest, context: Context
    ) -> control_pb2.AttestVersionResponse:
        async def answer(peer_id: PeerId) -> control_pb2.AttestVersionResponse:
            with counted(self._office.authority):
                body = Body.from_bytes(request.body)
            metrics, canary = metrics_of(request.metrics), canary_of(request.canary)
            event = VersionAttested(peer_id, RoundId(request.round_id), body, metrics, canary)
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
        return await self._or_abort(context, answer(peer_id))

    async def _or_abort(self, context: Context, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except JournalError as error:  # to the node this is a coordinator that is away: it tries again
            gone = UnreachableError("the coordinator is stopping", why=error.what, remedy="Try again when it is back.")
            await abort_with(context, gone)
        except HexcombError as error:
            await abort_with(context, error)

    async def _caller(self, context: Context) -> PeerId:
        try:
            return self._callers.name(context, now_ms=self._office.clock())
        except HexcombError as error:
            await abort_with(context, error)


def _turns(office: Office) -> Turns | None:
    """Nothing is asked where the environment never replies."""
    if not office.grader.is_multi_turn:
        return None
    return Turns(
        office.authority,
        office.spec,
        grader=office.grader,
        pieces=office.pieces,
        identity=office.home.identity,
    )


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
