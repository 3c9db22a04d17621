"""The newcomers' door under bad callers: each is refused as its own error, no use is spent, the honest one joins."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from coordinator import server
from coordinator.grader import Grader
from node.home import Home
from node.join import join, redeem_request
from protocol.certificates import anchor_pem, certificate_request, new_leaf_key, verify_leaf
from protocol.errors import (
    InviteExpiredError,
    InviteMangledError,
    InviteUnknownError,
    InviteUsedUpError,
    KeyRefusedError,
    RefusedError,
    UnauthenticatedError,
    UnreachableError,
    WorkRefusedError,
)
from protocol.grpc_options import CLIENT_OPTIONS, JOIN_SERVER_OPTIONS
from protocol.ids import InviteId
from protocol.invite import Invite, encode_invite
from protocol.keys import Identity, peer_id_of
from protocol.tls import channel_options
from protocol.v1 import control_pb2, join_pb2
from protocol.v1.control_pb2_grpc import ControlServiceStub
from protocol.v1.join_pb2_grpc import JoinServiceStub
from tests.coordinator.office import DEADLINE_S, Office, serving, typed

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST, SECOND = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
FIELD_PRIME = 2**255 - 19
ORDER_8_Y = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
WEAK_KEYS = [
    (y | sign << 255).to_bytes(32, "little")
    for y in (0, 1, FIELD_PRIME - 1, ORDER_8_Y, FIELD_PRIME - ORDER_8_Y, FIELD_PRIME, FIELD_PRIME + 1)
    for sign in (0, 1)
]


@contextlib.asynccontextmanager
async def door(office: Office) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the join port, which a newcomer dials without a leaf."""
    key = office.home.identity.public_bytes
    options = [*CLIENT_OPTIONS, *channel_options(peer_id_of(key))]
    credentials = grpc.ssl_channel_credentials(anchor_pem(key))
    async with grpc.aio.secure_channel(office.coordinator.addresses["join"], credentials, options=options) as channel:
        yield channel


async def redeem(office: Office, request: join_pb2.RedeemRequest) -> join_pb2.RedeemResponse:
    async with door(office) as channel:
        return await typed(JoinServiceStub(channel).Redeem(request, timeout=DEADLINE_S))


def request_of(identity: Identity, invite: Invite, *, csr: bytes | None = None) -> join_pb2.RedeemRequest:
    if csr is None:
        csr = certificate_request(new_leaf_key(), peer_id=identity.peer_id)
    return redeem_request(identity, invite, csr)


def num_used(office: Office, invite: Invite) -> int:
    return int(office.core.state.invites[invite.invite_id].num_used)


async def test_a_good_invite_gives_a_place(office: Office) -> None:
    invite = await office.invite(role="rollout")
    response = await redeem(office, request_of(FIRST, invite))
    key = office.home.identity.public_bytes
    assert verify_leaf(response.leaf_certificate, coordinator_key=key, now_ms=office.clock()) == FIRST.peer_id
    assert (response.role, response.ca_certificate) == ("rollout", anchor_pem(key))
    assert list(response.control_addresses) == [office.coordinator.addresses["control"]]
    assert num_used(office, invite) == 1


async def test_an_invite_that_the_coordinator_did_not_make_is_unknown(office: Office) -> None:
    invite = await office.invite()
    strangers = [
        replace(invite, secret=b"t" * 16),
        replace(invite, invite_id=InviteId("f" * 16)),
        replace(invite, run_id="ab" * 16),
    ]
    for stranger in strangers:
        with office.refuses(InviteUnknownError, match="Ask the organizer"):
            await redeem(office, request_of(FIRST, stranger))
    await redeem(office, request_of(FIRST, invite))


async def test_an_invite_that_ran_out_is_refused_but_not_to_a_key_that_has_its_place(office: Office) -> None:
    invite = await office.invite(uses=5, lives_ms=60_000)
    await redeem(office, request_of(FIRST, invite))
    office.clock.offset_ms = 61_000
    with office.refuses(InviteExpiredError, match="Ask the organizer"):
        await redeem(office, request_of(SECOND, invite))
    await redeem(office, request_of(FIRST, invite))
    assert num_used(office, invite) == 1
    await redeem(office, request_of(SECOND, await office.invite()))


async def test_two_keys_race_for_the_last_use_and_one_wins(office: Office) -> None:
    invite = await office.invite(uses=1)
    requests = [request_of(identity, invite) for identity in (FIRST, SECOND)]
    results = await asyncio.gather(*(redeem(office, request) for request in requests), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert [type(error) for error in errors] == [InviteUsedUpError]
    assert num_used(office, invite) == len(office.core.state.nodes) == 1
    winner = (FIRST, SECOND)[results.index(errors[0]) - 1]
    before = office.state()
    again = await asyncio.gather(*(redeem(office, request_of(winner, invite)) for _ in range(3)))
    assert len({response.leaf_certificate for response in again}) == 3
    assert office.state() == before


async def test_a_captured_request_brings_nobody_else_in(office: Office) -> None:
    invite = await office.invite(uses=5)
    request = request_of(FIRST, invite)
    await redeem(office, request)
    before = office.state()
    await redeem(office, request)
    assert office.state() == before
    stolen = request_of(SECOND, replace(invite, secret=b"t" * 16))
    for name in ("mac", "nonce", "certificate_request"):
        setattr(stolen, name, getattr(request, name))
    with office.refuses(InviteUnknownError):
        await redeem(office, stolen)


async def test_a_weak_key_is_refused_whatever_it_proves(office: Office) -> None:
    invite = await office.invite(uses=99)
    for key in (*WEAK_KEYS, b"", b"1" * 31, b"1" * 33):
        disguised = replace(FIRST, public_bytes=key)
        request = request_of(disguised, invite)
        request.signature = bytes(64)
        with office.refuses(KeyRefusedError):
            await redeem(office, request)
    assert num_used(office, invite) == 0
    await redeem(office, request_of(FIRST, invite))


async def test_a_signature_or_proof_that_does_not_hold_is_refused(office: Office) -> None:
    invite = await office.invite(uses=99)
    other = request_of(FIRST, invite)
    for signature in (b"", bytes(64), bytes(63), bytes(65), other.signature):
        request = request_of(FIRST, invite)
        request.signature = signature
        with office.refuses(UnauthenticatedError):
            await redeem(office, request)
    for field, value in (("mac", b""), ("mac", bytes(32)), ("nonce", b""), ("nonce", bytes(17)), ("invite_id", "")):
        request = request_of(FIRST, invite)
        setattr(request, field, value)
        with office.refuses(InviteUnknownError):
            await redeem(office, request)
    assert num_used(office, invite) == 0
    await redeem(office, other)


def csr_for(key: Any, algorithm: hashes.HashAlgorithm | None = None) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateSigningRequestBuilder(subject_name=name)
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.DER)


async def test_a_bad_certificate_request_does_not_use_up_the_invite(office: Office) -> None:
    invite = await office.invite(uses=1)
    good = certificate_request(new_leaf_key(), peer_id=FIRST.peer_id)
    requests = {
        "nothing": b"",
        "garbage": b"\x30\x82\xff\xff",
        "cut short": good[:-1],
        "one bit flipped": good[:-5] + bytes([good[-5] ^ 1]) + good[-4:],
        "too long": good + bytes(2048),
        "an Ed25519 key": csr_for(ed25519.Ed25519PrivateKey.generate()),
        "a P-384 key": csr_for(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
    }
    for csr in requests.values():
        with office.refuses(KeyRefusedError):
            await redeem(office, request_of(FIRST, invite, csr=csr))
    assert num_used(office, invite) == 0
    await redeem(office, request_of(FIRST, invite, csr=good))


async def test_a_mangled_invite_is_never_sent(office: Office, home: Path) -> None:
    text, before = encode_invite(await office.invite()), office.state()
    node_home = Home.create(home)
    position = len(text) // 2
    flipped = text[:position] + ("a" if text[position] != "a" else "b") + text[position + 1 :]
    for mangled in (flipped, text[:-1], text + "a", text.upper(), "", "hexcomb1", "hexcomb2" + text[8:]):
        with pytest.raises(InviteMangledError, match="Copy the whole line again"):
            await join(node_home, mangled)
    assert office.state() == before
    assert (await join(node_home, text)).run_id == office.home.run_id


async def test_the_door_opens_to_nothing_else(office: Office) -> None:
    before, big = office.state(), join_pb2.RedeemRequest(certificate_request=bytes(20_000))
    async with door(office) as channel:
        stub = JoinServiceStub(channel)
        with pytest.raises(WorkRefusedError, match="RESOURCE_EXHAUSTED"):
            await typed(stub.Redeem(big, timeout=DEADLINE_S))
        small = join_pb2.RedeemRequest(certificate_request=bytes(2_000))
        with pytest.raises(RefusedError, match="UNIMPLEMENTED"):
            await typed(stub.Redeem(small, timeout=DEADLINE_S, compression=grpc.Compression.Gzip))
        with pytest.raises(RefusedError, match="UNIMPLEMENTED"):
            await typed(ControlServiceStub(channel).GetManifest(control_pb2.GetManifestRequest(), timeout=DEADLINE_S))
    assert office.state() == before
    assert await office.join()


async def closes(address: str) -> bool:
    """Connects, says nothing, and waits for the end; False if there was no connection."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except ConnectionError:
        return False
    try:
        await reader.read()
    except ConnectionError:
        return True
    finally:
        writer.close()
    return True


async def test_strangers_that_say_nothing_do_not_hold_the_door_for_long(
    grader: Grader, base: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"grpc.max_allowed_incoming_connections": 4, "grpc.server_handshake_timeout_ms": 1_000}
    assert changes.keys() <= dict(JOIN_SERVER_OPTIONS).keys()
    options = [(name, changes.get(name, value)) for name, value in JOIN_SERVER_OPTIONS]
    monkeypatch.setattr(server, "JOIN_SERVER_OPTIONS", options)
    async with serving(grader, base, make_home) as office:
        address = office.coordinator.addresses["join"]
        silent = [asyncio.create_task(closes(address)) for _ in range(12)]
        done, open_still = await asyncio.wait(silent, timeout=0.7)
        assert len(open_still) <= 4 < len(done)
        with pytest.raises((UnreachableError, UnauthenticatedError)):
            await asyncio.wait_for(join(Home.create(make_home()), encode_invite(await office.invite())), 5)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*silent)
        assert await office.join()
