"""Real handshakes on loopback: who gets in, who does not, and that refusals come at once."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from protocol.certificates import (
    Leaf,
    anchor_pem,
    certificate_request,
    issue_leaf,
    new_leaf_key,
    self_issued_leaf,
    server_name,
)
from protocol.errors import IdentityError, UnauthenticatedError, UnreachableError
from protocol.ids import PeerId
from protocol.keys import Identity
from protocol.tls import (
    COMPRESSION_OFF,
    ServedLeaf,
    caller_of,
    channel_credentials,
    channel_options,
    join_server_credentials,
    pinned_channel_credentials,
    server_credentials,
)

NODE, OTHER, COORDINATOR, STRANGER = (Identity.from_seed(bytes([value]) * 32) for value in (1, 2, 3, 4))
HOUR_MS = 3_600_000
DEADLINE_S = 10.0

Handler = Callable[[bytes, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[bytes]]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def leaf_of(identity: Identity, *, authority: Identity = COORDINATOR, at_ms: int | None = None) -> Leaf:
    key = new_leaf_key()
    request = certificate_request(key, peer_id=identity.peer_id)
    at_ms = now_ms() if at_ms is None else at_ms
    return Leaf(issue_leaf(authority, request, peer_id=identity.peer_id, now_ms=at_ms), key)


def unusual_leaf(*, ed25519_key: bool) -> tuple[bytes, bytes]:
    """Key and certificate of a well-signed leaf; with an Ed25519 key it is one that gRPC cannot use."""
    key = ed25519.Ed25519PrivateKey.generate() if ed25519_key else ec.generate_private_key(ec.SECP256R1())
    good = x509.load_pem_x509_certificate(leaf_of(NODE).certificate_pem)
    builder = x509.CertificateBuilder(
        issuer_name=good.issuer, subject_name=good.subject, public_key=key.public_key(), serial_number=7
    )
    now = datetime.now(UTC)
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    for extension in good.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = builder.sign(COORDINATOR.private_key, None)
    return key_pem, certificate.public_bytes(serialization.Encoding.PEM)


async def name_caller(_: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    try:
        return caller_of(context, coordinator_key=COORDINATOR.public_bytes, now_ms=now_ms()).encode()
    except UnauthenticatedError as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.sentence())


async def greet(request: bytes, _: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    return b"hello " + request


@contextlib.asynccontextmanager
async def serving(credentials: grpc.ServerCredentials, handler: Handler = name_caller) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[COMPRESSION_OFF])
    method: Any = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": method}),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def call(
    port: int,
    credentials: grpc.ChannelCredentials,
    *,
    expected: PeerId = COORDINATOR.peer_id,
    request: bytes = b"",
    compression: grpc.Compression | None = None,
) -> bytes:
    """One call; a refusal raises within the deadline."""
    options = channel_options(expected)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        method: Any = channel.unary_unary("/test.Test/Call")
        return bytes(await method(request, timeout=DEADLINE_S, compression=compression))


async def assert_refused(port: int, credentials: grpc.ChannelCredentials, **options: Any) -> str:
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(port, credentials, **options)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started < DEADLINE_S / 2, "a refusal must not look like a hang"
    return caught.value.details() or ""


def mutual() -> grpc.ServerCredentials:
    served = ServedLeaf(self_issued_leaf(COORDINATOR, now_ms=now_ms()))
    return server_credentials(served, coordinator_key=COORDINATOR.public_bytes)


def dialling(leaf: Leaf) -> grpc.ChannelCredentials:
    return channel_credentials(leaf, coordinator_key=COORDINATOR.public_bytes)


async def test_members_know_each_other() -> None:
    async with serving(mutual()) as port:
        assert await call(port, dialling(leaf_of(NODE))) == NODE.peer_id.encode()
        assert await call(port, dialling(leaf_of(OTHER))) == OTHER.peer_id.encode()


async def test_members_dial_members() -> None:
    served = ServedLeaf(leaf_of(OTHER))
    async with serving(server_credentials(served, coordinator_key=COORDINATOR.public_bytes)) as port:
        assert await call(port, dialling(leaf_of(NODE)), expected=OTHER.peer_id) == NODE.peer_id.encode()
        details = await assert_refused(port, dialling(leaf_of(NODE)), expected=COORDINATOR.peer_id)
    assert "Hostname" in details


async def test_no_certificate_is_refused() -> None:
    async with serving(mutual()) as port:
        await assert_refused(port, grpc.ssl_channel_credentials(anchor_pem(COORDINATOR.public_bytes)))
        assert await call(port, dialling(leaf_of(NODE))) == NODE.peer_id.encode()


@pytest.mark.parametrize(
    "leaf",
    [
        leaf_of(NODE, authority=STRANGER),
        leaf_of(NODE, authority=NODE),
        leaf_of(NODE, at_ms=now_ms() - 25 * HOUR_MS),
        leaf_of(NODE, at_ms=now_ms() + 7 * HOUR_MS),
    ],
    ids=["unknown authority", "its own authority", "expired", "hours in the future"],
)
async def test_a_bad_client_leaf_is_refused(leaf: Leaf) -> None:
    async with serving(mutual()) as port:
        await assert_refused(port, dialling(leaf))


async def test_a_leaf_from_a_clock_half_an_hour_ahead_is_accepted() -> None:
    async with serving(mutual()) as port:
        ahead = leaf_of(NODE, at_ms=now_ms() + HOUR_MS // 2)
        assert await call(port, dialling(ahead)) == NODE.peer_id.encode()


@pytest.mark.parametrize(
    "leaf",
    [leaf_of(COORDINATOR, authority=STRANGER), leaf_of(COORDINATOR, at_ms=now_ms() - 25 * HOUR_MS), leaf_of(OTHER)],
    ids=["unknown authority", "expired", "another member"],
)
async def test_a_bad_server_leaf_is_refused(leaf: Leaf) -> None:
    credentials = server_credentials(ServedLeaf(leaf), coordinator_key=COORDINATOR.public_bytes)
    async with serving(credentials) as port:
        await assert_refused(port, dialling(leaf_of(NODE)))


async def test_a_leaf_of_two_names_passes_tls_and_not_the_handler() -> None:
    """What TLS does not look at, `caller_of` does."""
    key = new_leaf_key()
    good = x509.load_pem_x509_certificate(leaf_of(NODE).certificate_pem)
    public_key = serialization.load_pem_private_key(key, None).public_key()
    builder = x509.CertificateBuilder(
        issuer_name=good.issuer,
        subject_name=good.subject,
        public_key=public_key,  # type: ignore[arg-type]
        serial_number=7,
    )
    builder = builder.not_valid_before(good.not_valid_before_utc).not_valid_after(good.not_valid_after_utc)
    names = [
        x509.DNSName(server_name(NODE.peer_id)),
        x509.UniformResourceIdentifier(f"hexcomb://{OTHER.peer_id}"),
    ]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    certificate = builder.sign(COORDINATOR.private_key, None).public_bytes(serialization.Encoding.PEM)
    async with serving(mutual()) as port:
        with pytest.raises(grpc.aio.AioRpcError, match="DNS name is not the one of its peer id"):
            await call(port, dialling(Leaf(certificate, key)))


def test_a_call_without_tls_has_no_caller() -> None:
    class Plain:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

    with pytest.raises(UnauthenticatedError, match="showed no certificate"):
        caller_of(Plain(), coordinator_key=COORDINATOR.public_bytes, now_ms=now_ms())


async def test_an_ed25519_leaf_fails_clearly_and_at_once() -> None:
    key_pem, certificate_pem = unusual_leaf(ed25519_key=True)
    with pytest.raises(IdentityError, match="Use a P-256 leaf"):
        dialling(Leaf(certificate_pem, key_pem))
    with pytest.raises(IdentityError, match="Use a P-256 leaf"):
        ServedLeaf(Leaf(certificate_pem, key_pem))
    anchor = anchor_pem(COORDINATOR.public_bytes)
    async with serving(mutual()) as port:  # a peer that does not ask this code is refused at once
        await assert_refused(port, grpc.ssl_channel_credentials(anchor, key_pem, certificate_pem))
        key_pem, certificate_pem = unusual_leaf(ed25519_key=False)
        assert await call(port, grpc.ssl_channel_credentials(anchor, key_pem, certificate_pem))


async def test_a_renewed_leaf_is_served_without_a_restart() -> None:
    served = ServedLeaf(leaf_of(COORDINATOR, at_ms=now_ms() - 25 * HOUR_MS))
    async with serving(server_credentials(served, coordinator_key=COORDINATOR.public_bytes)) as port:
        await assert_refused(port, dialling(leaf_of(NODE)))
        served.replace(leaf_of(COORDINATOR))
        assert await call(port, dialling(leaf_of(NODE))) == NODE.peer_id.encode()
        assert await call(port, dialling(leaf_of(OTHER))) == OTHER.peer_id.encode()
        served.replace(leaf_of(OTHER))
        await assert_refused(port, dialling(leaf_of(NODE)))


async def test_a_compressed_message_is_refused() -> None:
    async with serving(mutual()) as port:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(port, dialling(leaf_of(NODE)), request=bytes(100_000), compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def joining(leaf: Leaf) -> grpc.ServerCredentials:
    return join_server_credentials(ServedLeaf(leaf))


async def pinned(port: int, *, deadline_s: float = DEADLINE_S) -> grpc.ChannelCredentials:
    return await asyncio.to_thread(pinned_channel_credentials, "127.0.0.1", port, COORDINATOR.public_bytes, deadline_s)


async def test_a_newcomer_reaches_the_coordinator_that_the_invite_names() -> None:
    async with serving(joining(leaf_of(COORDINATOR)), greet) as port:
        assert await call(port, await pinned(port), request=b"you") == b"hello you"


@pytest.mark.parametrize(
    "leaf",
    [
        leaf_of(STRANGER, authority=STRANGER),
        leaf_of(COORDINATOR, authority=STRANGER),
        leaf_of(OTHER),
        leaf_of(COORDINATOR, at_ms=now_ms() - 25 * HOUR_MS),
    ],
    ids=["own certificate", "own authority, coordinator's name", "a member's leaf", "expired"],
)
async def test_a_man_in_the_middle_is_found_and_named(leaf: Leaf) -> None:
    """The newcomer sends nothing; and were the look skipped, the handshake would refuse by itself."""
    requests: list[bytes] = []

    async def steal(request: bytes, _: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        requests.append(request)
        return b""

    async with serving(joining(leaf), steal) as port:
        with pytest.raises(UnauthenticatedError, match=COORDINATOR.peer_id):
            await pinned(port)
        async with serving(joining(leaf_of(COORDINATOR)), greet) as honest:
            credentials = await pinned(honest)
        await assert_refused(port, credentials, request=b"secret")
    assert requests == []


async def test_a_self_signed_copy_of_the_anchor_is_refused() -> None:
    """An impostor may build the same anchor from the public key; without the private key it signs no leaf."""
    key = ec.generate_private_key(ec.SECP256R1())
    anchor = x509.load_pem_x509_certificate(anchor_pem(COORDINATOR.public_bytes))
    builder = x509.CertificateBuilder(
        issuer_name=anchor.subject, subject_name=anchor.subject, public_key=key.public_key(), serial_number=1
    )
    builder = builder.not_valid_before(anchor.not_valid_before_utc).not_valid_after(anchor.not_valid_after_utc)
    name = x509.SubjectAlternativeName([x509.DNSName(server_name(COORDINATOR.peer_id))])
    builder = builder.add_extension(name, critical=False)
    fake = builder.sign(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)), None)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain = fake.public_bytes(serialization.Encoding.PEM) + anchor.public_bytes(serialization.Encoding.PEM)
    async with serving(grpc.ssl_server_credentials([(key_pem, chain)]), greet) as port:
        with pytest.raises(UnauthenticatedError):
            await pinned(port)
        await assert_refused(port, grpc.ssl_channel_credentials(anchor_pem(COORDINATOR.public_bytes)))


@contextlib.contextmanager
def answering(answer: bytes | None) -> Iterator[int]:
    """A TCP port that says `answer` to one caller and hangs up, or says nothing and holds the line."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                if answer is not None:
                    connection.sendall(answer)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):
                        pass

        done = pool.submit(talk)
        yield listener.getsockname()[1]
        done.result(DEADLINE_S)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "plain text"])
async def test_whoever_does_not_speak_tls_is_unreachable(answer: bytes | None) -> None:
    started = time.monotonic()
    with answering(answer) as port, pytest.raises(UnreachableError, match=f"127.0.0.1:{port}"):
        await pinned(port, deadline_s=0.3)
    assert time.monotonic() - started < DEADLINE_S / 2


async def test_a_closed_port_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UnreachableError, match="Check the address"):
            await pinned(unused.getsockname()[1], deadline_s=1.0)


def test_python_ssl_and_grpc_agree_on_the_anchor() -> None:
    """The look of `pinned_channel_credentials` is by OpenSSL; both must accept an anchor whose own
    signature is void."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=anchor_pem(COORDINATOR.public_bytes).decode())
    assert len(context.get_ca_certs()) == 1
