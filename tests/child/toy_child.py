"""A child process for the tests of supervision: does as it is told, good and bad."""

import asyncio
import signal
import socket
import sys

import msgspec

from protocol.child_serve import Emit, serve
from protocol.errors import VersionTooOldError


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    text: str
    num_events: int = 0


class Echoed(msgspec.Struct, frozen=True, tag="echoed"):
    text: str


class Hang(msgspec.Struct, frozen=True, tag="hang"):
    """Never answers; `spin` keeps the event loop busy for ever as well."""

    spin: bool = False


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """How often a Hang was cancelled."""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    typed: bool


class Big(msgspec.Struct, frozen=True, tag="big"):
    num_bytes: int


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Starts a grandchild that would live on; answers its process id."""


class Count(msgspec.Struct, frozen=True, tag="count"):
    value: int


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    number: int


Request = Echo | Hang | Cancelled | Fail | Big | Spawn


class Toy:
    def __init__(self) -> None:
        self.num_cancelled = 0
        self.was_cancelled = asyncio.Event()

    async def handle(self, request: Request, emit: Emit) -> msgspec.Struct:
        match request:
            case Echo(text, num_events):
                for number in range(num_events):
                    await emit(Noticed(number))
                return Echoed(text)
            case Hang(spin):
                await emit(Noticed(-1))
                return await self.hang(spin=spin)
            case Cancelled():
                await self.was_cancelled.wait()
                return Count(self.num_cancelled)
            case Fail(typed):
                if typed:
                    raise VersionTooOldError("v3 is too old", why="v9 is out", remedy="Fetch v9.")
                raise ZeroDivisionError("one over nothing")
            case Big(num_bytes):
                return Echoed("x" * num_bytes)
            case Spawn():
                program = "import signal; signal.pause()"
                return Count((await asyncio.create_subprocess_exec(sys.executable, "-c", program)).pid)

    async def hang(self, *, spin: bool) -> msgspec.Struct:
        while spin:
            continue
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1
            self.was_cancelled.set()
        raise AssertionError("unreachable")


async def main() -> None:
    socket_path, mode, *rest = *sys.argv[2:], ""
    match mode:
        case "die":
            print("the engine room is on fire")
            sys.exit(3)
        case "mute":
            signal.pause()
        case "raw":
            pipe = socket.socket(socket.AF_UNIX)
            pipe.connect(socket_path)
            pipe.sendall(bytes.fromhex(rest[0]))
            signal.pause()
        case _:
            await serve(socket_path, Toy().handle, requests=Request)


if __name__ == "__main__":
    asyncio.run(main())
