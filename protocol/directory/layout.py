"""Where a node's record stands in the DHT and which entries are taken at all. Pure: time is an argument.

A DHT has no listing, so records cannot stand under one key per node. All nodes of a run share `NUM_BUCKETS`
dictionary keys, `hexcomb/<run>/nodes/<bucket>`; a node's bucket follows from its peer id, its sub-key is the
peer id, and the value is its signed record. Several buckets and not one, because a dictionary travels whole:
one key for all would pass the transport's 4 MiB limit at some 3,500 nodes, load the same five replicas with
every read, and give an attacker a single place in the key space to surround.

Invariant: an entry is taken only if its key, sub-key, value and expiration all follow from one valid record.
The expiration is not covered by the signature but must equal the signed one, so nobody can prolong another
node's record, nor lock its owner out with a later expiration. Plain values (an entry without a sub-key) are
never taken.
"""

import math
import zlib
from typing import NoReturn

import msgspec

from protocol.errors import RecordRefusedError
from protocol.ids import PeerId, RunId
from protocol.record import DEFAULT_SKEW_MS, MAX_LIFETIME_MS, MAX_RECORD_BYTES, OpenedRecord, open_record

NUM_BUCKETS = 8
_MAX_SUBKEY_BYTES = 80
_BIN_HEADER_BYTES = 3


def bucket_of(peer_id: PeerId) -> int:
    """The bucket of a node, 0 to NUM_BUCKETS - 1."""
    return zlib.crc32(peer_id.encode()) % NUM_BUCKETS


def bucket_key(run_id: RunId, bucket: int) -> str:
    """The DHT key of a bucket."""
    return f"hexcomb/{run_id}/nodes/{bucket}"


def expiration_s(record_expires_ms: int) -> float:
    """The one expiration (Unix seconds) under which a record may stand."""
    return record_expires_ms / 1000


def open_entry(
    *,
    bucket: int,
    subkey: bytes,
    value: bytes,
    expiration_s: float,
    run_id: RunId,
    coordinator_key: bytes,
    now_ms: int,
) -> OpenedRecord:
    """The record in one entry of a bucket's dictionary; `subkey` and `value` are msgpack, as the DHT carries
    them.

    Takes anything and raises RecordRefusedError and nothing else. An entry that has just expired is still
    taken: it may have expired on its way.
    """
    if not isinstance(value, bytes) or not isinstance(expiration_s, float) or not math.isfinite(expiration_s):
        _refuse("its value is not bytes or its expiration not a finite number")
    if expiration_s * 1000 > now_ms + MAX_LIFETIME_MS + DEFAULT_SKEW_MS:
        _refuse("its expiration is too far ahead")
    if len(subkey) > _MAX_SUBKEY_BYTES or len(value) > MAX_RECORD_BYTES + _BIN_HEADER_BYTES:
        _refuse("it is too large")
    try:
        peer_id = PeerId(msgspec.msgpack.decode(subkey, type=str))
        raw = msgspec.msgpack.decode(value, type=bytes)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordRefusedError("a directory entry was refused", why="it is not a record of a node") from error
    if msgspec.msgpack.encode(peer_id) != subkey or bucket_of(peer_id) != bucket:
        _refuse("its sub-key is spelt otherwise or belongs into another bucket")
    opened = open_record(raw, run_id=run_id, coordinator_key=coordinator_key, now_ms=now_ms, peer_id=peer_id)
    if expiration_s != opened.record.expires_ms / 1000:
        _refuse("its expiration is not the one that its owner signed")
    return opened


def _refuse(why: str) -> NoReturn:
    raise RecordRefusedError("a directory entry was refused", why=why)
