"""The coordinator's stamp of membership: this key has a place in this run until then. Pure.

It travels in directory records, so that a node can tell members from strangers while the coordinator is
silent. It is a fixed 130 bytes: version u8 | run 16 | key 32 | role u8 | issued u64 | expires u64 |
signature 64.
"""

import struct
from dataclasses import dataclass

from protocol.errors import KeyRefusedError, NotEnrolledError, UnauthenticatedError
from protocol.ids import PeerId, RunId
from protocol.invite import GRANT_CODES, GRANTS_BY_CODE, Grant
from protocol.keys import SIGNATURE_BYTES, Identity, peer_id_of, public_key_of, run_id_bytes, verify

KIND = "membership"

_LAYOUT_VERSION = 1
_BODY = struct.Struct(">B16s32sBQQ")
STAMP_BYTES = _BODY.size + SIGNATURE_BYTES
_MAX_TIME_MS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Membership:
    """`peer_id` may take part in `run_id` as far as `role` allows, from `issued_ms` to `expires_ms` (Unix
    ms)."""

    run_id: RunId
    peer_id: PeerId
    role: Grant
    issued_ms: int
    expires_ms: int

    def allows(self, role: str) -> bool:
        """Whether a member with this stamp may act as `role`; every member may be idle."""
        return role == "idle" or self.role in ("auto", role)


def sign_membership(coordinator: Identity, membership: Membership) -> bytes:
    """The stamp."""
    body = _BODY.pack(
        _LAYOUT_VERSION,
        run_id_bytes(membership.run_id),
        public_key_of(membership.peer_id),
        GRANT_CODES[membership.role],
        membership.issued_ms,
        membership.expires_ms,
    )
    return body + coordinator.sign(kind=KIND, run_id=membership.run_id, payload=body)


def open_membership(
    stamp: bytes,
    *,
    coordinator_key: bytes,
    run_id: RunId,
    now_ms: int,
    peer_id: PeerId | None = None,
    skew_ms: int = 30_000,
) -> Membership:
    """The membership, once the coordinator's signature, the run, the peer (if named) and the time hold.

    Raises `UnauthenticatedError` on a stamp that is not the coordinator's, `NotEnrolledError` on one that
    is, but for another peer or another time.
    """
    if len(stamp) != STAMP_BYTES:
        raise UnauthenticatedError("a stamp of membership was refused", why=f"it has not {STAMP_BYTES} bytes")
    body, signature = stamp[: _BODY.size], stamp[_BODY.size :]
    verify(coordinator_key, kind=KIND, run_id=run_id, payload=body, signature=signature)
    membership = _decode(body)
    if membership.run_id != run_id:
        raise UnauthenticatedError("a stamp of membership was refused", why="it belongs to another run")
    if peer_id is not None and membership.peer_id != peer_id:
        raise NotEnrolledError(
            "a stamp of membership was refused",
            why=f"it belongs to {membership.peer_id} and not to {peer_id}",
        )
    if not membership.issued_ms - skew_ms <= now_ms < membership.expires_ms + skew_ms:
        raise NotEnrolledError(
            "a stamp of membership was refused",
            why=f"it holds from {membership.issued_ms} to {membership.expires_ms} ms, and it is {now_ms}",
            remedy="Ask the coordinator for a fresh one, and set the clock right (NTP).",
        )
    return membership


def _decode(body: bytes) -> Membership:
    """The fields of a body whose signature holds; a coordinator of another version may still have written
    it."""
    version, run, key, code, issued_ms, expires_ms = _BODY.unpack(body)
    if version != _LAYOUT_VERSION or code not in GRANTS_BY_CODE or max(issued_ms, expires_ms) > _MAX_TIME_MS:
        raise UnauthenticatedError(
            "a stamp of membership was refused",
            why="this version of hexcomb cannot read it",
            remedy="Update hexcomb.",
        )
    peer_id = peer_id_of(key)
    try:
        public_key_of(peer_id)
    except KeyRefusedError as error:
        raise UnauthenticatedError("a stamp of membership was refused", why="its key is refused") from error
    return Membership(RunId(run.hex()), peer_id, GRANTS_BY_CODE[code], issued_ms, expires_ms)
