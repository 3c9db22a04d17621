"""The sampling seed of a slot. Pure.

It comes from the secret in the seal of the version under which the slot was opened, so that nobody knows it
before that version is committed and every node that fills the slot, at whatever time, uses the same one.
"""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.ids import SlotKey

SEED_BYTES = 8


def slot_seed(secret: bytes, slot: SlotKey) -> int:
    """64 signed bits from the seal's secret of `slot.version`. Raises `ValueError` unless the secret has 32
    bytes."""
    if len(secret) != 32:
        raise ValueError(f"a seal's secret has 32 bytes, not {len(secret)}")
    info = f"hexcomb/v1/slot-seed|{slot}".encode()
    derived = HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=info).derive(secret)
    return int.from_bytes(derived, "little", signed=True)
