"""Reads that are given up: what they received is freed, and nobody waits for the other side."""

import asyncio
import ctypes
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from protocol.certificates import self_issued_leaf
from protocol.grpc_reads import read_message
from protocol.keys import Identity
from protocol.tls import ServedLeaf, channel_credentials, channel_options, server_credentials

COORDINATOR = Identity.from_seed(b"\3" * 32)
MESSAGE = bytes(256 << 10)
NUM_READS = 24
DEADLINE_S = 10.0
ARRIVAL_S = 0.02
"""For so long the loop is busy, while a message that was written comes."""

Read = Callable[[Any], Awaitable[Any]]


class CHeap(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("arena", "o", "s", "h", "mapped", "u", "f", "used", "free", "keep")
    ]


def used_bytes() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("only newer versions of glibc tell what is in use")
    mallinfo2.restype = CHeap
    heap = mallinfo2()
    return int(heap.used + heap.mapped)


class Sender:
    """A server with threads of its own, since the loop of the client is to be busy. It sends one message, and when it
    is told to, another."""

    def __init__(self) -> None:
        self.go, self.is_written = threading.Event(), threading.Event()
        self._leaf = self_issued_leaf(COORDINATOR, now_ms=time.time_ns() // 1_000_000)

    def _send(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield MESSAGE
        assert self.go.wait(DEADLINE_S)
        yield MESSAGE
        self.is_written.set()

    def serve(self) -> tuple[grpc.Server, int]:
        server = grpc.server(ThreadPoolExecutor(2))
        method: Any = grpc.unary_stream_rpc_method_handler(self._send)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": method}),))
        credentials = server_credentials(ServedLeaf(self._leaf), coordinator_key=COORDINATOR.public_bytes)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return server, port

    def dial(self, port: int) -> grpc.aio.Channel:
        credentials = channel_credentials(self._leaf, coordinator_key=COORDINATOR.public_bytes)
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, channel_options(COORDINATOR.peer_id))


async def growth_bytes(read: Read) -> int:
    """What the C heap grows by when reads are cancelled while their message is there already."""
    sender = Sender()
    server, port = sender.serve()
    try:
        async with sender.dial(port) as channel:
            method: Any = channel.unary_stream("/test.Test/Call")
            before = 0
            for turn in range(NUM_READS + 2):
                if turn == 2:
                    before = used_bytes()
                sender.go.clear()
                sender.is_written.clear()
                call = method(b"", timeout=DEADLINE_S)
                assert await read(call) == MESSAGE
                reading = asyncio.ensure_future(read(call))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                sender.go.set()
                assert sender.is_written.wait(DEADLINE_S)
                time.sleep(ARRIVAL_S)  # noqa: ASYNC251 - the loop is busy elsewhere
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
                call.cancel()
                await call.code()
            return used_bytes() - before
    finally:
        server.stop(0).wait()


async def test_what_a_cancelled_read_received_is_freed() -> None:
    assert await growth_bytes(read_message) < 4 * len(MESSAGE)


async def test_the_control_a_read_of_grpc_that_is_cancelled_keeps_its_message() -> None:
    assert await growth_bytes(lambda call: call.read()) > NUM_READS * len(MESSAGE) / 4


class SilentCall:
    """A call whose read ends only with the call."""

    def __init__(self, ending: Exception | None = None) -> None:
        self._over, self._ending = asyncio.Event(), ending
        self.reads = list[str]()

    async def read(self) -> bytes:
        try:
            await self._over.wait()
        except asyncio.CancelledError:
            self.reads.append("cancelled")
            raise
        self.reads.append("ended")
        if self._ending is not None:
            raise self._ending
        return MESSAGE

    def cancel(self) -> None:
        self._over.set()


@pytest.mark.parametrize("ending", [None, ValueError("the stream broke")])
async def test_a_read_that_is_cancelled_ends_by_its_call(ending: Exception | None) -> None:
    call = SilentCall(ending)
    reading = asyncio.ensure_future(read_message(call))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert call.reads == ["ended"]


async def test_a_silent_stream_ends_at_the_deadline() -> None:
    call = SilentCall()
    with pytest.raises(TimeoutError):
        await read_message(call, deadline_s=0.01)
    assert call.reads == ["ended"]


async def test_messages_errors_and_the_end_come_through() -> None:
    outcomes = itertools.chain([b"a", grpc.aio.EOF], itertools.repeat(ValueError("broken")))

    class Call:
        async def read(self) -> Any:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    call = Call()
    assert await read_message(call, deadline_s=DEADLINE_S) == b"a"
    assert await read_message(call) is grpc.aio.EOF
    with pytest.raises(ValueError, match="broken"):
        await read_message(call)
