"""What the daemon and a child process say to each other: frames, envelopes, errors. Pure.

A frame is a 4-byte big-endian length and a msgpack envelope; the envelope carries a body, still encoded,
whose types each child's module of messages declares. Invariant: no frame is longer than `MAX_FRAME_BYTES`,
and whatever the other side sends either decodes to one of the envelopes or raises `EngineError`.
"""

import traceback
from typing import Any, TypeVar

import msgspec

from protocol.errors import ERRORS_BY_CODE, EngineError, HexcombError

MAX_FRAME_BYTES = 256 * 2**20
HEADER_BYTES = 4
MAX_DETAIL_CHARS = 16_384
"""A traceback longer than this crosses the pipe without its beginning."""

BodyT = TypeVar("BodyT")


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The child's first word: it runs."""


class Request(msgspec.Struct, frozen=True, tag="request", array_like=True):
    """The daemon wants an answer; `request_id` comes back with it."""

    request_id: int
    body: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """The daemon no longer waits for that answer; the child stops working on it."""

    request_id: int


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """The answer to one request."""

    request_id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """One request failed: the fields of an error of the tree, and the child's traceback."""

    request_id: int
    code: str
    what: str
    why: str
    remedy: str
    detail: str


class Event(msgspec.Struct, frozen=True, tag="event", array_like=True):
    """Something that the child says unasked."""

    body: msgspec.Raw


Envelope = Hello | Request | Cancel | Reply | Failure | Event

_ENVELOPES: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode_body(body: msgspec.Struct) -> msgspec.Raw:
    """The encoded form of a tagged Struct, to be put into an envelope."""
    return msgspec.Raw(msgspec.msgpack.encode(body))


def decode_body(raw: msgspec.Raw, kind: Any) -> Any:
    """A body as `kind`, a tagged Struct or a union of them; raises EngineError when it is anything else."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError("A message between the daemon and its child is of the wrong type", why=str(error)) from error


def encode_frame(envelope: Envelope, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Header and payload; raises EngineError for a payload over `max_bytes`, before anything is sent."""
    payload = msgspec.msgpack.encode(envelope)
    if len(payload) > max_bytes:
        raise EngineError(
            f"A message of {len(payload)} bytes is too large for the pipe between the daemon and its child",
            why=f"the limit is {max_bytes} bytes",
            remedy="Hand large data over as a file.",
        )
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """The payload's length as the header tells it; raises EngineError over `max_bytes`."""
    num_bytes = int.from_bytes(header, "big")
    if num_bytes > max_bytes:
        raise EngineError(
            f"The pipe between the daemon and its child announces a message of {num_bytes} bytes",
            why=f"the limit is {max_bytes} bytes",
        )
    return num_bytes


def decode_envelope(payload: bytes) -> Envelope:
    """The envelope in a payload; raises EngineError for anything else."""
    try:
        return _ENVELOPES.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError("The pipe between the daemon and its child carries garbage", why=str(error)) from error


def failure_of(request_id: int, error: Exception) -> Failure:
    """How an exception crosses the pipe: an error of the tree as it is, any other as EngineError with its
    traceback.
    """
    detail = "".join(traceback.format_exception(error))[-MAX_DETAIL_CHARS:]
    if isinstance(error, HexcombError):
        return Failure(request_id, error.code, error.what, error.why, error.remedy, detail)
    what = f"The child failed with {type(error).__name__}"
    return Failure(request_id, EngineError.code, what, str(error), "Its log file has the traceback.", detail)


def error_of(failure: Failure) -> HexcombError:
    """The error to raise for a failure: the same class as in the child, the child's traceback attached as a
    note.
    """
    kind = ERRORS_BY_CODE.get(failure.code, EngineError)
    error = kind(failure.what, why=failure.why, remedy=failure.remedy)
    error.add_note(f"In the child process:\n{failure.detail}")
    return error
