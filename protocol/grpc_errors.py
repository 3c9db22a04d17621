"""How an error of the tree crosses gRPC, in both directions.

The status code says what kind of trouble it is to anything that speaks gRPC; the error itself travels
beside it as trailing metadata (`TRAILER`). Invariant: what a server raises by `to_status` comes back from
`from_rpc_error` as the same class with the same sentence, and whatever else a call fails with becomes an
error of the tree too.
"""

from typing import Any, NoReturn

import grpc
import msgspec

from protocol.errors import (
    ERRORS_BY_CODE,
    HexcombError,
    RefusedError,
    UnauthenticatedError,
    UnreachableError,
    WorkRefusedError,
)

TRAILER = "hexcomb-error-bin"
MAX_FIELD_CHARACTERS = 600
"""Three fields of this length stay below the 8 KiB that gRPC allows for metadata, whatever the alphabet."""

_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_KINDS: dict[grpc.StatusCode, type[HexcombError]] = {
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: RefusedError,
    grpc.StatusCode.UNIMPLEMENTED: RefusedError,
    grpc.StatusCode.INVALID_ARGUMENT: RefusedError,
    grpc.StatusCode.FAILED_PRECONDITION: WorkRefusedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: WorkRefusedError,
}


class _Trailer(msgspec.Struct, frozen=True, array_like=True):
    code: str
    what: str
    why: str
    remedy: str


def to_status(error: HexcombError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Status code, details and trailing metadata that carry `error`."""
    fields = (field[:MAX_FIELD_CHARACTERS] for field in (error.what, error.why, error.remedy))
    trailer = msgspec.msgpack.encode(_Trailer(error.code, *fields))
    return grpc.StatusCode[error.grpc_status], f"{error.code}: {error.what[:200]}", ((TRAILER, trailer),)


async def abort_with(context: Any, error: HexcombError) -> NoReturn:
    """Ends the call that `context` (a `grpc.aio.ServicerContext`) belongs to with `error`."""
    code, details, trailer = to_status(error)
    await context.abort(code, details, trailer)
    raise AssertionError("abort always raises")


def from_rpc_error(error: grpc.aio.AioRpcError, *, doing: str = "a call") -> HexcombError:
    """The error that a failed call stands for; `doing` completes "<doing> failed" where the server sent
    none."""
    trailer = _find_trailer(error)
    if trailer is not None:
        kind = ERRORS_BY_CODE.get(trailer.code, RefusedError)
        return kind(trailer.what, why=trailer.why, remedy=trailer.remedy)
    status, details = error.code(), (error.details() or "")[:MAX_FIELD_CHARACTERS]
    if status in _TRANSIENT:
        return UnreachableError(f"{doing} got no answer", why=details or status.name.lower())
    kind = _KINDS.get(status, HexcombError)
    return kind(f"{doing} failed", why=f"the other side answered {status.name}: {details}")


def _find_trailer(error: grpc.aio.AioRpcError) -> _Trailer | None:
    """The trailer, or None where there is none or it is not ours."""
    for key, value in error.trailing_metadata() or ():
        if key == TRAILER and isinstance(value, bytes):
            try:
                return msgspec.msgpack.decode(value, type=_Trailer)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
    return None
