"""The trainer's half of the peer service: parts in, averages, states and moments out. Impure: gRPC.

Invariants: who calls is read from the TLS leaf alone; only members of the open round's plan push and fetch
of it; a member whose part is malformed ends the round at once, by name; every call ends at its own deadline
or the round's.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from node.training.open_round import OpenRound, RoundBook, blame, settled
from node.training.optimizer import Moments
from node.training.wire import messages_of, pack
from node.weights.service import UnservedPeer
from protocol.errors import HexcombError, NoWorkError, PartRefusedError, RoundStaleError, VersionTooOldError
from protocol.grpc_errors import abort_with
from protocol.ids import PeerId, RoundId, Version
from protocol.tls import caller_of
from protocol.v1 import peer_pb2

MAX_CALL_S = 600.0
MAX_CONCURRENT_STATES = 2
HANG_UP_S = 0.5

Requests = AsyncIterator[peer_pb2.PushGradientRequest]
MomentsOf = Callable[[Version], Moments | None]
"""First and second moments after a version, if this trainer still has them."""


class TrainerPeer(UnservedPeer):
    """Serves the rounds of `book`, and the optimizer's state after the versions that `moments_of` knows."""

    def __init__(self, book: RoundBook, moments_of: MomentsOf, *, coordinator_key: bytes) -> None:
        self._book, self._moments_of, self._coordinator_key = book, moments_of, coordinator_key
        self._states_room = asyncio.Semaphore(MAX_CONCURRENT_STATES)

    async def PushGradient(self, request_iterator: Requests, context: Any) -> peer_pb2.PushGradientResponse:
        """Takes a member's part of a shard that is owned here."""
        async with self._answering(context):
            caller = self._caller(context)
            messages = aiter(request_iterator)
            async with asyncio.timeout(MAX_CALL_S):
                first = await anext(messages, peer_pb2.PushGradientRequest())
            opened = await self._book.find(RoundId(first.round_id), wait_s=_patience_s(context))
            async with asyncio.timeout(opened.remaining_s):
                await _take_part(opened, caller, first, messages, hung_up=_hung_up(context))
        return peer_pb2.PushGradientResponse()

    async def FetchShard(
        self, request: peer_pb2.FetchShardRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchShardResponse]:
        """Streams a stage of a shard that is owned here, once it is there."""
        async with self._answering(context):
            caller = self._caller(context)
            opened = await self._book.find(RoundId(request.round_id), wait_s=_patience_s(context))
            opened.check_member(caller)
            async with asyncio.timeout(opened.remaining_s):
                squared_norm, parts = await _stage(opened, request)
                for part in parts:
                    for data in messages_of(part):
                        yield peer_pb2.FetchShardResponse(data=data, squared_norm=squared_norm)

    async def FetchOptimizer(
        self, request: peer_pb2.FetchOptimizerRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchOptimizerResponse]:
        """Streams first and second moments after a version, for a trainer that starts."""
        async with self._answering(context):
            self._caller(context)
            moments = self._moments_of(Version(request.version))
            if moments is None:
                raise VersionTooOldError(f"the moments after version {request.version} are not here")
            if self._states_room.locked():
                raise NoWorkError("the optimizer's state was not served", why="others are being served")
            async with asyncio.timeout(MAX_CALL_S), self._states_room:
                for vector in moments:
                    for data in messages_of(pack(vector, "f32")):
                        yield peer_pb2.FetchOptimizerResponse(data=data)

    def _caller(self, context: Any) -> PeerId:
        return caller_of(context, coordinator_key=self._coordinator_key, now_ms=int(time.time() * 1000))

    @asynccontextmanager
    async def _answering(self, context: Any) -> AsyncIterator[None]:
        """Turns an error of the tree, or the end of time, into the call's status."""
        try:
            yield
        except HexcombError as error:
            await abort_with(context, error)
        except TimeoutError:
            await abort_with(context, RoundStaleError("a call was still open at its round's deadline"))


async def _take_part(
    opened: OpenRound,
    sender: PeerId,
    first: peer_pb2.PushGradientRequest,
    messages: Requests,
    *,
    hung_up: asyncio.Event,
) -> None:
    intake = opened.claim(first.shard, sender)
    try:
        intake.write(first.offset, first.data)
        async for message in messages:
            opened.check_member(sender)
            if (message.round_id, message.shard) != (first.round_id, first.shard):
                raise PartRefusedError(f"the part of {sender} was refused", why="it changes its round or shard")
            intake.write(message.offset, message.data)
        opened.deliver(first.shard, sender, intake.finish())
    except PartRefusedError as error:
        # A link that breaks looks like the end of a part; only a sender that is still there sent too little.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_S):
                await hung_up.wait()
                raise
        opened.fail(blame(opened.plan.round_id, [sender], error.sentence()))
        raise


async def _stage(opened: OpenRound, request: peer_pb2.FetchShardRequest) -> tuple[float, list[np.ndarray[Any, Any]]]:
    """Squared norm and content of what is asked for; waits for it until the round's deadline."""
    if request.shard not in opened.averages:
        raise PartRefusedError(f"shard {request.shard} was not served", why="it is not owned here")
    match request.content:
        case peer_pb2.SHARD_CONTENT_AVERAGE:
            average = await settled(opened.averages[request.shard], until=opened.deadline)
            return average.squared_norm, [pack(average.gradient_S, opened.plan.wire)]
        case peer_pb2.SHARD_CONTENT_STATE_DIGEST:
            named = await settled(opened.states[request.shard], until=opened.deadline)
            return 0.0, [np.frombuffer(bytes.fromhex(named.digest), np.uint8)]
        case peer_pb2.SHARD_CONTENT_STATE:
            state = (await settled(opened.states[request.shard], until=opened.deadline)).state
            return 0.0, [pack(vector, "f32") for vector in (state.weights_P, state.first_P, state.second_P)]
        case _:
            raise PartRefusedError("a shard was not served", why="what is wanted of it is not known")


def _hung_up(context: Any) -> asyncio.Event:
    """An event that is set when the call is over, for whatever reason."""
    event = asyncio.Event()
    context.add_done_callback(lambda _: event.set())
    return event


def _patience_s(context: Any) -> float:
    """How long the caller waits, as it says, but not for ever."""
    remaining_s = context.time_remaining()
    return MAX_CALL_S if remaining_s is None else min(MAX_CALL_S, float(remaining_s))
