"""The door for newcomers: an invite and a key against a place in the run. Impure: gRPC.

It listens on a port of its own, since a newcomer has no certificate yet; nothing but `Redeem` is served there. The
order of checks is cheapest first, and nothing is written before all of them hold.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from coordinator.authority import Authority
from coordinator.core.events import InviteRedeemed
from coordinator.home import CoordinatorHome
from protocol.certificates import anchor_pem, check_request, issue_leaf
from protocol.errors import HexcombError, InviteUnknownError
from protocol.grpc_errors import abort_with
from protocol.ids import InviteId, PeerId
from protocol.invite import redemption_mac_holds, redemption_statement
from protocol.keys import check_public_key, peer_id_of, verify
from protocol.membership import Membership, sign_membership
from protocol.v1 import join_pb2, join_pb2_grpc

MEMBERSHIP_MS = 24 * 3600 * 1000


class Registrar:
    """Signs what a member of the run needs: its TLS leaf and its stamp."""

    def __init__(self, home: CoordinatorHome, authority: Authority, clock: Callable[[], int]) -> None:
        self._home, self._authority, self._clock = home, authority, clock

    def sign(self, peer_id: PeerId, request: bytes) -> tuple[bytes, bytes]:
        """(leaf PEM, stamp) for an enrolled key. Raises `KeyRefusedError` on a bad certificate request."""
        now_ms = self._clock()
        role = self._authority.core.state.nodes[peer_id].invite_role
        leaf = issue_leaf(self._home.identity, request, peer_id=peer_id, now_ms=now_ms)
        stamp = Membership(self._home.run_id, peer_id, role, now_ms, now_ms + MEMBERSHIP_MS)
        return leaf, sign_membership(self._home.identity, stamp)


@contextlib.contextmanager
def counted(authority: Authority) -> Iterator[None]:
    """Counts a refusal by the shell's own checks, as the core counts its own."""
    try:
        yield
    except HexcombError as error:
        authority.refusals[error.code] += 1
        raise


class JoinService(join_pb2_grpc.JoinServiceServicer):
    """Serves `Redeem`."""

    def __init__(
        self,
        home: CoordinatorHome,
        authority: Authority,
        registrar: Registrar,
        *,
        control_addresses: Callable[[], list[str]],
        bootstraps: Callable[[], list[str]],
    ) -> None:
        self._home, self._authority, self._registrar = home, authority, registrar
        self._control_addresses, self._bootstraps = control_addresses, bootstraps

    async def Redeem(
        self, request: join_pb2.RedeemRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> join_pb2.RedeemResponse:
        try:
            with counted(self._authority):
                peer_id = self._authenticate(request)
                check_request(request.certificate_request)
            await self._authority.submit(InviteRedeemed(InviteId(request.invite_id), peer_id))
            leaf, stamp = self._registrar.sign(peer_id, request.certificate_request)
        except HexcombError as error:
            await abort_with(context, error)
        return join_pb2.RedeemResponse(
            ca_certificate=anchor_pem(self._home.identity.public_bytes),
            leaf_certificate=leaf,
            membership=stamp,
            role=self._authority.core.state.nodes[peer_id].invite_role,
            control_addresses=self._control_addresses(),
            dht_bootstraps=self._bootstraps(),
        )

    def _authenticate(self, request: join_pb2.RedeemRequest) -> PeerId:
        """The newcomer's name, once key, proof of the invite and signature hold."""
        check_public_key(request.public_key)
        invite = self._authority.core.state.invites.get(InviteId(request.invite_id))
        if invite is None or not redemption_mac_holds(
            bytes.fromhex(invite.mac_key),
            request.mac,
            run_id=self._home.run_id,
            invite_id=InviteId(request.invite_id),
            public_key=request.public_key,
            nonce=request.nonce,
            certificate_request=request.certificate_request,
        ):
            raise InviteUnknownError(
                "the invite was refused",
                why="this coordinator did not make it, or its secret is wrong",
                remedy="Ask the organizer for a new invite.",
            )
        statement = redemption_statement(
            invite_id=InviteId(request.invite_id),
            public_key=request.public_key,
            nonce=request.nonce,
            mac=request.mac,
            certificate_request=request.certificate_request,
        )
        verify(
            request.public_key,
            kind="redeem",
            run_id=self._home.run_id,
            payload=statement,
            signature=request.signature,
        )
        return peer_id_of(request.public_key)
