"""The Unix socket on which a daemon answers its own user: one JSON line in, one JSON line out. Impure.

`{"verb": "status", …}` is answered by `{"schema": 1, …}`, or by `{"error": {code, what, why, remedy}}`, which the
caller raises again as the same class. Invariant: the socket lies in a folder that only its owner can enter, a line
has at most `MAX_LINE_BYTES`, and a caller that says nothing is cut off.
"""

import asyncio
import contextlib
import json
import os
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import HexcombError, UsageError
from protocol.local_ask import answer_in, not_running, request_line, too_late

SCHEMA = 1
MAX_LINE_BYTES = 4 << 20
LINE_DEADLINE_S = 10.0

Verb = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def answering(path: Path, verbs: Mapping[str, Verb]) -> AsyncIterator[None]:
    """Answers at `path` while the block runs. The caller holds the home's lock, so a socket found there is stale."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                answer = await _answer(reader, verbs)
                writer.write(json.dumps(answer).encode() + b"\n")
                async with asyncio.timeout(LINE_DEADLINE_S):
                    await writer.drain()
        finally:
            writer.close()

    _remove(path)
    server = await asyncio.start_unix_server(on_connection, sock=_bind(path), limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        _remove(path)


def _bind(path: Path) -> socket.socket:
    """A socket that is its owner's alone from the first moment. The mask is the whole process's: nothing else may run
    while it is another one."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(os.fspath(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(before)
    return bound


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _answer(reader: asyncio.StreamReader, verbs: Mapping[str, Verb]) -> dict[str, Any]:
    """The answer to the line that comes; raises `TimeoutError` if none does. A fault of a verb is an answer, too."""
    try:
        async with asyncio.timeout(LINE_DEADLINE_S):
            line = await reader.readline()
        request = json.loads(line)
    except (ValueError, RecursionError) as error:  # a line that is too long is a ValueError, too
        return _failure(UsageError("the request is not one line of JSON", why=str(error)))
    try:
        verb = verbs.get(str(request.get("verb"))) if isinstance(request, dict) else None
        if verb is None:
            raise UsageError("the daemon does not know this request", remedy="Use a command line of the same release.")
        return {"schema": SCHEMA, **await verb(request)}
    except HexcombError as error:
        return _failure(error)
    except Exception as error:
        traceback.print_exc()
        what = f"the daemon could not answer: {type(error).__name__}"
        return _failure(HexcombError(what, why=str(error), remedy="Its log has more."))


def _failure(error: HexcombError) -> dict[str, Any]:
    fields = {"code": error.code, "what": error.what, "why": error.why, "remedy": error.remedy}
    return {"schema": SCHEMA, "error": fields}


async def ask(path: Path, verb: str, *, who: str = "daemon", deadline_s: float = 30.0, **fields: Any) -> dict[str, Any]:
    """The answer of whoever listens at `path`. Raises the error that it answers, `DaemonNotRunningError` when nobody
    listens, `UnreachableError` when no answer comes in time."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
            writer.write(request_line(verb, fields))
            try:
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
    except TimeoutError as error:
        raise too_late(who, verb, deadline_s) from error
    except (OSError, ValueError) as error:  # ValueError: it ended in mid-answer
        raise not_running(who, path) from error
    return answer_in(answer)
