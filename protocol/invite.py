"""The invite: one line that lets a machine join a run, and the proof that a newcomer holds one. Pure.

    hexcomb1 base32-lower( run 16 | coordinator key 32 | invite id 8 | secret 16 | expiry u32 | role u8
                           | addresses | bootstraps | checksum 4 )

where a list is a count byte and, for each text, a length byte and ASCII. Invariants: every invite has
exactly one spelling, and a mangled one is refused with the reason; the coordinator's key travels in it,
so that the first connection already knows whom to expect. An invite is a secret: `repr` hides it, no
error repeats it.
"""

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from protocol.endpoint import check_multiaddr, parse_endpoint
from protocol.errors import InviteMangledError, KeyRefusedError
from protocol.ids import InviteId, RunId
from protocol.keys import check_public_key, run_id_bytes, statement

Grant = Literal["auto", "trainer", "rollout"]
"""What an invite allows: one role, or whichever the coordinator finds best."""
GRANT_CODES: dict[Grant, int] = {"auto": 0, "trainer": 1, "rollout": 2}
GRANTS_BY_CODE: dict[int, Grant] = {code: grant for grant, code in GRANT_CODES.items()}

PREFIX = "hexcomb1"
MAX_CHARACTERS = 4096
MAX_ADDRESSES = 8
SECRET_BYTES, INVITE_ID_BYTES, NONCE_BYTES, MAC_BYTES = 16, 8, 16, 32

_FIXED = struct.Struct(f">16s32s{INVITE_ID_BYTES}s{SECRET_BYTES}sIB")
_CHECKSUM_BYTES = 4
_BASE32 = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_REMEDY = "Copy the whole line again, or ask the organizer for a new invite."


@dataclass(frozen=True, slots=True)
class Invite:
    """`expires_s` is in Unix seconds; `addresses` (host:port) serve Redeem; `bootstraps` are DHT
    multiaddresses."""

    run_id: RunId
    coordinator_key: bytes
    invite_id: InviteId
    secret: bytes = field(repr=False)
    expires_s: int
    role: Grant
    addresses: tuple[str, ...]
    bootstraps: tuple[str, ...] = ()


def encode_invite(invite: Invite) -> str:
    """The invite as one line. Raises `ValueError` if a field is out of range."""
    check_public_key(invite.coordinator_key)
    if len(invite.secret) != SECRET_BYTES or len(invite.invite_id) != 2 * INVITE_ID_BYTES:
        raise ValueError("an invite needs a 16-byte secret and an id of 16 hex digits")
    if not invite.addresses or max(len(invite.addresses), len(invite.bootstraps)) > MAX_ADDRESSES:
        raise ValueError(f"an invite needs 1 to {MAX_ADDRESSES} addresses and at most {MAX_ADDRESSES} bootstraps")
    if not 0 <= invite.expires_s < 2**32:
        raise ValueError("an invite must end before the year 2106")
    for address in invite.addresses:
        parse_endpoint(address)
    for bootstrap in invite.bootstraps:
        check_multiaddr(bootstrap)
    fixed = _FIXED.pack(
        run_id_bytes(invite.run_id),
        invite.coordinator_key,
        bytes.fromhex(invite.invite_id),
        invite.secret,
        invite.expires_s,
        GRANT_CODES[invite.role],
    )
    body = fixed + _encode_texts(invite.addresses) + _encode_texts(invite.bootstraps)
    text = base64.b32encode(body + _checksum(body)).decode("ascii").rstrip("=").lower()
    if len(PREFIX + text) > MAX_CHARACTERS:
        raise ValueError(f"an invite has at most {MAX_CHARACTERS} characters: name fewer or shorter addresses")
    return PREFIX + text


def decode_invite(text: str) -> Invite:
    """The invite in `text`, blanks around it aside. Raises `InviteMangledError` that names what is wrong."""
    body = _checked_body(text.strip())
    if len(body) < _FIXED.size:
        raise _mangled("it is too short")
    run, coordinator_key, invite_id, secret, expires_s, code = _FIXED.unpack_from(body)
    try:
        check_public_key(coordinator_key)
    except KeyRefusedError as error:
        raise _mangled("the coordinator's key in it is refused") from error
    if code not in GRANTS_BY_CODE:
        raise _mangled(f"it names role {code}, which this version of hexcomb does not know")
    addresses, rest = _decode_texts(body[_FIXED.size :], parse_endpoint)
    bootstraps, rest = _decode_texts(rest, check_multiaddr)
    if rest or not addresses:
        raise _mangled("it names no address" if not addresses else "something follows its end")
    return Invite(
        run_id=RunId(run.hex()),
        coordinator_key=coordinator_key,
        invite_id=InviteId(invite_id.hex()),
        secret=secret,
        expires_s=expires_s,
        role=GRANTS_BY_CODE[code],
        addresses=addresses,
        bootstraps=bootstraps,
    )


def stored_secret(secret: bytes) -> bytes:
    """The 32 bytes that the coordinator keeps in place of the secret: enough to check a proof, not to
    print the invite."""
    return hashlib.sha256(b"hexcomb/v1/invite-secret\0" + secret).digest()


def redemption_mac(
    secret: bytes,
    *,
    run_id: RunId,
    invite_id: InviteId,
    public_key: bytes,
    nonce: bytes,
    certificate_request: bytes,
) -> bytes:
    """A newcomer's proof that it holds the invite: HMAC-SHA256 over run, invite, key, nonce and request."""
    message = _redemption_message(run_id, invite_id, public_key, nonce, certificate_request)
    return hmac.digest(stored_secret(secret), message, "sha256")


def redemption_mac_holds(
    stored: bytes,
    mac: bytes,
    *,
    run_id: RunId,
    invite_id: InviteId,
    public_key: bytes,
    nonce: bytes,
    certificate_request: bytes,
) -> bool:
    """Whether `mac` proves the invite whose `stored_secret` is `stored`; constant time, never raises on
    what came in."""
    if len(nonce) != NONCE_BYTES:
        return False
    message = _redemption_message(run_id, invite_id, public_key, nonce, certificate_request)
    return hmac.compare_digest(hmac.digest(stored, message, "sha256"), mac)


def redemption_statement(
    *, invite_id: InviteId, public_key: bytes, nonce: bytes, mac: bytes, certificate_request: bytes
) -> bytes:
    """What the newcomer's key signs, as kind `redeem`, to show that it is its own."""
    parts = (invite_id.encode(), public_key, nonce, mac, certificate_request)
    return b"".join(hashlib.sha256(part).digest() for part in parts)


def _redemption_message(
    run_id: RunId, invite_id: InviteId, public_key: bytes, nonce: bytes, certificate_request: bytes
) -> bytes:
    parts = (invite_id.encode(), public_key, nonce, certificate_request)
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return statement(kind="redeem-mac", run_id=run_id) + digests


def _checked_body(text: str) -> bytes:
    """The bytes between prefix and checksum, once the spelling is the only one they have."""
    if not text.startswith(PREFIX):
        raise _mangled(f"it does not begin with {PREFIX!r}")
    if len(text) > MAX_CHARACTERS:
        raise _mangled(f"it is longer than {MAX_CHARACTERS} characters")
    digits = text[len(PREFIX) :]
    strange = next((position for position, character in enumerate(digits) if character not in _BASE32), None)
    if strange is not None:
        raise _mangled(f"character {len(PREFIX) + strange + 1} is {digits[strange]!a}, which no invite contains")
    if len(digits) % 8 in (1, 3, 6):
        raise _mangled("its length is wrong: a character was lost or added")
    raw = base64.b32decode(digits.upper() + "=" * (-len(digits) % 8))
    if base64.b32encode(raw).decode("ascii").rstrip("=").lower() != digits:
        raise _mangled("its last character is wrong")
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise _mangled("its checksum does not fit: a character was changed, lost or added")
    return body


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode("ascii") + body).digest()[:_CHECKSUM_BYTES]


def _encode_texts(texts: tuple[str, ...]) -> bytes:
    return bytes([len(texts)]) + b"".join(bytes([len(text)]) + text.encode("ascii") for text in texts)


def _decode_texts(raw: bytes, check: Callable[[str], object]) -> tuple[tuple[str, ...], bytes]:
    """A list from the front of `raw`, each text checked, and what follows it."""
    if not raw or raw[0] > MAX_ADDRESSES:
        raise _mangled("a list of addresses in it is cut short or too long")
    texts, rest = [], raw[1:]
    for _ in range(raw[0]):
        if not rest or len(rest) < 1 + rest[0]:
            raise _mangled("an address in it is cut short")
        chunk, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        try:
            text = chunk.decode("ascii")
            check(text)
        except ValueError as error:  # UnicodeDecodeError is one
            raise _mangled("an address in it is not one") from error
        texts.append(text)
    return tuple(texts), rest


def _mangled(why: str) -> InviteMangledError:
    return InviteMangledError("the invite cannot be read", why=why, remedy=_REMEDY)
