"""A bare exchange over gRPC for the averaging bench: the same bytes, the same way, and nothing else. Impure: gRPC.

Every member sends each owner its part of the owner's shard as a stream, the owner adds what comes in float32, divides,
and streams the average to all. Channels, TLS, heap and size of messages are hexcomb's, messages are plain bytes, and
nothing is checked or waited for with a deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from node.training.optimizer import Vector, bytes_of
from node.training.wire import MESSAGE_BYTES
from protocol.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from protocol.heap import steady_heap
from protocol.ids import PeerId
from protocol.round import split_evenly
from protocol.tls import ServedLeaf, channel_credentials, channel_options, server_credentials
from tests.bench.averaging_member import Seating
from tests.training.trainers import COORDINATOR, person

SERVICE = "bench.Exchange"


def make(seating: Seating) -> "Bare":
    """The side, its heap as hexcomb's."""
    steady_heap()
    return Bare(seating)


class Bare:
    """One member: owner of the shard that has its number."""

    def __init__(self, seating: Seating) -> None:
        self._seating, self._who = seating, person(seating.index)
        shards = split_evenly(seating.num_values, tuple(PeerId(str(index)) for index in range(seating.num)))
        self._where = [slice(shard.start, shard.stop) for shard in shards]
        self._average_P = np.empty(seating.num_values, np.float32)
        self._mine = self._average_P[self._where[seating.index]]
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._channels: list[grpc.aio.Channel] = []
        self._own: Vector | None = None
        self._parts: list[Vector] = []
        self._is_reduced = asyncio.Event()

    async def hello(self) -> list[Any]:
        """Listens."""
        handlers = {
            "Push": grpc.stream_unary_rpc_method_handler(self._take_part),
            "Fetch": grpc.unary_stream_rpc_method_handler(self._serve_average),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        credentials = server_credentials(ServedLeaf(self._who.leaf), coordinator_key=COORDINATOR.public_bytes)
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        return [self._who.peer_id, port]

    async def meet(self, places: list[Any]) -> None:
        """Opens a channel to everybody."""
        credentials = channel_credentials(self._who.leaf, coordinator_key=COORDINATOR.public_bytes)
        for peer_id, port in places:
            options = [*CLIENT_OPTIONS, *channel_options(peer_id)]
            self._channels.append(grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options))

    async def fill(self, own_P: Vector) -> None:
        """The member's vector of the next round."""
        self._own = own_P
        self._parts.clear()
        self._is_reduced.clear()

    async def seek(self) -> None:
        """Everybody is known."""

    async def average(self, word: Any) -> dict[str, Any]:
        """Parts out, averages in."""
        assert self._own is not None
        async with asyncio.TaskGroup() as tasks:
            self._add(self._own[self._where[self._seating.index]])
            for index in range(self._seating.num):
                if index != self._seating.index:
                    tasks.create_task(self._push(index, self._own[self._where[index]]))
                    tasks.create_task(self._fetch(index))
            tasks.create_task(self._is_reduced.wait())
        return {"averaged_s": time.monotonic()}

    async def commit(self, word: Any) -> None:
        """Nothing is agreed on."""

    def result(self) -> Vector:
        """The average."""
        self._own = None
        return self._average_P

    async def close(self) -> None:
        """Hangs up."""
        for channel in self._channels:
            await channel.close()
        await self._server.stop(0)

    async def _push(self, owner: int, part_S: Vector) -> None:
        await self._channels[owner].stream_unary(f"/{SERVICE}/Push")(_messages(part_S))

    async def _fetch(self, owner: int) -> None:
        into, position = self._average_P[self._where[owner]].view(np.uint8).data, 0
        async for data in self._channels[owner].unary_stream(f"/{SERVICE}/Fetch")(b""):
            into[position : position + len(data)] = data
            position += len(data)

    async def _take_part(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        part_S, position = np.empty_like(self._mine), 0
        into = part_S.view(np.uint8).data
        async for data in messages:
            into[position : position + len(data)] = data
            position += len(data)
        self._add(part_S)
        return b""

    async def _serve_average(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await self._is_reduced.wait()
        async for data in _messages(self._mine):
            yield data

    def _add(self, part_S: Vector) -> None:
        """Counts a part in; the last one makes the average."""
        self._parts.append(part_S)
        if len(self._parts) == self._seating.num:
            np.add(self._parts[0], self._parts[1], out=self._mine)
            for part in self._parts[2:]:
                self._mine += part
            self._mine /= self._seating.num
            self._parts.clear()
            self._is_reduced.set()


async def _messages(vector: Vector) -> AsyncIterator[bytes]:
    data = bytes_of(vector)
    for start in range(0, len(data), MESSAGE_BYTES):
        yield bytes(data[start : start + MESSAGE_BYTES])
