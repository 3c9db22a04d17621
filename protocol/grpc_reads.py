"""Reading a stream's messages so that a reader may be cancelled at any time. Impure: gRPC (asyncio).

`grpc.aio` frees what a read has received only when it hands the message over: a read that is itself cancelled while its
message is there keeps it for the life of the process. Invariant: a read is never cancelled; its call is, and that ends
the read.
"""

import asyncio
from typing import Any


async def read_message(call: Any, *, deadline_s: float | None = None) -> Any:
    """The next message of `call`, a `grpc.aio` call with a stream of responses, or `grpc.aio.EOF`.

    Raises `TimeoutError` after `deadline_s` seconds, and what `call.read` raises. A call whose message is no longer
    waited for, for whatever reason, is over.
    """
    reading: asyncio.Task[Any] = asyncio.ensure_future(call.read())
    reading.add_done_callback(_look_at)
    try:
        await asyncio.wait({reading}, timeout=deadline_s)
        if not reading.done():
            raise TimeoutError
        return reading.result()
    finally:
        if not reading.done():
            call.cancel()
            await asyncio.wait({reading})  # for this process's own word on the call, not for the other side's


def _look_at(reading: "asyncio.Task[Any]") -> None:
    """Nobody may be left to ask what the read ended with."""
    if not reading.cancelled():
        reading.exception()
