"""A coordinator that says what a test tells it to, over real gRPC and TLS on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from node.home import Home
from node.joined import Joined, write_joined, write_leaf
from protocol.certificates import (
    Leaf,
    anchor_pem,
    certificate_request,
    issue_leaf,
    new_leaf_key,
    self_issued_leaf,
)
from protocol.errors import HexcombError
from protocol.grpc_errors import abort_with
from protocol.grpc_options import SERVER_OPTIONS
from protocol.ids import InviteId, PeerId, RunId
from protocol.invite import Invite, redemption_mac_holds, redemption_statement, stored_secret
from protocol.keys import Identity, peer_id_of, verify
from protocol.membership import Membership, sign_membership
from protocol.run import EnvironmentSpec, OptimizerSpec, RunSpec, SamplingContract
from protocol.tls import ServedLeaf, join_server_credentials, server_credentials
from protocol.v1 import control_pb2, join_pb2
from protocol.v1.control_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server
from protocol.v1.join_pb2_grpc import JoinServiceServicer, add_JoinServiceServicer_to_server

COORDINATOR = Identity.from_seed(b"c" * 32)
RUN_ID = RunId("ab" * 16)
SECRET = b"s" * 16

SPEC = RunSpec(
    run_id=RUN_ID,
    name="test",
    environment=EnvironmentSpec("chain_sum"),
    seed=1,
    sampling=SamplingContract(1.0, 8, (1,), 64),
    optimizer=OptimizerSpec(lr=1e-3),
    groups_per_batch=2,
    group_size=2,
    max_lag=2,
    mode="async",
    heartbeat_s=0.05,
    lease_s=30.0,
    round_s=30.0,
)


async def until(holds: Callable[[], bool]) -> None:
    """Until something holds, which other tasks of this loop are about to bring about."""
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0)


def now_ms() -> int:
    """The clock."""
    return time.time_ns() // 1_000_000


def invite_for(*addresses: str, secret: bytes = SECRET) -> Invite:
    """An invite of the fake coordinator."""
    return Invite(
        run_id=RUN_ID,
        coordinator_key=COORDINATOR.public_bytes,
        invite_id=InviteId("0123456789abcdef"),
        secret=secret,
        expires_s=int(time.time()) + 3600,
        role="auto",
        addresses=addresses,
    )


def stamp_for(peer_id: PeerId) -> bytes:
    """A stamp of membership."""
    return sign_membership(COORDINATOR, Membership(RUN_ID, peer_id, "auto", now_ms(), now_ms() + 3_600_000))


def leaf_for(peer_id: PeerId) -> Leaf:
    """A TLS leaf with its key."""
    key = new_leaf_key()
    request = certificate_request(key, peer_id=peer_id)
    return Leaf(issue_leaf(COORDINATOR, request, peer_id=peer_id, now_ms=now_ms()), key)


def joined_home(home: Home, *control_addresses: str) -> Joined:
    """Makes a home look as after a good join."""
    joined = Joined(
        run_id=RUN_ID,
        coordinator_key=COORDINATOR.public_bytes,
        role="auto",
        stamp=stamp_for(home.peer_id),
        control_addresses=control_addresses,
        bootstraps=(),
        invite="",
    )
    write_leaf(home, leaf_for(home.peer_id))
    write_joined(home, joined)
    return joined


class Door(JoinServiceServicer):
    """Redeems as the real one does; `refusal` is raised instead, `alter` spoils the answer."""

    def __init__(self) -> None:
        self.refusal: HexcombError | None = None
        self.alter: Callable[[join_pb2.RedeemResponse], None] = lambda _: None
        self.num_calls = 0

    async def Redeem(self, request: join_pb2.RedeemRequest, context: Any) -> join_pb2.RedeemResponse:
        self.num_calls += 1
        if self.refusal is not None:
            await abort_with(context, self.refusal)
        fields: dict[str, Any] = {
            "invite_id": InviteId(request.invite_id),
            "public_key": request.public_key,
            "nonce": request.nonce,
            "certificate_request": request.certificate_request,
        }
        assert redemption_mac_holds(stored_secret(SECRET), request.mac, run_id=RUN_ID, **fields)
        statement = redemption_statement(mac=request.mac, **fields)
        verify(request.public_key, kind="redeem", run_id=RUN_ID, payload=statement, signature=request.signature)
        peer_id = peer_id_of(request.public_key)
        response = join_pb2.RedeemResponse(
            ca_certificate=anchor_pem(COORDINATOR.public_bytes),
            leaf_certificate=issue_leaf(COORDINATOR, request.certificate_request, peer_id=peer_id, now_ms=now_ms()),
            membership=stamp_for(peer_id),
            role="auto",
            control_addresses=["127.0.0.1:1"],
        )
        self.alter(response)
        return response


@dataclass
class Control(ControlServiceServicer):
    """Keeps what came; `script` is sent after each hello; `replies` are given by method name, in order."""

    script: list[control_pb2.SessionResponse] = field(default_factory=list)
    replies: dict[str, list[Any]] = field(default_factory=dict)
    hellos: list[control_pb2.Hello] = field(default_factory=list)
    heartbeats: "asyncio.Queue[control_pb2.Heartbeat]" = field(default_factory=asyncio.Queue)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    hang_up_after: int = -1

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        for message in self.script:
            yield message
        num_heartbeats = 0
        async for request in request_iterator:
            await self.heartbeats.put(request.heartbeat)
            num_heartbeats += 1
            if num_heartbeats == self.hang_up_after:
                self.hang_up_after = -1
                return

    async def LeaseWork(self, request: Any, context: Any) -> Any:
        return await self._next("LeaseWork", request, context)

    async def SubmitRollouts(self, request: Any, context: Any) -> Any:
        return await self._next("SubmitRollouts", request, context)

    async def SubmitPieces(self, request: Any, context: Any) -> Any:
        return await self._next("SubmitPieces", request, context)

    async def ReturnLease(self, request: Any, context: Any) -> Any:
        return await self._next("ReturnLease", request, context)

    async def _next(self, name: str, request: Any, context: Any) -> Any:
        self.calls.append((name, request))
        reply = self.replies[name].pop(0)
        if isinstance(reply, HexcombError):
            await abort_with(context, reply)
        if isinstance(reply, grpc.StatusCode):
            await context.abort(reply, "as told")
        return reply


def welcome() -> control_pb2.SessionResponse:
    """The first thing that a coordinator says."""
    message = control_pb2.Welcome(run_spec=SPEC.to_bytes(), now_ms=now_ms(), epoch=1)
    return control_pb2.SessionResponse(welcome=message)


@asynccontextmanager
async def serving(service: Door | Control, *, identity: Identity = COORDINATOR) -> AsyncIterator[str]:
    """Serves on loopback and gives the address."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    served = ServedLeaf(self_issued_leaf(identity, now_ms=now_ms()))
    if isinstance(service, Door):
        add_JoinServiceServicer_to_server(service, server)
        credentials = join_server_credentials(served)
    else:
        add_ControlServiceServicer_to_server(service, server)
        credentials = server_credentials(served, coordinator_key=identity.public_bytes)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
