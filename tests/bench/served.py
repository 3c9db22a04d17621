"""The two servers of the benches, each in a process of its own: a real coordinator, and a bare gRPC echo beside it.

`python -m tests.bench.served coordinator|echo FOLDER NUM_NODES` writes FOLDER/<kind>.json when it is ready and ends
with its standard input. The coordinator is the product's own: TLS, journal with durable commits, signature checks,
a grading child; its nodes are enrolled in the same process, since joining is not what is measured. The echo answers a
call with the call's own message, over the same TLS.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from coordinator.core.events import InviteCreated, InviteRedeemed
from coordinator.grader import Grader
from coordinator.home import CoordinatorHome
from coordinator.server import Coordinator, clock_ms, raise_file_limit, tune_interpreter
from coordinator.settings import parse_run_file
from protocol.certificates import certificate_request, issue_leaf, new_leaf_key, self_issued_leaf
from protocol.grpc_options import SERVER_OPTIONS
from protocol.ids import InviteId, Version
from protocol.keys import Identity
from protocol.run import EnvironmentSpec
from protocol.tls import ServedLeaf, server_credentials
from protocol.v1 import control_pb2
from tests.coordinator.office import LonelyCoordinator, write_base

MAX_NEW_TOKENS = 240
START_DEADLINE_S, STOP_DEADLINE_S = 90.0, 30.0
SERVICE = "protocol.v1.ControlService"


def run_content(base: Path, *, group_size: int, heartbeat_s: float) -> dict[str, Any]:
    """A run whose limits never stand in the way: what holds a node back is the coordinator alone."""
    return {
        "name": "bench",
        "base": str(base),
        "task": {"environment": "flat", "seed": 7},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        "batch": {"groups": 16_384, "group_size": group_size, "max_lag": 1, "max_concurrent_groups": 32_768},
        "nodes": {"trainers": 1, "expected": 2, "settle_s": 0.0},
        "limits": {"heartbeat_s": heartbeat_s, "lease_s": 600.0},
        "listen": dict.fromkeys(("join_port", "control_port", "dht_port", "status_port"), 0),
    }


def identity_of(number: int) -> Identity:
    """The key of a bench's node; number 0 is the trainer."""
    return Identity.from_seed(number.to_bytes(32, "big"))


@dataclass(frozen=True, slots=True)
class Place:
    """What a server tells its clients: where it is, who it is, and each node's leaf (certificate, key; PEM)."""

    address: str
    status: str
    pid: int
    run_id: str
    coordinator_key: str
    version: int
    root: str
    leaves: list[tuple[str, str]]


async def enrol(
    coordinator: Coordinator, home: CoordinatorHome, num_nodes: int, *, num_leaves: int | None = None
) -> list[tuple[str, str]]:
    """A place for one trainer and `num_nodes` rollout nodes; leaves of the first `num_leaves` (None = of all)."""
    expires_ms, submit = clock_ms() + 3_600_000, coordinator.authority.submit
    for role in ("trainer", "rollout"):
        await submit(InviteCreated(InviteId(role), "00", num_nodes + 1, expires_ms, role))  # type: ignore[arg-type]
    identities = [identity_of(number) for number in range(num_nodes + 1)]
    await submit(InviteRedeemed(InviteId("trainer"), identities[0].peer_id))
    await asyncio.gather(*(submit(InviteRedeemed(InviteId("rollout"), one.peer_id)) for one in identities[1:]))
    key_pem = new_leaf_key()  # one key for all leaves: making them is not what is measured
    request = certificate_request(key_pem, peer_id=identities[0].peer_id)
    return [
        (issue_leaf(home.identity, request, peer_id=one.peer_id, now_ms=clock_ms()).decode(), key_pem.decode())
        for one in identities[:num_leaves]
    ]


async def serve_coordinator(folder: Path, num_nodes: int, *, group_size: int, heartbeat_s: float) -> None:
    """A coordinator until standard input ends."""
    raise_file_limit()
    tune_interpreter()
    base, home, stop = write_base(folder / "base"), CoordinatorHome.ensure(folder / "home"), asyncio.Event()
    run = parse_run_file(run_content(base, group_size=group_size, heartbeat_s=heartbeat_s))
    coordinator = LonelyCoordinator(home, run)
    grader = Grader(
        EnvironmentSpec("flat"),
        model_dir=base,
        run_dir=home.runtime_folder,
        log_path=folder / "grader.log",
        worker="tests.bench.flat_grader",
    )
    async with grader:
        running = asyncio.create_task(coordinator.run(grader, stop))
        while coordinator.ready and not running.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        leaves = await enrol(coordinator, home, num_nodes)
        head = coordinator.authority.core.state.head
        assert head is not None
        announce(folder / "coordinator.json", coordinator.addresses, home, leaves, head.version, head.root)
        ending = asyncio.create_task(_input_ends())
        await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await running


async def serve_echo(folder: Path) -> None:
    """A server that gives every message back, until standard input ends. It shows a leaf of the same run."""
    raise_file_limit()
    tune_interpreter()
    home = CoordinatorHome.open(folder / "home")
    leaf = ServedLeaf(self_issued_leaf(home.identity, now_ms=clock_ms()))
    server = grpc.aio.server(options=SERVER_OPTIONS)

    async def echo(request: Any, context: Any) -> Any:
        return request

    kinds = {"SubmitRollouts": control_pb2.SubmitRolloutsRequest, "LeaseWork": control_pb2.LeaseWorkRequest}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            echo, request_deserializer=kind.FromString, response_serializer=kind.SerializeToString
        )
        for name, kind in kinds.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    credentials = server_credentials(leaf, coordinator_key=home.identity.public_bytes)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    announce(folder / "echo.json", {"control": f"127.0.0.1:{port}", "status": ""}, home, [], Version(0), "")
    await _input_ends()
    await server.stop(None)


def announce(
    path: Path,
    addresses: dict[str, str],
    home: CoordinatorHome,
    leaves: list[tuple[str, str]],
    version: Version,
    root: str,
) -> None:
    """Writes the place in one step."""
    content = {
        "address": addresses["control"],
        "status": addresses["status"],
        "pid": os.getpid(),
        "run_id": home.run_id,
        "coordinator_key": home.identity.public_bytes.hex(),
        "version": version,
        "root": root,
        "leaves": leaves,
    }
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)


async def _input_ends() -> None:
    await asyncio.to_thread(sys.stdin.read)


def start(kind: str, folder: Path, *arguments: object) -> "subprocess.Popen[Any]":
    """Starts a server; it ends when `stop` is called, or this process dies."""
    command = [sys.executable, "-m", "tests.bench.served", kind, str(folder), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def await_place(process: "subprocess.Popen[Any]", path: Path, *, deadline_s: float = START_DEADLINE_S) -> Place:
    """What the server at `path` tells, once it is ready. Raises `RuntimeError` if it ends or is late."""
    ends_at = time.monotonic() + deadline_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > ends_at:
            raise RuntimeError(f"the server that writes {path} did not start")
        time.sleep(0.05)
    return read_place(path)


def read_place(path: Path) -> Place:
    """The place that a server wrote."""
    return Place(**json.loads(path.read_text()))


def stop(process: "subprocess.Popen[Any]") -> None:
    """Ends a process in order, or by force."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> None:
    """See the module's words."""
    kind, folder = arguments[0], Path(arguments[1])
    if kind == "echo":
        uvloop.run(serve_echo(folder))
    else:
        num_nodes, group_size, heartbeat_s = int(arguments[2]), int(arguments[3]), float(arguments[4])
        uvloop.run(serve_coordinator(folder, num_nodes, group_size=group_size, heartbeat_s=heartbeat_s))


if __name__ == "__main__":
    main(sys.argv[1:])
