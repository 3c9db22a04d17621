"""How parts and averages travel between trainers: as float32, or as bfloat16. Pure (numpy).

Invariant: who sends values has rounded its own copy of them first (`round_in_place`), so that sender and receivers go
on from the same float32 values, of which packing and unpacking lose nothing. Bytes are little-endian; a bfloat16 is the
upper half of its float32.

Shape letters: S elements of one shard.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from node.training.optimizer import BLOCK_ELEMENTS, WIRE_DTYPE, Vector
from protocol.run import Wire

BFLOAT16 = np.dtype("<u2")
MESSAGE_BYTES = 512 << 10
ITEM_BYTES: dict[Wire, int] = {"f32": WIRE_DTYPE.itemsize, "bf16": BFLOAT16.itemsize}
HALF, ODD, UPPER, NAN = np.uint32(0x7FFF), np.uint32(1), np.uint32(0xFFFF_0000), np.float32(np.nan)


def round_in_place(values_S: Vector, wire: Wire) -> None:
    """Makes each value the nearest that can travel, the even one of two. What is beyond bfloat16's range becomes
    infinite; NaN stays NaN."""
    if wire == "f32":
        return
    for start in range(0, len(values_S), BLOCK_ELEMENTS):
        block = values_S[start : start + BLOCK_ELEMENTS]
        is_nan = np.isnan(block)
        bits = block.view(np.uint32)
        carry = bits >> np.uint32(16)
        carry &= ODD
        carry += HALF
        bits += carry
        bits &= UPPER
        block[is_nan] = NAN


def pack(values_S: Vector, wire: Wire) -> np.ndarray[Any, Any]:
    """Rounded values as they travel: a view of them where the machine is little-endian."""
    values = np.ascontiguousarray(values_S, WIRE_DTYPE)
    return values if wire == "f32" else values.view(BFLOAT16)[1::2]


def unpack(data: bytes, wire: Wire) -> Vector:
    """The values that came; the inverse of `pack`."""
    if wire == "f32":
        return np.frombuffer(data, WIRE_DTYPE).astype(np.float32, copy=False)
    return _widened(np.frombuffer(data, BFLOAT16))


def landing(into_S: Vector, wire: Wire) -> memoryview:
    """Where the bytes for `into_S` are written as they come, in its own memory; `unpack_landed` makes values of
    them."""
    packed_bytes = into_S.view(np.uint8)
    return packed_bytes[len(packed_bytes) - len(into_S) * ITEM_BYTES[wire] :].data


def unpack_landed(into_S: Vector, wire: Wire) -> None:
    """What came to `landing`, as values. No value is written over one that is not read yet: packed they end where the
    vector ends."""
    if wire == "f32":
        return
    packed_S = into_S.view(BFLOAT16)[len(into_S) :]
    for start in range(0, len(into_S), BLOCK_ELEMENTS):
        where = slice(start, start + BLOCK_ELEMENTS)
        into_S[where] = _widened(packed_S[where])


def messages_of(packed_S: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The bytes of packed values, by messages of at most `MESSAGE_BYTES`; one empty message if there are none."""
    step = MESSAGE_BYTES // packed_S.itemsize
    for start in range(0, max(len(packed_S), 1), step):
        yield packed_S[start : start + step].tobytes()


def _widened(packed: np.ndarray[Any, Any]) -> Vector:
    wide = packed.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)
