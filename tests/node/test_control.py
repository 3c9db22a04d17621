"""The control plane from the node's side: typed errors, idempotent repeats, a session that comes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from node.backoff import Breaker, backoff_s
from node.control import ControlClient, retried
from node.home import Home
from node.orders import LeasesCancelled, Order, PiecesReceived, RoleAssigned, Welcome, order_of
from node.pieces import SlotProgress
from node.session import Session
from protocol.errors import (
    ERRORS_BY_CODE,
    HexcombError,
    NoWorkError,
    RefusedError,
    UnreachableError,
    VersionTooOldError,
)
from protocol.grpc_errors import MAX_FIELD_CHARACTERS, from_rpc_error, to_status
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.rollout import Piece
from protocol.v1 import control_pb2
from protocol.wire import piece_message, piece_of, slot_key, slot_message
from tests.node.fakes import COORDINATOR, SPEC, Control, leaf_for, serving, welcome

SLOT = SlotKey(Version(0), TaskKey("chain_sum", 1, 2), 0)
PIECE = Piece(PeerId("12D3KooWA"), Version(3), 0, (5, 6), (-0.5, -0.25), b"s" * 64)
DEADLINE_S = 10.0


@pytest.fixture
def peer(home: Path) -> Home:
    return Home.create(home)


@contextlib.asynccontextmanager
async def connected(service: Control, peer: Home, *before: str) -> AsyncIterator[ControlClient]:
    async with serving(service) as address:
        leaf = leaf_for(peer.peer_id)
        addresses = (*before, address)
        client = ControlClient(addresses=addresses, coordinator_key=COORDINATOR.public_bytes, leaf=leaf)
        try:
            yield client
        finally:
            await client.close()


async def test_a_lease_comes_as_a_dataclass(peer: Home) -> None:
    work = control_pb2.SlotWork(slot=slot_message(SLOT), prompt_digest="d" * 64, prompt_ids=b"\1\0\0\0")
    response = control_pb2.LeaseWorkResponse(lease_id="ff", slots=[work], remaining_s=9.0)
    async with connected(Control(replies={"LeaseWork": [response]}), peer) as client:
        lease = await client.lease_work(version=Version(0), root=Digest("r"), num_slots=3)
    assert (lease.lease_id, lease.slots[0].slot, lease.slots[0].prompt_ids) == ("ff", SLOT, (1,))
    assert client.rtt_s > 0


async def test_a_slot_comes_with_the_pieces_of_others(peer: Home) -> None:
    pieces = [piece_message(PIECE), piece_message(replace(PIECE, start=2))]
    work = control_pb2.SlotWork(slot=slot_message(SLOT), prompt_digest="d" * 64, pieces=pieces)
    response = control_pb2.LeaseWorkResponse(lease_id="ff", slots=[work], remaining_s=9.0)
    async with connected(Control(replies={"LeaseWork": [response]}), peer) as client:
        lease = await client.lease_work(version=Version(0), root=Digest("r"), num_slots=3)
    assert lease.slots[0].pieces == (PIECE, replace(PIECE, start=2))


async def test_pieces_are_handed_in_and_the_answer_read(peer: Home) -> None:
    response = control_pb2.SubmitPiecesResponse(
        unwanted=[slot_message(SLOT)],
        gaps=[control_pb2.SlotGap(slot=slot_message(SLOT), start=4)],
        leases=[control_pb2.LeaseTime(lease_id="ff", remaining_s=2.5)],
    )
    service = Control(replies={"SubmitPieces": [response]})
    async with connected(service, peer) as client:
        received = await client.submit_pieces([SlotProgress(LeaseId("ff"), SLOT, (PIECE,))])
    assert received == PiecesReceived((SLOT,), ((SLOT, 4),), ((LeaseId("ff"), 2.5),))
    [(_, request)] = service.calls
    [progress] = request.progress
    assert (progress.lease_id, slot_key(progress.slot)) == ("ff", SLOT)
    assert [piece_of(piece) for piece in progress.pieces] == [PIECE]


async def test_pieces_are_not_repeated_by_the_call_itself(peer: Home) -> None:
    service = Control(replies={"SubmitPieces": [grpc.StatusCode.UNAVAILABLE]})
    async with connected(service, peer) as client:
        with pytest.raises(UnreachableError):
            await client.submit_pieces([])
    assert len(service.calls) == 1


@pytest.mark.parametrize("is_fault", [False, True])
async def test_a_lease_given_back_says_whose_fault_it_is(peer: Home, is_fault: bool) -> None:
    service = Control(replies={"ReturnLease": [control_pb2.ReturnLeaseResponse()]})
    async with connected(service, peer) as client:
        await client.return_lease(LeaseId("ff"), reason="why", is_fault=is_fault)
    [(_, request)] = service.calls
    assert (request.lease_id, request.reason, request.is_fault) == ("ff", "why", is_fault)


def test_single_slots_can_be_cancelled() -> None:
    cancelled = control_pb2.LeasesCancelled(lease_ids=["ff"], slots=[slot_message(SLOT)])
    order = order_of(control_pb2.SessionResponse(leases_cancelled=cancelled))
    assert order == LeasesCancelled((LeaseId("ff"),), (SLOT,))


async def test_a_refusal_keeps_its_class_and_words_and_is_not_repeated(peer: Home) -> None:
    refusal = VersionTooOldError("v3 is too old", why="v9 is out", remedy="Fetch v9.")
    service = Control(replies={"LeaseWork": [refusal], "SubmitRollouts": [refusal]})
    async with connected(service, peer) as client:
        with pytest.raises(VersionTooOldError, match=r"v3 is too old because v9 is out\. Fetch v9\."):
            await client.lease_work(version=Version(3), root=Digest(""), num_slots=1)
        with pytest.raises(VersionTooOldError):
            await client.submit(LeaseId("ff"), [])
    assert [name for name, _ in service.calls] == ["LeaseWork", "SubmitRollouts"]


async def test_a_submission_is_repeated_while_nobody_answers(peer: Home) -> None:
    receipt = control_pb2.RolloutReceipt(slot=slot_message(SLOT), outcome="DUPLICATE")
    unavailable = grpc.StatusCode.UNAVAILABLE
    response = control_pb2.SubmitRolloutsResponse(receipts=[receipt])
    service = Control(replies={"SubmitRollouts": [unavailable, grpc.StatusCode.CANCELLED, response]})
    async with connected(service, peer) as client:
        receipts = await client.submit(LeaseId("ff"), [])
    assert [(item.slot, item.is_taken) for item in receipts] == [(SLOT, True)]
    assert len(service.calls) == 3


async def test_repeats_end() -> None:
    num_calls = 0

    async def silent() -> None:
        nonlocal num_calls
        num_calls += 1
        raise UnreachableError("nobody")

    with pytest.raises(UnreachableError):
        await retried(silent, chance=lambda: 0.0, max_attempts=3, base_s=0.0)
    assert num_calls == 3


class Listener:
    """What a session delivers."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.num_hellos = 0

    def session(self, client: ControlClient) -> Session:
        return Session(client, hello=self.hello, heartbeat=self.heartbeat, deliver=self.orders.put)

    def hello(self) -> control_pb2.Hello:
        self.num_hellos += 1
        return control_pb2.Hello(program="test", endpoint=f"127.0.0.1:{self.num_hellos}")

    def heartbeat(self) -> control_pb2.Heartbeat:
        return control_pb2.Heartbeat(version=-1, activity="testing")

    async def next(self) -> Order:
        async with asyncio.timeout(DEADLINE_S):
            return await self.orders.get()


@contextlib.asynccontextmanager
async def running(session: Session) -> AsyncIterator[None]:
    task = asyncio.create_task(session.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def role(name: str) -> control_pb2.SessionResponse:
    return control_pb2.SessionResponse(role_assigned=control_pb2.RoleAssigned(role=name, reason="a test"))


async def test_a_session_says_hello_beats_and_delivers_in_order(peer: Home) -> None:
    service, listener = Control(script=[welcome(), role("trainer"), role("idle")]), Listener()
    async with connected(service, peer) as client, running(listener.session(client)):
        first = await listener.next()
        assert isinstance(first, Welcome)
        assert first.spec == SPEC
        assert [await listener.next() for _ in range(2)] == [
            RoleAssigned("trainer", "a test"),
            RoleAssigned("idle", "a test"),
        ]
        async with asyncio.timeout(DEADLINE_S):
            beats = [await service.heartbeats.get() for _ in range(3)]
    assert {beat.activity for beat in beats} == {"testing"}
    assert [hello.program for hello in service.hellos] == ["test"]


async def test_an_order_that_is_not_understood_is_passed_over(peer: Home) -> None:
    service = Control(script=[welcome(), role("emperor"), control_pb2.SessionResponse(), role("idle")])
    listener = Listener()
    async with connected(service, peer) as client, running(listener.session(client)):
        assert isinstance(await listener.next(), Welcome)
        assert await listener.next() == RoleAssigned("idle", "a test")


async def test_a_session_comes_back_after_the_stream_ends(peer: Home) -> None:
    service, listener = Control(script=[welcome()], hang_up_after=2), Listener()
    async with connected(service, peer) as client:
        session = listener.session(client)
        async with running(session):
            assert isinstance(await listener.next(), Welcome)
            assert isinstance(await listener.next(), Welcome)
            assert session.link.is_up
        assert not session.link.is_up
    assert session.link.num_connects == 2


async def test_a_session_moves_on_from_a_silent_address(peer: Home) -> None:
    service, listener = Control(script=[welcome()]), Listener()
    async with connected(service, peer, "127.0.0.1:9") as client, running(listener.session(client)):
        assert isinstance(await listener.next(), Welcome)
        assert client.address != "127.0.0.1:9"


async def test_a_node_that_knows_more_introduces_itself_again(peer: Home) -> None:
    service, listener = Control(script=[welcome()]), Listener()
    async with connected(service, peer) as client:
        session = listener.session(client)
        async with running(session):
            assert isinstance(await listener.next(), Welcome)
            session.introduce_again()
            assert isinstance(await listener.next(), Welcome)
    assert [hello.endpoint for hello in service.hellos] == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize("kind", sorted(ERRORS_BY_CODE.values(), key=lambda kind: kind.code))
def test_every_error_crosses_grpc_as_itself(kind: type[HexcombError]) -> None:
    error = kind("was nun", why="darum — ganz sicher", remedy="Nochmal.")
    code, details, trailer = to_status(error)
    metadata = grpc.aio.Metadata(*trailer)
    back = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))
    assert (type(back), back.sentence()) == (kind, error.sentence())


def test_long_errors_stay_below_the_limit_of_metadata() -> None:
    error = HexcombError("語" * 5000, why="語" * 5000, remedy="語" * 5000)
    _, details, trailer = to_status(error)
    assert sum(len(value) for _, value in trailer) < 6000
    assert len(details) < 1000
    assert MAX_FIELD_CHARACTERS < 5000


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnreachableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, UnreachableError),
        (grpc.StatusCode.PERMISSION_DENIED, RefusedError),
        (grpc.StatusCode.INTERNAL, HexcombError),
    ],
)
def test_a_status_without_our_trailer_is_an_error_of_the_tree(code: grpc.StatusCode, kind: type[HexcombError]) -> None:
    strange = grpc.aio.Metadata(("hexcomb-error-bin", b"\xc1 not msgpack"))
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), strange, "boom"), doing="a test")
    assert type(error) is kind
    assert "a test" in error.what


def test_an_unknown_code_is_a_refusal_with_its_words() -> None:
    class LaterError(NoWorkError):
        code = "FROM_A_LATER_RELEASE"

    code, details, trailer = to_status(LaterError("no", why="later"))
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details))
    assert (type(error), error.why) == (RefusedError, "later")


def test_backoff_grows_to_its_cap_and_chance_takes_half_at_most() -> None:
    waits = [backoff_s(attempt, chance=0.0, base_s=0.5, cap_s=4.0) for attempt in range(6)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert backoff_s(10_000, chance=0.999, cap_s=4.0) == pytest.approx(2.0, rel=1e-2)


def test_the_breaker_opens_on_a_crash_loop_and_closes_after_a_good_run() -> None:
    breaker = Breaker()
    for _ in range(5):
        assert not breaker.is_open
        breaker = breaker.after_failure(ran_s=1.0)
    assert breaker.is_open
    assert not breaker.after_failure(ran_s=61.0).is_open
