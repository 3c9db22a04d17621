"""A signed envelope over bytes as they were received. Pure: time and the nonce are arguments.

The payload is opaque and is parsed only after the signature holds, so that no re-encoding of it is ever
signed or trusted. The header travels beside the payload and is signed as fixed-width bytes:

    "hexcomb/v1/" kind 0x00 run(16) audience(32) u64 issued_ms u64 not_after_ms nonce(16) SHA-256(payload)

Freshness is checked here; that a nonce is new is not: whoever acts on an envelope remembers `(key_id,
nonce)` until `keep_nonce_until_ms`.
"""

import hashlib
import struct
from dataclasses import dataclass, replace

from protocol.errors import KeyRefusedError, UnauthenticatedError
from protocol.ids import PeerId, RunId
from protocol.keys import SIGNATURE_BYTES, Identity, peer_id_of, public_key_of, statement, verify_raw

MAX_PAYLOAD_BYTES = 4 << 20
MAX_LIFETIME_MS = 300_000
DEFAULT_LIFETIME_MS = 120_000
DEFAULT_SKEW_MS = 30_000
NONCE_BYTES = 16

_LAYOUT_VERSION = 1
_HEADER = struct.Struct(f">32s32sQQ{NONCE_BYTES}s{SIGNATURE_BYTES}sI")  # signer, audience, times, nonce, sig, length
_MAX_KIND_BYTES = 32
_MAX_TIME_MS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Envelope:
    """`key_id` says `payload` to `audience`; valid from `issued_ms` to `not_after_ms` (Unix milliseconds)."""

    payload: bytes
    key_id: PeerId
    issued_ms: int
    not_after_ms: int
    nonce: bytes
    audience: PeerId
    kind: str
    signature: bytes = b""

    def signed_bytes(self, run_id: RunId) -> bytes:
        """What the signature covers."""
        times = struct.pack(">QQ", self.issued_ms, self.not_after_ms)
        front = statement(kind=self.kind, run_id=run_id) + public_key_of(self.audience)
        return front + times + self.nonce + hashlib.sha256(self.payload).digest()


def sign_envelope(
    identity: Identity,
    payload: bytes,
    *,
    kind: str,
    run_id: RunId,
    audience: PeerId,
    now_ms: int,
    nonce: bytes,
    lifetime_ms: int = DEFAULT_LIFETIME_MS,
) -> Envelope:
    """An envelope from `identity` for `audience`. Raises `ValueError` on a size that no receiver would
    take."""
    if len(nonce) != NONCE_BYTES or len(payload) > MAX_PAYLOAD_BYTES or not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise ValueError("an envelope needs a 16-byte nonce, a payload of at most 4 MiB and at most 300 s to live")
    bare = Envelope(payload, identity.peer_id, now_ms, now_ms + lifetime_ms, nonce, audience, kind)
    return replace(bare, signature=identity.private_key.sign(bare.signed_bytes(run_id)))


def open_envelope(
    envelope: Envelope,
    *,
    kind: str,
    run_id: RunId,
    audience: PeerId,
    now_ms: int,
    skew_ms: int = DEFAULT_SKEW_MS,
    signer: PeerId | None = None,
) -> bytes:
    """The payload, once kind, audience, signer (if named), run, time and signature hold.

    Raises `UnauthenticatedError`; one about time names the receiver's clock. Does not check that the
    nonce is new.
    """
    if envelope.kind != kind:
        raise _refused(f"it is a {envelope.kind!a} and not a {kind!a}")
    if envelope.audience != audience:
        raise _refused(f"it is meant for {envelope.audience} and not for {audience}")
    if signer is not None and envelope.key_id != signer:
        raise _refused(f"it is signed by {envelope.key_id} and not by {signer}")
    try:
        public_key, message = public_key_of(envelope.key_id), envelope.signed_bytes(run_id)
    except KeyRefusedError as error:
        raise _refused("a key in it is refused") from error
    verify_raw(public_key, message=message, signature=envelope.signature)
    _check_time(envelope, now_ms=now_ms, skew_ms=skew_ms)
    return envelope.payload


def keep_nonce_until_ms(envelope: Envelope, *, skew_ms: int = DEFAULT_SKEW_MS) -> int:
    """When the nonce may be forgotten: from then on, time alone refuses a replay."""
    return envelope.not_after_ms + skew_ms + 1


def encode_envelope(envelope: Envelope) -> bytes:
    """The envelope as one bytes field."""
    kind = envelope.kind.encode("ascii")
    header = _HEADER.pack(
        public_key_of(envelope.key_id),
        public_key_of(envelope.audience),
        envelope.issued_ms,
        envelope.not_after_ms,
        envelope.nonce,
        envelope.signature,
        len(envelope.payload),
    )
    return bytes([_LAYOUT_VERSION, len(kind)]) + kind + header + envelope.payload


def decode_envelope(raw: bytes) -> Envelope:
    """The envelope in `raw`, unverified. Raises `UnauthenticatedError` unless `raw` is exactly one."""
    if len(raw) < 2 or raw[0] != _LAYOUT_VERSION or not 0 < raw[1] <= _MAX_KIND_BYTES:
        raise _refused("it does not begin like an envelope of this version")
    start = 2 + raw[1]
    kind, body = raw[2:start], raw[start + _HEADER.size :]
    if len(raw) < start + _HEADER.size:
        raise _refused("it is cut short")
    signer, audience, issued_ms, not_after_ms, nonce, signature, num_bytes = _HEADER.unpack_from(raw, start)
    if num_bytes != len(body) or num_bytes > MAX_PAYLOAD_BYTES:
        raise _refused(f"it declares {num_bytes} bytes of payload and holds {len(body)}")
    if max(issued_ms, not_after_ms) > _MAX_TIME_MS or not kind.isascii():
        raise _refused("a field of its header is out of range")
    return Envelope(
        payload=body,
        key_id=peer_id_of(signer),
        issued_ms=issued_ms,
        not_after_ms=not_after_ms,
        nonce=nonce,
        audience=peer_id_of(audience),
        kind=kind.decode("ascii"),
        signature=signature,
    )


def _check_time(envelope: Envelope, *, now_ms: int, skew_ms: int) -> None:
    lifetime_ms = envelope.not_after_ms - envelope.issued_ms
    if not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise _refused(f"it lives for {lifetime_ms} ms and may live for 1 to {MAX_LIFETIME_MS}")
    if not envelope.issued_ms - skew_ms <= now_ms <= envelope.not_after_ms + skew_ms:
        raise UnauthenticatedError(
            "an envelope was refused",
            why=f"it holds from {envelope.issued_ms} to {envelope.not_after_ms} ms; this clock says {now_ms}",
            remedy="Set the clocks right (NTP).",
        )


def _refused(why: str) -> UnauthenticatedError:
    return UnauthenticatedError("an envelope was refused", why=why)
