"""The clients of the throughput bench, all in one process: `python -m tests.bench.clients FOLDER NUM SECONDS`.

Each client is an enrolled node with its own channel, key and session to the coordinator, and a channel to the echo. It
has one call under way at a time. Rollouts are made and signed before a phase begins, so that a phase costs the client
the same on both sides: send a message that lies ready, read an answer. Every `PROBE_S` a client asks for work, or
sends the same question to the echo. Prints one JSON line: the phases, in the order in which they ran.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop

from protocol.certificates import Leaf
from protocol.grpc_options import CLIENT_OPTIONS
from protocol.ids import RunId, Version
from protocol.keys import Identity, peer_id_of
from protocol.rollout import Piece, Rollout, sign_piece
from protocol.tls import channel_credentials, channel_options
from protocol.v1 import common_pb2, control_pb2
from protocol.v1.control_pb2_grpc import ControlServiceStub
from protocol.wire import rollout_message, slot_key
from tests.bench.served import MAX_NEW_TOKENS, Place, identity_of, read_place

CALL_DEADLINE_S = 20.0
PROBE_S = 0.5
SLOTS_A_PROBE = 16
HEARTBEAT_S, RECONNECT_S = 5.0, 1.0
ROLE_DEADLINE_S = 60.0
ROUNDS_OF_WARM_UP = 3
WARM_ECHO_S = 2.0
MAX_READY = 512
PAIRS = ((1, 3), (16, 2))
"""(rollouts in a call, how often each side is measured so)."""


@dataclass
class Phase:
    """What one phase came to: messages answered as they should, the others, and how long asking for work took."""

    side: str
    rollouts_a_call: int
    seconds: float = 0.0
    num_good: int = 0
    num_bad: int = 0
    server_cpu_s: float = 0.0
    probes_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)


@dataclass
class Client:
    """One node. `ready` are its signed rollouts by lease, not handed in yet."""

    identity: Identity
    run_id: RunId
    version: int
    root: str
    coordinator: ControlServiceStub
    echo: Any
    chance: random.Random
    ready: deque[control_pb2.SubmitRolloutsRequest] = field(default_factory=deque)
    leased: list[control_pb2.LeaseWorkResponse] = field(default_factory=list)
    num_breaks: int = 0
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def question(self) -> control_pb2.LeaseWorkRequest:
        return control_pb2.LeaseWorkRequest(version=self.version, root=self.root, num_slots=SLOTS_A_PROBE)

    async def stay(self, *, trains: bool = False) -> None:
        """Keeps a session as a node does, until cancelled; one that breaks is opened again."""
        while True:
            try:
                await self._session(trains=trains)
            except grpc.aio.AioRpcError as error:
                self.num_breaks += 1
                print(f"a session ended: {error.code()} {error.details()}", file=sys.stderr)
                await asyncio.sleep(RECONNECT_S)

    async def _session(self, *, trains: bool) -> None:
        call = self.coordinator.Session()
        able = common_pb2.Capability(
            decode_tokens_per_s=0.0 if trains else 100.0, train_tokens_per_s=100.0 if trains else 0.0, reachable=True
        )
        await call.write(control_pb2.SessionRequest(hello=control_pb2.Hello(program="bench", capability=able)))
        beat = control_pb2.Heartbeat(version=self.version, root=self.root, activity="testing")

        async def read() -> None:
            while await call.read() is not grpc.aio.EOF:
                self.welcomed.set()

        reading = asyncio.create_task(read())
        try:
            while True:
                await call.write(control_pb2.SessionRequest(heartbeat=beat))
                await asyncio.sleep(HEARTBEAT_S)
        except asyncio.InvalidStateError:  # written after the end of the call: its own error says why
            await call.read()
            raise
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def lease(self) -> bool:
        """Leases some slots; False while there are none for it."""
        try:
            self.leased.append(await self.coordinator.LeaseWork(self.question, timeout=CALL_DEADLINE_S))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED):
                return False
            raise
        return True

    async def prepare(self, num_slots: int, *, rollouts_a_call: int) -> None:
        """Leases slots, as many as it gets up to `num_slots`, and signs a rollout for each."""
        held = [(request.lease_id, rollout) for request in self.ready for rollout in request.rollouts]
        while len(held) + sum(len(lease.slots) for lease in self.leased) < num_slots and await self.lease():
            pass
        for lease in self.leased:
            held += [(lease.lease_id, self._rollout(work.slot)) for work in lease.slots]
            await asyncio.sleep(0)
        self.leased, self.ready = [], deque()
        by_lease: dict[str, list[control_pb2.Rollout]] = {}
        for lease_id, rollout in held:
            by_lease.setdefault(lease_id, []).append(rollout)
        for lease_id, rollouts in by_lease.items():
            for begin in range(0, len(rollouts), rollouts_a_call):
                part = rollouts[begin : begin + rollouts_a_call]
                self.ready.append(control_pb2.SubmitRolloutsRequest(lease_id=lease_id, rollouts=part))

    def _rollout(self, slot: common_pb2.Slot) -> control_pb2.Rollout:
        ids = tuple(self.chance.randrange(2, 60) for _ in range(MAX_NEW_TOKENS))
        logprobs = tuple(-self.chance.random() for _ in range(MAX_NEW_TOKENS))
        piece = Piece(self.identity.peer_id, Version(self.version), 0, ids, logprobs)
        key = slot_key(slot)
        signed = sign_piece(self.identity, run_id=self.run_id, slot=key, piece=piece)
        return rollout_message(Rollout(key, (signed,), "length"))

    async def run(self, phase: Phase, until_s: float, is_over: Callable[[], bool]) -> None:
        """Hands in what is ready, or lets it be echoed, one call after the other."""
        position, next_probe_s = 0, time.monotonic() + self.chance.random() * PROBE_S
        while time.monotonic() < until_s and not is_over():
            began_s = time.monotonic()
            if began_s >= next_probe_s:
                next_probe_s += PROBE_S
                if phase.side == "echo":
                    await self.echo.LeaseWork(self.question)
                    phase.probes_s.append(time.monotonic() - began_s)
                elif await self.lease():
                    phase.probes_s.append(time.monotonic() - began_s)
                continue
            if phase.side == "echo":
                request = self.ready[position % len(self.ready)]
                answer = await self.echo.SubmitRollouts(request)
                num_good = len(answer.rollouts)
            else:
                request = self.ready.popleft()
                answer = await self.coordinator.SubmitRollouts(request, timeout=CALL_DEADLINE_S)
                num_good = sum(receipt.outcome == "ACCEPTED" for receipt in answer.receipts)
            position += 1
            phase.calls_s.append(time.monotonic() - began_s)
            phase.num_good += num_good
            phase.num_bad += len(request.rollouts) - num_good


class Echo:
    """The echo's two methods, each with the same message both ways."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = "/protocol.v1.ControlService"
        for name in ("SubmitRollouts", "LeaseWork"):
            kind = getattr(control_pb2, f"{name}Request")
            method = channel.unary_unary(
                f"{service}/{name}", request_serializer=kind.SerializeToString, response_deserializer=kind.FromString
            )
            setattr(self, name, method)


def dial(place: Place, address: str, number: int) -> grpc.aio.Channel:
    """A channel as a node makes it."""
    certificate, key = place.leaves[number]
    coordinator_key = bytes.fromhex(place.coordinator_key)
    credentials = channel_credentials(Leaf(certificate.encode(), key.encode()), coordinator_key=coordinator_key)
    options = [*CLIENT_OPTIONS, *channel_options(peer_id_of(coordinator_key))]
    return grpc.aio.secure_channel(address, credentials, options=options)


def make_client(place: Place, echo_address: str, number: int) -> Client:
    """The client with that number; it has not said hello yet."""
    return Client(
        identity=identity_of(number),
        run_id=RunId(place.run_id),
        version=place.version,
        root=place.root,
        coordinator=ControlServiceStub(dial(place, place.address, number)),
        echo=Echo(dial(place, echo_address, number)),
        chance=random.Random(number),
    )


async def run_phase(clients: list[Client], side: str, pid: int, *, seconds: float, rollouts_a_call: int) -> Phase:
    """All clients at once, until the time is over or the first of them has nothing left."""
    phase, began_s = Phase(side, rollouts_a_call), time.monotonic()
    server = psutil.Process(pid)
    cpu_s = sum(server.cpu_times()[:2])

    def is_over() -> bool:
        return side != "echo" and not all(client.ready for client in clients)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(client.run(phase, began_s + seconds, is_over))
    phase.seconds = time.monotonic() - began_s
    phase.server_cpu_s = sum(server.cpu_times()[:2]) - cpu_s
    return phase


def tell(phase: Phase) -> None:
    """A line for whoever watches."""
    rate, cpu_us = phase.num_good / phase.seconds, 1e6 * phase.server_cpu_s / max(1, phase.num_good)
    words = f"{phase.side}, {phase.rollouts_a_call} a call: {rate:.0f}/s, {cpu_us:.0f} us of CPU each"
    print(f"{words}; {phase.num_bad} bad, {phase.seconds:.1f} s", file=sys.stderr, flush=True)


async def measure(clients: list[Client], pids: dict[str, int], seconds: float) -> list[Phase]:
    """Warm-up, then echo and coordinator by turns, first one rollout a call, then sixteen."""
    phases: list[Phase] = []

    async def prepare(num_slots: int, rollouts_a_call: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.prepare(num_slots, rollouts_a_call=rollouts_a_call))

    async def phase(side: str, seconds: float, rollouts_a_call: int) -> Phase:
        done = await run_phase(clients, side, pids[side], seconds=seconds, rollouts_a_call=rollouts_a_call)
        tell(done)
        return done

    for _ in range(ROUNDS_OF_WARM_UP):
        await prepare(MAX_READY, 1)
        await phase("coordinator", seconds, 1)
    await prepare(SLOTS_A_PROBE, 1)
    await phase("echo", WARM_ECHO_S, 1)
    for rollouts_a_call, num_pairs in PAIRS:
        await prepare(SLOTS_A_PROBE, rollouts_a_call)
        for _ in range(num_pairs):
            phases.append(await phase("echo", seconds, rollouts_a_call))
            await prepare(MAX_READY, rollouts_a_call)
            phases.append(await phase("coordinator", seconds, rollouts_a_call))
    return phases


async def run(folder: Path, num_clients: int, seconds: float) -> None:
    """Enters the clients, measures, prints."""
    place, echo = read_place(folder / "coordinator.json"), read_place(folder / "echo.json")
    trainer, *clients = [make_client(place, echo.address, number) for number in range(num_clients + 1)]
    sessions = [asyncio.create_task(trainer.stay(trains=True))]
    sessions += [asyncio.create_task(client.stay()) for client in clients]
    async with asyncio.timeout(ROLE_DEADLINE_S):
        for client in clients:
            while not await client.lease():  # noqa: ASYNC110 - until it has its role
                await asyncio.sleep(0.05)
    phases = await measure(clients, {"coordinator": place.pid, "echo": echo.pid}, seconds)
    for session in sessions:
        session.cancel()
    print(json.dumps([asdict(phase) for phase in phases]))


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
