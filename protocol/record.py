"""The directory record: what a node says of itself, signed, small and short-lived. Pure: time is an argument.

Encoded: signature 64 | msgpack array. A record is a hint from a stranger: `open_record` checks size,
shape, ranges, the node's signature, the coordinator's stamp and the time, in an order that does the cheap
things first, and raises `RecordRefusedError` and nothing else.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from protocol.endpoint import parse_endpoint
from protocol.errors import KeyRefusedError, NotEnrolledError, RecordRefusedError, UnauthenticatedError
from protocol.ids import PeerId, RunId, Version
from protocol.keys import SIGNATURE_BYTES, Identity, public_key_of, verify
from protocol.membership import Membership, open_membership
from protocol.run import Role

KIND = "record"
MAX_RECORD_BYTES = 1024
MAX_LIFETIME_MS = 300_000
DEFAULT_LIFETIME_MS = 60_000
DEFAULT_SKEW_MS = 30_000
MAX_VERSIONS = 8
MAX_ENDPOINT_CHARACTERS = 120

_MAX_RATE = 1e12
_MAX_MEMORY_BYTES = 2**50
_MAX_VERSION = 2**53
_MAX_TIME_MS = 2**53
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._()/+-]{0,47}")


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `peer_id` can do and where it is; rates per second, link in Mbit/s, times in Unix milliseconds.

    `trainer_endpoint` is empty unless a trainer serves there; `endpoint` is empty on a node that only dials.
    `versions` are those whose bytes it serves, ascending.
    """

    peer_id: PeerId
    role: Role
    device: str
    decode_tokens_per_s: float
    train_tokens_per_s: float
    memory_bytes: int
    link_mbit_per_s: float
    rtt_ms: float
    endpoint: str
    trainer_endpoint: str
    versions: tuple[Version, ...]
    issued_ms: int
    expires_ms: int
    stamp: bytes


_DECODER = msgspec.msgpack.Decoder(Record)


@dataclass(frozen=True, slots=True)
class OpenedRecord:
    """A record that held, with the membership that vouches for its node."""

    record: Record
    membership: Membership


def sign_record(identity: Identity, record: Record, *, run_id: RunId) -> bytes:
    """The record as it is stored. Raises `RecordRefusedError` if no reader would take it, time and stamp
    aside."""
    if record.peer_id != identity.peer_id:
        _refuse(f"it names {record.peer_id} and is signed by {identity.peer_id}")
    _check_ranges(record)
    body = msgspec.msgpack.encode(record)
    if SIGNATURE_BYTES + len(body) > MAX_RECORD_BYTES:
        _refuse(f"it is longer than {MAX_RECORD_BYTES} bytes")
    return identity.sign(kind=KIND, run_id=run_id, payload=body) + body


def open_record(
    raw: bytes,
    *,
    run_id: RunId,
    coordinator_key: bytes,
    now_ms: int,
    peer_id: PeerId | None = None,
    skew_ms: int = DEFAULT_SKEW_MS,
) -> OpenedRecord:
    """The record in `raw`, once everything holds; `peer_id` is the owner that its key in the directory names.

    Raises `RecordRefusedError`.
    """
    if not SIGNATURE_BYTES < len(raw) <= MAX_RECORD_BYTES:
        _refuse(f"it has {len(raw)} bytes and may have up to {MAX_RECORD_BYTES}")
    signature, body = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
    try:
        record = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordRefusedError("a directory record was refused", why="it is not a record") from error
    if peer_id is not None and record.peer_id != peer_id:
        _refuse("it stands under another node's name")
    _check_ranges(record)
    _check_time(record, now_ms=now_ms, skew_ms=skew_ms)
    try:
        public_key = public_key_of(record.peer_id)
        verify(public_key, kind=KIND, run_id=run_id, payload=body, signature=signature)
        membership = open_membership(
            record.stamp,
            coordinator_key=coordinator_key,
            run_id=run_id,
            now_ms=now_ms,
            peer_id=record.peer_id,
            skew_ms=skew_ms,
        )
    except (KeyRefusedError, UnauthenticatedError, NotEnrolledError) as error:
        raise RecordRefusedError("a directory record was refused", why=error.sentence()) from error
    if not membership.allows(record.role):
        _refuse(f"its node may not act as {record.role}")
    return OpenedRecord(record, membership)


def _check_ranges(record: Record) -> None:
    rates = (record.decode_tokens_per_s, record.train_tokens_per_s, record.link_mbit_per_s, record.rtt_ms)
    if not all(0 <= rate <= _MAX_RATE for rate in rates):  # false for NaN, too
        _refuse("a rate in it is negative, too large or not finite")
    if not 0 <= record.memory_bytes <= _MAX_MEMORY_BYTES:
        _refuse("its memory is out of range")
    if not _DEVICE.fullmatch(record.device):
        _refuse("its device is not a short plain name")
    if len(record.versions) > MAX_VERSIONS or list(record.versions) != sorted(set(record.versions)):
        _refuse(f"its versions are not up to {MAX_VERSIONS} in ascending order")
    if any(not 0 <= version <= _MAX_VERSION for version in record.versions):
        _refuse("a version in it is out of range")
    for endpoint in (record.endpoint, record.trainer_endpoint):
        _check_endpoint(endpoint)


def _check_endpoint(endpoint: str) -> None:
    if not endpoint:
        return
    try:
        parse_endpoint(endpoint)
    except ValueError as error:
        raise RecordRefusedError("a directory record was refused", why="an endpoint in it is not one") from error
    if len(endpoint) > MAX_ENDPOINT_CHARACTERS:
        _refuse("an endpoint in it is too long")


def _check_time(record: Record, *, now_ms: int, skew_ms: int) -> None:
    if not 0 <= record.issued_ms < record.expires_ms <= _MAX_TIME_MS:
        _refuse("its times are out of order")
    if record.expires_ms - record.issued_ms > MAX_LIFETIME_MS:
        _refuse(f"it would live longer than {MAX_LIFETIME_MS} ms")
    if not record.issued_ms - skew_ms <= now_ms < record.expires_ms + skew_ms:
        _refuse(f"it holds from {record.issued_ms} to {record.expires_ms} ms and this clock says {now_ms}")


def _refuse(why: str) -> NoReturn:
    raise RecordRefusedError("a directory record was refused", why=why)
