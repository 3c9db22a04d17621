"""Channels from a trainer to the other members of a round: dialled, watched, and read with bounds. Impure:
gRPC.

Invariants: a channel accepts nobody but the member that it is for; a member that cannot be dialled, hangs
up or sends something other than what was asked for is named in the error, unless it names others itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import grpc

from node.training.open_round import OpenRound, blame, suspects_of
from node.training.optimizer import Vector
from node.training.wire import messages_of, pack
from protocol.errors import PartConflictError, RoundStaleError, UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_reads import read_message
from protocol.ids import PeerId
from protocol.round import Member
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub

DIAL_S = 3.0

T = TypeVar("T")
ChannelFactory = Callable[[Member], grpc.aio.Channel]
"""Opens a channel on which TLS accepts nobody but the member."""


class Links:
    """The channels of one trainer, kept from round to round."""

    def __init__(self, channel_factory: ChannelFactory) -> None:
        self._open = channel_factory
        self._channels: dict[Member, grpc.aio.Channel] = {}

    def channel(self, member: Member) -> grpc.aio.Channel:
        """The channel to a member, opened when it is first asked for."""
        if member not in self._channels:
            self._channels[member] = self._open(member)
        return self._channels[member]

    async def keep_only(self, members: Iterable[Member]) -> None:
        """Closes the channels to everybody else."""
        for member in set(self._channels) - set(members):
            await self._channels.pop(member).close()


class RoundLinks:
    """The links of one round; every error is a `RoundStaleError` with suspects."""

    def __init__(self, opened: OpenRound, links: Links) -> None:
        self._round, self._links = opened, links
        self._plan = opened.plan

    async def watch(self, peer_id: PeerId) -> None:
        """Keeps the link to a member alive until cancelled. Raises when the member cannot be dialled any
        more.
        """
        channel = self._links.channel(self._round.members[peer_id])
        while True:
            await self._dial(peer_id)
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    async def push(self, shard: int, part_S: Vector, *, until: float) -> None:
        """Sends this member's part, which is rounded to what the wire carries, to the shard's owner."""
        owner, stub = self._plan.shards[shard].owner, self._stub(shard)

        async def attempt() -> None:
            await stub.PushGradient(self._messages(shard, part_S), timeout=_seconds_until(until))

        try:
            await self._twice(owner, attempt)
        except grpc.aio.AioRpcError as error:
            # What was sent a second time may have been there: then only the first answer was lost.
            if not isinstance(from_rpc_error(error), PartConflictError):
                raise self._blame(owner, error) from error

    async def fetch(
        self, shard: int, content: peer_pb2.ShardContent.ValueType, into: memoryview, *, until: float
    ) -> float:
        """Fills `into` with what the shard's owner has; returns the squared norm in the first message.

        The owner is blamed for sending more or less than `into` holds.
        """
        owner, stub = self._plan.shards[shard].owner, self._stub(shard)
        request = peer_pb2.FetchShardRequest(round_id=self._plan.round_id, shard=shard, content=content)

        async def attempt() -> float | None:
            return await _read(stub.FetchShard(request, timeout=_seconds_until(until)), into)

        try:
            squared_norm = await self._twice(owner, attempt)
        except grpc.aio.AioRpcError as error:
            raise self._blame(owner, error) from error
        if squared_norm is None:
            raise self.blame(owner, "a shard has not the length that the plan says")
        return squared_norm

    def blame(self, peer_id: PeerId, what: str) -> RoundStaleError:
        """The error that names one member."""
        return blame(self._plan.round_id, [peer_id], what)

    def _stub(self, shard: int) -> PeerServiceStub:
        owner = self._plan.shards[shard].owner
        return PeerServiceStub(self._links.channel(self._round.members[owner]))

    async def _twice(self, peer_id: PeerId, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result; a link that breaks is dialled again once."""
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        await self._dial(peer_id)
        return await attempt()

    async def _dial(self, peer_id: PeerId) -> None:
        channel = self._links.channel(self._round.members[peer_id])
        try:
            # Not `wait_for`, which before Python 3.12 may swallow a cancellation; a round would then never end.
            async with asyncio.timeout(min(DIAL_S, self._round.remaining_s)):
                await channel.channel_ready()
        except TimeoutError:
            raise self.blame(peer_id, f"{peer_id} does not answer at its endpoint") from None

    async def _messages(self, shard: int, part_S: Vector) -> AsyncIterator[peer_pb2.PushGradientRequest]:
        offset = 0
        for data in messages_of(pack(part_S, self._plan.wire)):
            yield peer_pb2.PushGradientRequest(round_id=self._plan.round_id, shard=shard, offset=offset, data=data)
            offset += len(data)

    def _blame(self, peer_id: PeerId, error: grpc.aio.AioRpcError) -> RoundStaleError:
        """What a failed call to a member means: it names its suspects, or is one."""
        typed = from_rpc_error(error, doing=f"a call to {peer_id}")
        if isinstance(typed, RoundStaleError):
            return blame(self._plan.round_id, suspects_of(typed, self._plan), typed.what)
        what = f"{peer_id} does not answer" if isinstance(typed, UnreachableError) else typed.sentence()
        return self.blame(peer_id, what)


async def _read(
    call: grpc.aio.UnaryStreamCall[peer_pb2.FetchShardRequest, peer_pb2.FetchShardResponse], into: memoryview
) -> float | None:
    """Fills `into`; None if what comes has not its length."""
    position, squared_norm = 0, 0.0
    try:
        while (message := await read_message(call)) is not grpc.aio.EOF:
            end = position + len(message.data)
            if end > len(into) or (not message.data and into):
                return None
            squared_norm = squared_norm if position else message.squared_norm
            into[position:end] = message.data
            position = end
    finally:
        call.cancel()
    return squared_norm if position == len(into) else None


def _seconds_until(until: float) -> float:
    return max(0.001, until - asyncio.get_running_loop().time())
