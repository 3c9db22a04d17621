"""The child's side of the pipe to the daemon: answer requests concurrently, emit events, end with the daemon.
Impure.

Invariant: the process does not outlive the daemon. It ends when the socket closes, and on Linux the kernel
kills it when the daemon dies, even while the event loop is busy.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec

from protocol import child_wire as wire
from protocol.errors import EngineError, HexcombError

Emit = Callable[[msgspec.Struct], Awaitable[None]]
"""Sends one event to the daemon; waits while the daemon has no room for it."""
Handler = Callable[[Any, Emit], Awaitable[msgspec.Struct]]
"""Answers one request; what it raises reaches the caller. It is cancelled when the caller no longer waits."""

STOP_DEADLINE_S = 4.0
PROTOCOL_BROKEN = 70
_PR_SET_PDEATHSIG = 1


async def read_envelope(reader: asyncio.StreamReader, *, max_bytes: int = wire.MAX_FRAME_BYTES) -> wire.Envelope:
    """The next envelope; raises IncompleteReadError at the end, EngineError for what breaks the protocol."""
    header = await reader.readexactly(wire.HEADER_BYTES)
    return wire.decode_envelope(await reader.readexactly(wire.payload_bytes(header, max_bytes=max_bytes)))


async def serve(
    socket_path: str,
    handler: Handler,
    *,
    requests: Any,
    on_stop: Callable[[], Awaitable[None]] | None = None,
) -> NoReturn:
    """Connects to the daemon and answers until it is gone, then ends the process.

    `requests` is the union of the Structs that `handler` takes. On SIGTERM `on_stop` runs, for a bounded
    time.
    """
    die_with_parent()
    reader, writer = await asyncio.open_unix_connection(socket_path)
    pipe = _Pipe(writer, handler, requests)
    stop = on_stop or _nothing
    stopping: list[asyncio.Task[NoReturn]] = []
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: stopping.append(asyncio.create_task(_stop(stop)))
    )
    await pipe.write(wire.encode_frame(wire.Hello()))
    async with asyncio.TaskGroup() as tasks:
        while True:
            # No unwinding at the end: a handler that will not stop must not keep the process.
            try:
                pipe.take(await read_envelope(reader), tasks)
            except (asyncio.IncompleteReadError, ConnectionError):
                leave(0)
            except EngineError:
                traceback.print_exc()
                leave(PROTOCOL_BROKEN)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(status: int) -> NoReturn:
    """Ends the process at once: no exit handler and no thread of a library can hold it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


class _Pipe:
    def __init__(self, writer: asyncio.StreamWriter, handler: Handler, requests: Any) -> None:
        self._writer, self._handler, self._requests = writer, handler, requests
        self._running: dict[int, asyncio.Task[None]] = {}

    async def write(self, frame: bytes) -> None:
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError:
            leave(0)

    async def emit(self, event: msgspec.Struct) -> None:
        await self.write(wire.encode_frame(wire.Event(wire.encode_body(event))))

    def take(self, envelope: wire.Envelope, tasks: asyncio.TaskGroup) -> None:
        match envelope:
            case wire.Request(request_id, body):
                task = tasks.create_task(self._answer(request_id, body))
                self._running[request_id] = task
                task.add_done_callback(lambda _: self._running.pop(request_id))
            case wire.Cancel(request_id):
                if request_id in self._running:
                    self._running[request_id].cancel()
            case _:
                raise EngineError(f"The daemon sent an unexpected {type(envelope).__name__}")

    async def _answer(self, request_id: int, body: msgspec.Raw) -> None:
        try:
            reply = await self._handler(wire.decode_body(body, self._requests), self.emit)
            frame = wire.encode_frame(wire.Reply(request_id, wire.encode_body(reply)))
        except Exception as error:
            if not isinstance(error, HexcombError):
                traceback.print_exc()
            frame = wire.encode_frame(wire.failure_of(request_id, error))
        await self.write(frame)


async def _nothing() -> None:
    return


async def _stop(on_stop: Callable[[], Awaitable[None]]) -> NoReturn:
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await on_stop()
    except Exception:
        traceback.print_exc()
    leave(0)
