"""The directory child: `python -m node.directory.worker --socket PATH`, started by the daemon. Impure.

With `--standalone` it is a bootstrap of its own, for whoever hosts one without a daemon (a coordinator starts
it by command line): it prints one line of JSON with its peer id and addresses, and serves until stdin closes.
Invariant: this process never outlives its p2pd, nor p2pd this process.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, NoReturn

import msgspec

from node.torch_guard import block_broken_extras
from protocol.child_serve import Emit, die_with_parent, leave, serve
from protocol.directory import messages
from protocol.errors import EngineError, HexcombError, MachineUnfitError
from protocol.ids import RunId

if TYPE_CHECKING:
    from node.directory.kademlia import Clock, Kademlia

REDIAL_S = 30.0
LONELY_REDIAL_S = 5.0
P2PD_GONE = 71
DUTY_FAILED = 72


class Worker:
    """Answers the daemon's requests; everything but Start needs a Start before."""

    def __init__(self) -> None:
        self._kademlia: Kademlia | None = None
        self._clock: Clock
        self._bootstraps: tuple[str, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []

    async def handle(self, request: messages.Request, emit: Emit) -> msgspec.Struct:
        """One request, one answer; `emit` is not used: a directory says nothing unasked."""
        if isinstance(request, messages.Start):
            return await self.start(request)
        kademlia = self._kademlia
        if kademlia is None:
            raise EngineError("The directory was asked before it was started")
        match request:
            case messages.Publish(record):
                await kademlia.publish(record)
                return messages.Published(kademlia.num_neighbours)
            case messages.List(version):
                nodes = await kademlia.list_records()
                kept = (node for node in nodes if version is None or version in node.record.versions)
                return messages.Listed(tuple(kept))
            case messages.GetStatus():
                return messages.Status(await kademlia.multiaddrs(), kademlia.num_neighbours, kademlia.num_refused)
            case messages.SetBootstraps(bootstraps):
                await kademlia.dial(bootstraps)
                self._bootstraps = bootstraps
                return messages.Done()
            case messages.SetClock(offset_ms):
                self._clock.offset_ms = offset_ms
                return messages.Done()

    async def start(self, request: messages.Start) -> messages.Started:
        """Starts p2pd and joins by those bootstraps that answer; with none it waits for others to come."""
        if self._tasks:
            raise EngineError("The directory was started already")
        try:
            block_broken_extras()
            from node.directory.kademlia import Clock, Kademlia, parse_bootstrap
        except ModuleNotFoundError as error:
            raise MachineUnfitError(
                "The directory cannot run", why=str(error), remedy="Install hexcomb[cpu] or hexcomb[gpu]."
            ) from error
        for maddr in request.bootstraps:
            parse_bootstrap(maddr)
        self._clock = Clock(request.clock_offset_ms)
        kademlia = await Kademlia.start(request, self._clock)
        duties = (self._die_with_p2pd(kademlia), self._redial(kademlia))
        self._tasks = [asyncio.create_task(_fulfil(duty)) for duty in duties]
        await kademlia.dial(request.bootstraps)
        self._kademlia, self._bootstraps = kademlia, request.bootstraps
        return messages.Started(kademlia.peer_id, await kademlia.multiaddrs(), kademlia.p2p_control)

    async def stop(self) -> None:
        """Ends p2pd and its sockets."""
        for task in self._tasks:
            task.cancel()
        if self._kademlia is not None:
            await self._kademlia.stop()

    async def _die_with_p2pd(self, kademlia: "Kademlia") -> NoReturn:
        status = await kademlia.wait_gone()
        print(f"p2pd ended with status {status}", file=sys.stderr)
        leave(P2PD_GONE)

    async def _redial(self, kademlia: "Kademlia") -> NoReturn:
        """A bootstrap that was away does not come back by itself, and neither side would notice."""
        while True:
            await asyncio.sleep(REDIAL_S if kademlia.num_neighbours else LONELY_REDIAL_S)
            await kademlia.dial(self._bootstraps)


async def _fulfil(duty: Coroutine[None, None, NoReturn]) -> None:
    """A duty that fails ends the process: without it the child would look well and be useless."""
    try:
        await duty
    except Exception:
        traceback.print_exc()
        leave(DUTY_FAILED)


async def serve_alone(request: messages.Start) -> NoReturn:
    """A bootstrap without a daemon: prints where it is, serves until stdin ends."""
    die_with_parent()
    worker = Worker()
    started = await worker.start(request)
    print(json.dumps({"peer_id": started.peer_id, "multiaddrs": started.multiaddrs}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
    await worker.stop()
    leave(0)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """`--socket PATH`, or `--standalone` and what a bootstrap needs."""
    parser = argparse.ArgumentParser(prog="python -m node.directory.worker", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--socket", help="the daemon's socket")
    mode.add_argument("--standalone", action="store_true", help="be a bootstrap until stdin closes")
    parser.add_argument("--run-id", help="32 hex digits")
    parser.add_argument("--coordinator-key", help="the coordinator's Ed25519 public key, 64 hex digits")
    parser.add_argument("--identity", help="file with this bootstrap's key as libp2p reads it")
    parser.add_argument("--listen", action="append", help="multiaddress to listen on; may be given again")
    parser.add_argument("--announce", action="append", default=[], help="multiaddress to tell others")
    parser.add_argument("--bootstrap", action="append", default=[], help="another bootstrap's multiaddress")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Runs until the daemon, or whoever holds stdin, is gone."""
    options = parse_arguments(arguments)
    if options.socket:
        worker = Worker()
        asyncio.run(serve(options.socket, worker.handle, requests=messages.Request, on_stop=worker.stop))
    if not (options.run_id and options.coordinator_key and options.identity):
        raise SystemExit("--standalone needs --run-id, --coordinator-key and --identity")
    with tempfile.TemporaryDirectory(prefix="hexcomb-") as run_dir:
        request = messages.Start(
            run_id=RunId(options.run_id),
            coordinator_key=bytes.fromhex(options.coordinator_key),
            identity_path=options.identity,
            run_dir=run_dir,
            listen=tuple(options.listen or ["/ip4/127.0.0.1/tcp/0"]),
            announce=tuple(options.announce),
            bootstraps=tuple(options.bootstrap),
        )
        try:
            asyncio.run(serve_alone(request))
        except HexcombError as error:
            print(error.sentence(), file=sys.stderr)
            leave(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
