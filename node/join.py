"""Redeeming an invite: from one line of text to a place in a run. Impure: gRPC, files, the clock.

Invariant: nothing is written to the home before the coordinator's whole answer has been checked; a home
that fails to join holds its identity and nothing more.
"""

import asyncio
import secrets
import time
from typing import Any

import grpc

from node.home import Home
from node.joined import Joined, read_joined, write_joined, write_leaf
from protocol.certificates import Leaf, certificate_request, new_leaf_key, verify_leaf
from protocol.endpoint import check_multiaddr, parse_endpoint
from protocol.errors import HexcombError, IdentityError, NotJoinedError, RefusedError, UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_options import CLIENT_OPTIONS
from protocol.invite import (
    GRANT_CODES,
    NONCE_BYTES,
    Grant,
    Invite,
    decode_invite,
    redemption_mac,
    redemption_statement,
)
from protocol.keys import Identity, peer_id_of
from protocol.membership import open_membership
from protocol.tls import channel_options, pinned_channel_credentials
from protocol.v1 import join_pb2
from protocol.v1.join_pb2_grpc import JoinServiceStub

ADDRESS_DEADLINE_S = 10.0


async def join(home: Home, invite_text: str, *, deadline_s: float = ADDRESS_DEADLINE_S) -> Joined:
    """Redeems the invite for the home's key, and remembers the place; `deadline_s` is for each address.

    Raises `InviteMangledError`, `InviteUnknownError`, `InviteExpiredError`, `InviteUsedUpError`,
    `UnreachableError`, `UnauthenticatedError` (whoever answered is not the coordinator), `IdentityError`
    (the home is another run's).
    """
    invite = decode_invite(invite_text)
    _check_same_run(home, invite)
    key_pem = new_leaf_key()
    request = redeem_request(home.identity, invite, certificate_request(key_pem, peer_id=home.peer_id))
    response = await _redeem_somewhere(invite, request, deadline_s=deadline_s)
    joined = _checked_place(home, invite, response, invite_text=invite_text.strip())
    write_leaf(home, Leaf(response.leaf_certificate, key_pem))
    write_joined(home, joined)
    return joined


def redeem_request(
    identity: Identity, invite: Invite, request_der: bytes, *, nonce: bytes | None = None
) -> join_pb2.RedeemRequest:
    """The proof of the invite and of the key, over one certificate request."""
    nonce = nonce or secrets.token_bytes(NONCE_BYTES)
    mac = redemption_mac(
        invite.secret,
        run_id=invite.run_id,
        invite_id=invite.invite_id,
        public_key=identity.public_bytes,
        nonce=nonce,
        certificate_request=request_der,
    )
    statement = redemption_statement(
        invite_id=invite.invite_id,
        public_key=identity.public_bytes,
        nonce=nonce,
        mac=mac,
        certificate_request=request_der,
    )
    return join_pb2.RedeemRequest(
        public_key=identity.public_bytes,
        invite_id=invite.invite_id,
        nonce=nonce,
        mac=mac,
        certificate_request=request_der,
        signature=identity.sign(kind="redeem", run_id=invite.run_id, payload=statement),
    )


def _check_same_run(home: Home, invite: Invite) -> None:
    try:
        known = read_joined(home)
    except NotJoinedError:
        return
    if known.run_id != invite.run_id:
        raise IdentityError(
            f"{home.path} belongs to another run",
            why=f"it joined {known.run_id}, and the invite is for {invite.run_id}",
            remedy="Name another folder with --home: a node takes part in one run.",
        )


async def _redeem_somewhere(invite: Invite, request: Any, *, deadline_s: float) -> join_pb2.RedeemResponse:
    """The first answer; a refusal by the coordinator ends the search, an address that is silent or wrong
    does not."""
    troubles: list[HexcombError] = []
    for address in invite.addresses:
        try:
            return await _redeem_at(address, invite, request, deadline_s=deadline_s)
        except UnreachableError as error:
            troubles.append(error)
        except HexcombError as error:
            if error.code != "UNAUTHENTICATED":
                raise
            troubles.append(error)
    telling = [error for error in troubles if not isinstance(error, UnreachableError)]
    raise (telling or troubles)[0]


async def _redeem_at(address: str, invite: Invite, request: Any, *, deadline_s: float) -> join_pb2.RedeemResponse:
    endpoint = parse_endpoint(address)
    credentials = await asyncio.to_thread(
        pinned_channel_credentials, endpoint.host, endpoint.port, invite.coordinator_key, deadline_s
    )
    options = [*CLIENT_OPTIONS, *channel_options(peer_id_of(invite.coordinator_key))]
    async with grpc.aio.secure_channel(str(endpoint), credentials, options=options) as channel:
        stub: Any = JoinServiceStub(channel)
        try:
            response: join_pb2.RedeemResponse = await stub.Redeem(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, doing=f"redeeming the invite at {address}") from error
    return response


def _checked_place(home: Home, invite: Invite, response: join_pb2.RedeemResponse, *, invite_text: str) -> Joined:
    """The place, once leaf and stamp are the coordinator's and this key's, and the addresses are some."""
    now_ms = int(time.time() * 1000)
    named = verify_leaf(response.leaf_certificate, coordinator_key=invite.coordinator_key, now_ms=now_ms)
    if named != home.peer_id:
        raise RefusedError("the coordinator's answer was refused", why=f"its TLS leaf is for {named}")
    open_membership(
        response.membership,
        coordinator_key=invite.coordinator_key,
        run_id=invite.run_id,
        now_ms=now_ms,
        peer_id=home.peer_id,
    )
    try:
        for address in response.control_addresses:
            parse_endpoint(address)
        for bootstrap in response.dht_bootstraps:
            check_multiaddr(bootstrap)
    except ValueError as error:
        raise RefusedError("the coordinator's answer was refused", why=str(error)) from error
    if not response.control_addresses:
        raise RefusedError("the coordinator's answer was refused", why="it names no control service")
    return Joined(
        run_id=invite.run_id,
        coordinator_key=invite.coordinator_key,
        role=_grant(response.role),
        stamp=response.membership,
        control_addresses=tuple(response.control_addresses),
        bootstraps=tuple(response.dht_bootstraps) or invite.bootstraps,
        invite=invite_text,
    )


def _grant(text: str) -> Grant:
    for grant in GRANT_CODES:
        if grant == text:
            return grant
    raise RefusedError("the coordinator's answer was refused", why=f"it names the role {text[:32]!a}")
