"""Supervision of one child process, the daemon's side: start, requests with deadlines, events, death. Impure.

The daemon listens on a socket in its private run-time folder, starts `python -m MODULE --socket PATH` in a
process group of its own, and keeps the one connection that comes. Invariants: every request ends in a reply,
an error of the tree or its deadline, and a dead child ends all of them at once; nothing in the child's group
outlives `wait_closed`. Whether a dead child is started again is the caller's decision. The child's side is
`serve`, in `child_serve.py`.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from protocol import child_wire as wire
from protocol.child_serve import Emit, Handler, read_envelope, serve
from protocol.child_session import ProcessGroup, check_private, open_log, read_tail
from protocol.errors import EngineError, HexcombError, MachineUnfitError, UnreachableError

__all__ = ["ChildProcess", "Emit", "Handler", "serve"]

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

EXIT_DEADLINE_S = 3.0
"""From the end of the connection to SIGKILL."""
LAST_WORDS_DEADLINE_S = 1.0
"""From the child's exit to the end of reading what it left in the pipe."""
STREAM_BUFFER_BYTES = 2**20
MAX_RUN_DIR_BYTES = 76
"""A socket's path has at most 103 bytes on some systems; children add names of up to 27 of their own."""

UNTRUSTED_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
MAX_UNTRUSTED_FRAME_BYTES = 2**20


class ChildProcess:
    """One running child; made by `start`, over when `wait_closed` returns."""

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        process: asyncio.subprocess.Process,
        *,
        log_path: Path,
        log_start: int,
    ) -> None:
        self.name, self.log_path = name, log_path
        self._group, self._process, self._log_start = group, process, log_start
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._closed, self._news = asyncio.Event(), asyncio.Event()
        self._complaint = ""
        self._stopping = False
        self._max_frame_bytes = wire.MAX_FRAME_BYTES
        self._event_kind: Any = None
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._supervisor: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        run_dir: Path,
        log_path: Path,
        deadline_s: float,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        events: Any = None,
        max_queued_events: int = 256,
        is_trusted: bool = True,
    ) -> Self:
        """Starts `python -m module` and returns once it has said hello; raises EngineError with its last
        lines.

        `events` is the type (a tagged union of Structs) of what the child says unasked. While
        `max_queued_events` wait, nothing more is read from the child: whoever awaits replies must not be the
        only reader of events. A child that is not trusted gets no environment but `UNTRUSTED_ENVIRONMENT`, and
        may send no more than `MAX_UNTRUSTED_FRAME_BYTES` at once.
        """
        check_private(run_dir)
        socket_path = run_dir / f"{secrets.token_hex(6)}.sock"
        if len(os.fsencode(run_dir)) > MAX_RUN_DIR_BYTES or not run_dir.is_absolute():
            raise MachineUnfitError(
                f"The run-time folder's path is relative or too long: {run_dir}",
                remedy="Choose a shorter one.",
            )
        arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if arrived.done():
                writer.close()
            else:
                arrived.set_result((reader, writer))

        server = await asyncio.start_unix_server(on_connection, path=socket_path, limit=STREAM_BUFFER_BYTES)
        try:
            environment = {**_inherited(is_trusted=is_trusted), "PYTHONPATH": _import_path(), **(env or {})}
            child = await cls._spawn(module, socket_path, log_path, args=args, environment=environment)
            child._max_frame_bytes = wire.MAX_FRAME_BYTES if is_trusted else MAX_UNTRUSTED_FRAME_BYTES
            child._event_kind, child._events = events, asyncio.Queue(max_queued_events)
            await child._greet(arrived, deadline_s=deadline_s)
        finally:
            server.close()
            socket_path.unlink(missing_ok=True)
        child._supervisor = asyncio.create_task(child._supervise(), name=f"child {child.name}")
        return child

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """Whether the child is gone."""
        return self._closed.is_set()

    async def request(self, body: msgspec.Struct, reply: type[ReplyT], *, deadline_s: float) -> ReplyT:
        """Sends `body`, returns the answer, which must be a `reply`.

        Raises the error of the tree that the child raised, UnreachableError after `deadline_s`, EngineError
        when the child dies first, fails otherwise or answers with another type.
        """
        what = type(body).__name__
        if self.is_closed:
            raise self._death()
        request_id = next(self._ids)
        frame = wire.encode_frame(wire.Request(request_id, wire.encode_body(body)))
        answer = self._pending[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(frame)
                with contextlib.suppress(ConnectionError):  # the supervisor ends the answer with the reason
                    await self._writer.drain()
                raw = await answer
        except TimeoutError:
            raise UnreachableError(
                f"The {self.name} process did not answer {what} within {deadline_s:g} s",
                remedy=f"Its log is {self.log_path}.",
            ) from None
        finally:
            del self._pending[request_id]
            if answer.cancelled() and not self.is_closed:
                self._writer.write(wire.encode_frame(wire.Cancel(request_id)))
        return wire.decode_body(raw, reply)  # type: ignore[no-any-return]

    async def next_event(self) -> Any:
        """The next event, in order; raises EngineError when the child is gone and none is left."""
        while self._events.empty():
            if self.is_closed:
                raise self._death()
            self._news.clear()
            await self._news.wait()
        return self._events.get_nowait()

    async def wait_closed(self) -> EngineError:
        """Waits until nothing of the child is left; returns why it ended, to be raised or logged."""
        await self._closed.wait()
        return self._death()

    async def terminate(self, *, deadline_s: float = 5.0) -> None:
        """SIGTERM to the child; SIGKILL to its whole group after `deadline_s`."""
        self._stopping = True
        if not self.is_closed:
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                await self._closed.wait()
        except TimeoutError:
            self._group.kill()
            await self._closed.wait()

    @classmethod
    async def _spawn(
        cls, module: str, socket_path: Path, log_path: Path, *, args: Sequence[str], environment: Mapping[str, str]
    ) -> Self:
        descriptor, log_start = open_log(log_path)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", module, "--socket", str(socket_path), *args),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        try:
            group = await ProcessGroup.around(process)
        except BaseException:
            process.kill()
            raise
        name = module.removeprefix("node.").removesuffix(".worker")
        return cls(name, group, process, log_path=log_path, log_start=log_start)

    async def _greet(
        self, arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]], *, deadline_s: float
    ) -> None:
        exiting = asyncio.create_task(self._process.wait())
        first: set[asyncio.Future[Any]] = {arrived, exiting}
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if not arrived.done():
                    raise self._death()
                self._reader, self._writer = arrived.result()
                if not isinstance(await read_envelope(self._reader), wire.Hello):
                    raise EngineError(f"The {self.name} process did not say hello first")
        except BaseException as error:
            await self._group.close()
            await exiting
            if arrived.done() and not arrived.cancelled():
                arrived.result()[1].close()
            if isinstance(error, TimeoutError):
                self._complaint = f"it did not start within {deadline_s:g} s"
                raise self._death() from None
            if isinstance(error, asyncio.IncompleteReadError):
                raise self._death() from None
            raise
        finally:
            exiting.cancel()

    async def _supervise(self) -> None:
        reading = asyncio.create_task(self._read())
        exiting = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():
                await asyncio.wait({reading}, timeout=LAST_WORDS_DEADLINE_S)
            elif not self._complaint:
                await asyncio.wait({exiting}, timeout=EXIT_DEADLINE_S)
        finally:
            reading.cancel()
            await self._group.close()
            await exiting
            self._writer.close()
            self._closed.set()
            self._news.set()
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(self._death())

    async def _read(self) -> None:
        """Until the connection ends; what is not of the protocol ends it and becomes the complaint."""
        try:
            while True:
                await self._take(await read_envelope(self._reader, max_bytes=self._max_frame_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except HexcombError as error:
            self._complaint = error.sentence()

    async def _take(self, envelope: wire.Envelope) -> None:
        match envelope:
            case wire.Reply(request_id, body):
                answer = self._pending.get(request_id)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            case wire.Failure(request_id):
                answer = self._pending.get(request_id)
                if answer is not None and not answer.done():
                    answer.set_exception(wire.error_of(envelope))
            case wire.Event(body) if self._event_kind is not None:
                await self._events.put(wire.decode_body(body, self._event_kind))
                self._news.set()
            case _:
                raise EngineError(f"The {self.name} process sent an unexpected {type(envelope).__name__}")

    def _death(self) -> EngineError:
        status = self._process.returncode
        if self._complaint:
            why = self._complaint
        elif self._stopping:
            why = "it was told to stop"
        elif status is not None and status < 0:
            why = f"it was killed by {signal.Signals(-status).name}"
        else:
            why = f"it exited with status {status}"
        error = EngineError(f"The {self.name} process ended", why=why, remedy=f"Its log is {self.log_path}.")
        tail = read_tail(self.log_path, start=self._log_start)
        if tail:
            error.add_note("Its last lines:\n" + "\n".join(tail))
        return error

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return


def _import_path() -> str:
    """The child resolves imports as the daemon does, never from the folder it happens to run in."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _inherited(*, is_trusted: bool) -> dict[str, str]:
    """What a child learns of the daemon's environment."""
    names = os.environ if is_trusted else [name for name in UNTRUSTED_ENVIRONMENT if name in os.environ]
    return {**{name: os.environ[name] for name in names}, "PYTHONUNBUFFERED": "1"}
