"""Ed25519 identities, their libp2p names, and signatures with domain separation. Pure.

One key is a node's libp2p identity and signs everything that the node says. Invariants: a public key is
checked here before any library sees it (small-order and non-canonical keys let one signature fit every
message, or one key carry two names); a signature fits exactly one kind of statement, one run and one
payload.
"""

import functools
import hashlib
import re
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import KeyRefusedError, UnauthenticatedError
from protocol.ids import PeerId, RunId

SEED_BYTES = PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
RUN_ID_BYTES = 16
DOMAIN = b"hexcomb/v1/"
NUM_KEPT_KEYS = 16_384
"""Keys whose checks are remembered: a node signs many messages."""

_PEER_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of a libp2p PublicKey{Ed25519, 32 bytes}
_LIBP2P_PRIVATE_PREFIX = bytes.fromhex("08011240")  # libp2p PrivateKey{Ed25519, 64 bytes}
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_DIGITS = {character: digit for digit, character in enumerate(_BASE58)}
_MAX_PEER_ID_CHARACTERS = 64
_FIELD_PRIME = 2**255 - 19
_ORDER_8_Y = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER_Y = frozenset({0, 1, _FIELD_PRIME - 1, _ORDER_8_Y, _FIELD_PRIME - _ORDER_8_Y})
_KIND = re.compile(r"[a-z0-9-]{1,32}")
_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key with its public bytes and its name. Build it with `from_seed`."""

    private_key: Ed25519PrivateKey = field(repr=False)
    public_bytes: bytes
    peer_id: PeerId

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """The identity of a 32-byte seed; whoever calls draws the seed. Raises `ValueError` on another
        length."""
        private_key = Ed25519PrivateKey.from_private_bytes(seed)
        public_bytes = private_key.public_key().public_bytes_raw()
        return cls(private_key, public_bytes, peer_id_of(public_bytes))

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return self.private_key.private_bytes_raw()

    def libp2p_bytes(self) -> bytes:
        """The private key as a libp2p daemon reads it from a file."""
        return _LIBP2P_PRIVATE_PREFIX + self.seed + self.public_bytes

    def sign(self, *, kind: str, run_id: RunId, payload: bytes) -> bytes:
        """64 bytes that bind `payload` to this kind of statement and this run."""
        return self.private_key.sign(statement(kind=kind, run_id=run_id) + hashlib.sha256(payload).digest())


def sign(identity: Identity, *, kind: str, run_id: RunId, payload: bytes) -> bytes:
    """The same as `identity.sign`."""
    return identity.sign(kind=kind, run_id=run_id, payload=payload)


def verify(public_key: bytes, *, kind: str, run_id: RunId, payload: bytes, signature: bytes) -> None:
    """Returns if `public_key` signed `payload` as this kind in this run.

    Raises `KeyRefusedError` on a weak key and `UnauthenticatedError` on a signature that does not hold.
    """
    message = statement(kind=kind, run_id=run_id) + hashlib.sha256(payload).digest()
    verify_raw(public_key, message=message, signature=signature)


def verify_raw(public_key: bytes, *, message: bytes, signature: bytes) -> None:
    """Verifies over `message` as it stands; the caller has put `statement(...)` in front of it."""
    key = checked_public_key(public_key)
    if len(signature) != SIGNATURE_BYTES:
        raise UnauthenticatedError(
            "a signature was refused", why=f"it has {len(signature)} bytes, not {SIGNATURE_BYTES}"
        )
    try:
        key.verify(signature, message)
    except InvalidSignature as error:
        raise UnauthenticatedError(
            f"a signature was refused: it is not one of {peer_id_of(public_key)} over these bytes",
            remedy="Check that both sides use the same run and the same version of hexcomb.",
        ) from error


def statement(*, kind: str, run_id: RunId) -> bytes:
    """The front of every signed message: domain, kind, a zero byte, and the run's 16 bytes.

    Raises `ValueError` if `kind` or `run_id` is malformed, which is a fault of the caller.
    """
    return _statement(kind, run_id)


@functools.lru_cache(64)
def _statement(kind: str, run_id: RunId) -> bytes:
    if not _KIND.fullmatch(kind):
        raise ValueError(f"a kind is 1 to 32 of a-z, 0-9 and '-', not {kind!r}")
    return DOMAIN + kind.encode("ascii") + b"\0" + run_id_bytes(run_id)


def run_id_bytes(run_id: RunId) -> bytes:
    """The 16 bytes of a run id. Raises `ValueError` if it is not 32 lowercase hex digits."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"a run id is 32 lowercase hex digits, not {run_id!r}")
    return bytes.fromhex(run_id)


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p id of a public key. Raises `ValueError` unless it has 32 bytes."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return PeerId(_base58_encode(_PEER_ID_PREFIX + public_key))


def public_key_of(peer_id: PeerId) -> bytes:
    """The checked public key inside a peer id. Raises `KeyRefusedError` on anything that is not exactly
    one."""
    return _public_key_of(peer_id)


@functools.lru_cache(NUM_KEPT_KEYS)
def _public_key_of(peer_id: PeerId) -> bytes:
    raw = _base58_decode(peer_id)
    size = len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES
    if raw is None or len(raw) != size or not raw.startswith(_PEER_ID_PREFIX):
        shown = ascii(peer_id[:_MAX_PEER_ID_CHARACTERS])
        raise KeyRefusedError(f"{shown} is not the peer id of an Ed25519 key", remedy="It begins with 12D3Koo.")
    public_key = raw[len(_PEER_ID_PREFIX) :]
    check_public_key(public_key)
    return public_key


def check_public_key(raw: bytes) -> None:
    """Raises `KeyRefusedError` on a wrong length, a coordinate outside the field, or one of the 8
    small-order points."""
    if len(raw) != PUBLIC_KEY_BYTES:
        raise KeyRefusedError("a public key was refused", why=f"it has {len(raw)} bytes, not {PUBLIC_KEY_BYTES}")
    y = int.from_bytes(raw, "little") & (2**255 - 1)  # the top bit is the sign of x
    if y >= _FIELD_PRIME:
        raise KeyRefusedError("a public key was refused", why="its encoding is not canonical")
    if y in _SMALL_ORDER_Y:
        raise KeyRefusedError(
            "a public key was refused", why="it is a small-order point, under which forged signatures verify"
        )


def checked_public_key(raw: bytes) -> Ed25519PublicKey:
    """The library's key object, made only after `check_public_key`."""
    return _checked_public_key(raw)


@functools.lru_cache(NUM_KEPT_KEYS)
def _checked_public_key(raw: bytes) -> Ed25519PublicKey:
    check_public_key(raw)
    return Ed25519PublicKey.from_public_bytes(raw)


def _base58_encode(raw: bytes) -> str:
    number, characters = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        characters = _BASE58[digit] + characters
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + characters


def _base58_decode(text: str) -> bytes | None:
    """The bytes, or None if the text is too long for a peer id or has another character; base58 is
    one-to-one."""
    if len(text) > _MAX_PEER_ID_CHARACTERS or any(character not in _BASE58_DIGITS for character in text):
        return None
    number = 0
    for character in text:
        number = number * 58 + _BASE58_DIGITS[character]
    num_zeros = len(text) - len(text.lstrip("1"))
    return bytes(num_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
