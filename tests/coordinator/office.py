"""A whole coordinator in the test's process, and honest nodes that join it: real authority and journal, real gRPC with
TLS on loopback, the node's own client code. Only the DHT child is missing."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.core.events import InviteCreated
from coordinator.core.state import encode_state
from coordinator.grader import Grader
from coordinator.home import CoordinatorHome
from coordinator.server import Coordinator
from coordinator.settings import parse_run_file
from node.control import ControlClient
from node.home import Home
from node.join import join
from node.joined import read_leaf
from node.orders import Lease, Order, RoleAssigned, VersionAnnounced, Welcome
from node.session import Session
from node.tokenizer import vocabulary_of, write_tokenizer
from protocol.errors import HexcombError
from protocol.grpc_errors import from_rpc_error
from protocol.ids import Digest, InviteId, LeaseId, RoundId, SlotKey, Version
from protocol.invite import Invite, encode_invite, stored_secret
from protocol.keys import Identity
from protocol.manifest import Body, TensorSpec, digest_of
from protocol.rollout import FinishReason, Piece, Rollout, sign_piece
from protocol.run import EnvironmentSpec
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import piece_message, slot_message

DEADLINE_S = 20.0
SECRET = b"s" * 16
STOP_ID = 1
SUMS = EnvironmentSpec("chain_sum", dict.fromkeys(("min_terms", "max_terms"), 2) | {"max_digits": 1}, "expression")


async def typed(call: Any) -> Any:
    """The answer of a raw gRPC call; its failure as an error of the tree."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def write_base(folder: Path) -> Path:
    """A base folder with a tokenizer and a body of eight numbers; nothing of it is ever computed with."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocabulary_of(["1 + 2 = ?"]), max_length=64)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": STOP_ID, "pad_token_id": 0}))
    tensors, chunks = (TensorSpec("w", (4, 2), "F32"),), (digest_of(b"version 0"),)
    body = Body(None, Version(0), None, tensors, (), 1024, chunks, None)
    (folder / "body.msgpack").write_bytes(body.to_bytes())
    return folder


def run_content(base: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run file: two groups of two slots of at most four tokens make a version; one trainer, one rollout node."""
    content: dict[str, Any] = {
        "name": "test",
        "base": str(base),
        "task": {"environment": SUMS.name, "params": SUMS.params, "prompt": SUMS.prompt, "seed": 7},
        "sampling": {"max_new_tokens": 4},
        "batch": {"groups": 2, "group_size": 2, "max_lag": 1},
        "nodes": {"trainers": 1, "expected": 2, "settle_s": 0.0},
        "limits": {"heartbeat_s": 2.0},
        "listen": dict.fromkeys(("join_port", "control_port", "dht_port", "status_port"), 0),
    }
    for name, section in changes.items():
        content[name] = {**content.get(name, {}), **section}
    return content


@dataclass
class Clock:
    """The machine's clock, moved."""

    offset_ms: int = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


class LonelyCoordinator(Coordinator):
    """A coordinator that keeps out of the DHT."""

    async def _follow_directory(self, announcer: object) -> None:
        await asyncio.Event().wait()


@dataclass
class Office:
    """A running coordinator."""

    coordinator: LonelyCoordinator
    home: CoordinatorHome
    clock: Clock
    make_home: Callable[[], Path]
    members: list["Member"] = field(default_factory=list)

    @property
    def core(self) -> Any:
        return self.coordinator.authority.core

    @property
    def head(self) -> tuple[Version, Digest]:
        return self.core.state.head.version, self.core.state.head.root

    def state(self) -> bytes:
        return encode_state(self.core.state)

    async def invite(self, *, uses: int = 1, role: Any = "auto", lives_ms: int = 3_600_000) -> Invite:
        """An invite of its own number, for its own secret."""
        invite_id = InviteId(f"{len(self.core.state.invites):016x}")
        expires_ms = self.clock() + lives_ms
        event = InviteCreated(invite_id, stored_secret(SECRET).hex(), uses, expires_ms, role)
        await self.coordinator.authority.submit(event)
        return Invite(
            run_id=self.home.run_id,
            coordinator_key=self.home.identity.public_bytes,
            invite_id=invite_id,
            secret=SECRET,
            expires_s=expires_ms // 1000,
            role=role,
            addresses=(self.coordinator.addresses["join"],),
        )

    async def join(self, *, role: str = "auto") -> "Member":
        """A node that has redeemed an invite and has not said hello yet."""
        home = Home.create(self.make_home())
        joined = await join(home, encode_invite(await self.invite(role=role)))
        control = ControlClient(
            addresses=joined.control_addresses, coordinator_key=joined.coordinator_key, leaf=read_leaf(home)
        )
        self.members.append(Member(self, home, control))
        return self.members[-1]

    async def swarm(self) -> tuple["Member", "Member"]:
        """A trainer and a rollout node, each in its role."""
        trainer, rollout = await self.join(role="trainer"), await self.join(role="rollout")
        for member in (trainer, rollout):
            await member.hello()
        for member, role in ((trainer, "trainer"), (rollout, "rollout")):
            assert (await member.wait_for(RoleAssigned)).role == role
        return trainer, rollout

    @contextlib.contextmanager
    def refuses(self, kind: type[HexcombError], *, match: str | None = None) -> Iterator[None]:
        """What happens inside is refused as `kind`, says why or what to do, is counted, and changes nothing."""
        before, count = self.state(), self.coordinator.authority.refusals[kind.code]
        with pytest.raises(kind, match=match) as caught:
            yield
        assert type(caught.value) is kind
        assert caught.value.why or caught.value.remedy
        assert self.state() == before
        assert self.coordinator.authority.refusals[kind.code] > count

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for a condition on the state, which changes only between events; gives its value."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := condition()):  # noqa: ASYNC110 - the core tells nobody
                await asyncio.sleep(0.01)
        return value


@dataclass
class Member:
    """A node as the coordinator sees it, driven by hand. `loaded` is what its heartbeats say."""

    office: Office
    home: Home
    control: ControlClient
    orders: "asyncio.Queue[Order]" = field(default_factory=asyncio.Queue)
    endpoint: str = "127.0.0.1:4001"
    boot_id: str = ""
    loaded: tuple[int, str] = (-1, "")
    session: Session | None = None
    running: "asyncio.Task[None] | None" = None
    retired: list[ControlClient] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return self.home.identity

    async def hello(self) -> Welcome:
        """Opens the session; heartbeats go on until the office closes."""
        self.session = Session(self.control, hello=self.greet, heartbeat=self.beat, deliver=self.orders.put)
        self.running = asyncio.create_task(self.session.run())
        return await self.wait_for(Welcome)

    def greet(self) -> control_pb2.Hello:
        able = common_pb2.Capability(decode_tokens_per_s=10.0, train_tokens_per_s=10.0, device="cpu", reachable=True)
        return control_pb2.Hello(
            program="test", endpoint=self.endpoint, capability=able, name="fox", boot_id=self.boot_id
        )

    def beat(self) -> control_pb2.Heartbeat:
        version, root = self.loaded
        return control_pb2.Heartbeat(
            version=version, root=root, versions_held=[version], activity="testing", trainer_endpoint="127.0.0.1:4002"
        )

    def load(self, version: Version, root: Digest) -> None:
        """The next heartbeat, which goes out now, says so."""
        assert self.session is not None
        self.loaded = (version, root)
        self.session.beat_now()

    async def wait_for(self, kind: type[Any]) -> Any:
        """The next order of a kind; others before it are dropped."""
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(order := await self.orders.get(), kind):
                pass
        return order

    async def lease(self, num_slots: int = 4) -> Lease:
        version, root = self.office.head
        return await self.control.lease_work(version=version, root=root, num_slots=num_slots)

    def pieces(self, slot: SlotKey, *parts: tuple[int, ...], start: int = 0) -> tuple[Piece, ...]:
        """Signed pieces of these tokens, one after the other from `start`, under the head."""
        made: list[Piece] = []
        for token_ids in parts:
            logprobs = tuple(-0.5 for _ in token_ids)
            piece = Piece(self.identity.peer_id, self.office.head[0], start, token_ids, logprobs)
            made.append(sign_piece(self.identity, run_id=self.office.home.run_id, slot=slot, piece=piece))
            start += len(token_ids)
        return tuple(made)

    async def stream(
        self, lease_id: LeaseId, slot: SlotKey, *pieces: Piece | common_pb2.Piece
    ) -> control_pb2.SubmitPiecesResponse:
        """The answer to new pieces of one slot."""
        messages = [piece_message(piece) if isinstance(piece, Piece) else piece for piece in pieces]
        progress = control_pb2.SlotProgress(lease_id=lease_id, slot=slot_message(slot), pieces=messages)
        request = control_pb2.SubmitPiecesRequest(progress=[progress])
        answer = await typed(self.control.stub.SubmitPieces(request, timeout=DEADLINE_S))
        assert isinstance(answer, control_pb2.SubmitPiecesResponse)
        return answer

    async def vanish(self) -> None:
        """The node is gone without a word; it is lost when the coordinator has waited for it."""
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.office.until(lambda: self.identity.peer_id not in self.office.core.state.roles)

    def follow(self, office: "Office") -> None:
        """The same node, at another coordinator of the same run."""
        self.office.members.remove(self)
        self.office = office
        office.members.append(self)
        self.retired.append(self.control)
        self.control = ControlClient(
            addresses=[office.coordinator.addresses["control"]],
            coordinator_key=office.home.identity.public_bytes,
            leaf=read_leaf(self.home),
        )

    def rollout(
        self, slot: SlotKey, token_ids: tuple[int, ...] = (7, 8, STOP_ID), *, signer: Identity | None = None
    ) -> Rollout:
        """A signed rollout of one piece, under the head."""
        signer = signer or self.identity
        piece = Piece(signer.peer_id, self.office.head[0], 0, token_ids, tuple(-0.5 for _ in token_ids))
        signed = sign_piece(signer, run_id=self.office.home.run_id, slot=slot, piece=piece)
        reason: FinishReason = "stop" if token_ids[-1:] == (STOP_ID,) else "length"
        return Rollout(slot, (signed,), reason)

    async def outcome(self, lease: Lease, rollout: Rollout) -> str:
        """The receipt's code for one rollout."""
        (receipt,) = await self.control.submit(lease.lease_id, [rollout])
        return receipt.outcome

    async def fill_batch(self) -> list[Rollout]:
        """As many slots as a version needs, all accepted."""
        lease = await self.lease(4)
        rollouts = [self.rollout(work.slot) for work in lease.slots]
        receipts = await self.control.submit(lease.lease_id, rollouts)
        assert [receipt.outcome for receipt in receipts] == ["ACCEPTED"] * 4
        return rollouts

    async def make_version(self, rollout_node: "Member") -> Version:
        """One whole round with this node as its trainer."""
        round_id = await self.open_round(rollout_node)
        body = self.next_body()
        await self.control.attest(round_id, body=body.to_bytes(), metrics={"loss": 1.0})
        await self.wait_for(VersionAnnounced)
        return body.version

    async def open_round(self, rollout_node: "Member") -> RoundId:
        """Loads the head, has a batch filled, and waits for the plan."""
        self.load(*self.office.head)
        await rollout_node.fill_batch()
        round_ = await self.office.until(lambda: self.office.core.state.round)
        return RoundId(round_.round_id)

    def next_body(self, **changes: Any) -> Body:
        """A body that follows the head."""
        state = self.office.core.state
        version = state.head.version + 1
        fields = {name: getattr(state.head_body, name) for name in Body.__slots__}
        content = {"version": version, "parent": state.head.root, "chunks": (digest_of(b"%d" % version),)}
        return Body(**{**fields, **content, "optimizer": digest_of(b"o"), **changes})

    async def close(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        for control in (*self.retired, self.control):
            await control.close()


@contextlib.asynccontextmanager
async def serving(
    grader: Grader, base: Path, make_home: Callable[[], Path], *, on: Path | None = None, **changes: dict[str, Any]
) -> AsyncIterator[Office]:
    """A coordinator that is ready, until the block ends. `changes` are to sections of the run file; `on` is the home to
    serve, a new one by default."""
    home, clock, stop = CoordinatorHome.ensure(on or make_home()), Clock(), asyncio.Event()
    coordinator = LonelyCoordinator(home, parse_run_file(run_content(base, **changes)), clock=clock)
    office = Office(coordinator, home, clock, make_home)
    running = asyncio.create_task(coordinator.run(grader, stop))
    try:
        await office.until(lambda: running.done() or not coordinator.ready)
        yield office
    finally:
        for member in office.members:
            await member.close()
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await running
