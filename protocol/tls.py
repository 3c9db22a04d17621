"""gRPC credentials: mutual TLS under the coordinator's anchor, and the pinned channel of a newcomer.
Impure: gRPC, and one blocking connection in `pinned_channel_credentials`.

There is no plaintext mode, and no system root is ever trusted. TLS proves that the other side holds a
leaf which the coordinator signed; *which* member it is, a server reads with `caller_of` and a client
fixes with `channel_options`. That TLS 1.2 is refused is the work of the package's import (see
`protocol`).

A channel keeps the leaf that it was made with, so a node that has renewed its leaf makes new channels; a
server shows a renewed leaf at once, by `ServedLeaf.replace`.
"""

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, cast

import grpc

from protocol.certificates import Leaf, anchor_pem, check_leaf, server_name, verify_leaf
from protocol.endpoint import Endpoint
from protocol.errors import UnauthenticatedError, UnreachableError
from protocol.ids import PeerId
from protocol.keys import peer_id_of

COMPRESSION_OFF = ("grpc.compression_enabled_algorithms_bitset", 1)
"""For servers: a compressed message is refused, so that none can unfold in memory."""


class ServedLeaf:
    """The leaf that servers show, now. Any thread may replace it; handshakes after that show the new one."""

    def __init__(self, leaf: Leaf) -> None:
        check_leaf(leaf)
        self.leaf = leaf

    def replace(self, leaf: Leaf) -> None:
        """Shows `leaf` from the next handshake on. Raises `IdentityError` on one that gRPC would not take."""
        check_leaf(leaf)
        self.leaf = leaf


class CallContext(Protocol):
    """The part of a gRPC servicer context that says who calls."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Properties of the connection; empty without TLS."""
        ...


def server_credentials(served: ServedLeaf, *, coordinator_key: bytes) -> grpc.ServerCredentials:
    """For a port on which both sides show a leaf of the run."""
    return _dynamic_credentials(served, anchor=anchor_pem(coordinator_key))


def join_server_credentials(served: ServedLeaf) -> grpc.ServerCredentials:
    """For the port of Redeem alone: the server shows its leaf, the newcomer has none yet."""
    return _dynamic_credentials(served, anchor=None)


def channel_credentials(leaf: Leaf, *, coordinator_key: bytes) -> grpc.ChannelCredentials:
    """For dialling a member of the run. Raises `IdentityError` on a leaf that gRPC would not take."""
    check_leaf(leaf)
    return grpc.ssl_channel_credentials(anchor_pem(coordinator_key), leaf.key_pem, leaf.certificate_pem)


def channel_options(peer_id: PeerId) -> list[tuple[str, str]]:
    """Channel arguments that make TLS accept nobody but `peer_id`, whatever address is dialled."""
    return [("grpc.ssl_target_name_override", server_name(peer_id))]


def pinned_channel_credentials(
    host: str, port: int, coordinator_key: bytes, deadline_s: float
) -> grpc.ChannelCredentials:
    """For dialling Redeem with nothing but the key that the invite names; use with `channel_options` of
    that key.

    Blocks for up to `deadline_s` seconds (run it in a thread): it makes one TLS 1.3 connection, sends
    nothing on it, and tells apart what gRPC would not. Raises `UnauthenticatedError` if whoever answers
    cannot prove the key, and `UnreachableError` if nobody answers in TLS. The credentials pin the key by
    themselves: an impostor that appears after this look is refused by the handshake.
    """
    anchor = anchor_pem(coordinator_key)
    coordinator = peer_id_of(coordinator_key)
    _look(Endpoint(host, port), anchor=anchor, coordinator=coordinator, deadline_s=deadline_s)
    return grpc.ssl_channel_credentials(anchor)


def caller_of(context: CallContext, *, coordinator_key: bytes, now_ms: int) -> PeerId:
    """The member at the other end of a mutual TLS call, its leaf checked again: a connection outlives a leaf.

    Raises `UnauthenticatedError`.
    """
    certificates = list(context.auth_context().get("x509_pem_cert", ()))
    if len(certificates) != 1:
        raise UnauthenticatedError("a call was refused", why="its caller showed no certificate")
    return verify_leaf(certificates[0], coordinator_key=coordinator_key, now_ms=now_ms)


def _dynamic_credentials(served: ServedLeaf, *, anchor: bytes | None) -> grpc.ServerCredentials:
    def configuration(leaf: Leaf) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(leaf.key_pem, leaf.certificate_pem)], anchor)

    shown = served.leaf

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake; None means no change."""
        nonlocal shown
        leaf = served.leaf
        if leaf is shown:
            return None
        shown = leaf
        return configuration(leaf)

    fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)  # the stubs forget None
    return grpc.dynamic_ssl_server_credentials(configuration(shown), fetcher, anchor is not None)


def _look(endpoint: Endpoint, *, anchor: bytes, coordinator: PeerId, deadline_s: float) -> None:
    """Connects once and lets the handshake judge the server's leaf."""
    ends_at = time.monotonic() + deadline_s
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=anchor.decode("ascii"))
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(endpoint, timeout=deadline_s) as raw:
            raw.settimeout(max(ends_at - time.monotonic(), 0.001))
            context.wrap_socket(raw, server_hostname=server_name(coordinator)).close()
    except ssl.SSLCertVerificationError as error:
        raise UnauthenticatedError(
            f"{endpoint} is not the coordinator {coordinator} that the invite names",
            why=f"it does not hold that key: {error.verify_message}",
            remedy="Nothing was sent. Somebody may sit in between: ask the organizer for the right address.",
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"no coordinator answers at {endpoint} within {deadline_s:g} s",
            why=str(error) or type(error).__name__,
            remedy="Check the address, the network, and that the coordinator runs.",
        ) from error
