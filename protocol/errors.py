"""Every error that hexcomb raises for a person or a peer, in one tree. Pure.

Each error says what happened, why, and what to do; `code` is stable and is what machines compare. The gRPC
status, HTTP status and exit code of an error stand beside it, and nowhere else; `ERRORS_BY_CODE` turns a code that
came over the wire back into its class.
"""

from typing import ClassVar


class HexcombError(Exception):
    """The root. `code` names the error for machines; `remedy` tells a person what to do next."""

    code: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """One line: what happened, why, what to do."""
        parts = [self.what.rstrip(".")]
        if self.why:
            parts.append(f"because {self.why.rstrip('.')}")
        text = " ".join(parts) + "."
        return f"{text} {self.remedy}" if self.remedy else text


class UsageError(HexcombError):
    """A command or a file that a person wrote is wrong."""

    code = "USAGE"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 2


class UnknownSettingError(UsageError):
    """A key that the run file or the node's settings do not know; names the nearest valid one."""

    code = "UNKNOWN_SETTING"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 2


class GraderFooledError(UsageError):
    """The rewards of a run give full marks to an answer that is known to be wrong, or none to a right one."""

    code = "GRADER_FOOLED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 2


class DaemonNotRunningError(HexcombError):
    """No daemon answers on the home folder's socket."""

    code = "DAEMON_NOT_RUNNING"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    exit_code = 3


class NotJoinedError(HexcombError):
    """The home folder belongs to no run yet."""

    code = "NOT_JOINED"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 4


class MachineUnfitError(HexcombError):
    """The machine, its installation or a file that it needs is not fit for the job."""

    code = "MACHINE_UNFIT"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 5


class ModelMissingError(MachineUnfitError):
    """The model's folder is not there or lacks a file."""

    code = "MODEL_MISSING"
    grpc_status = "NOT_FOUND"
    http_status = 404
    exit_code = 10


class PortInUseError(MachineUnfitError):
    """Another program holds the port."""

    code = "PORT_IN_USE"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    exit_code = 11


class EngineError(MachineUnfitError):
    """The rollout engine or the trainer failed or answered nonsense."""

    code = "ENGINE"
    grpc_status = "INTERNAL"
    http_status = 500
    exit_code = 12


class WeightsUnfitError(EngineError):
    """A weight file lacks tensors of the model, has others, or has them in another shape or type."""

    code = "WEIGHTS_UNFIT"


class EngineUntrustedError(EngineError):
    """The engine's log-probabilities are not those of the weights that it was given: it may not sample."""

    code = "ENGINE_UNTRUSTED"


class ModelRefusedError(EngineError):
    """No engine here takes the model: too large, of an unknown kind, or with code of its own."""

    code = "MODEL_REFUSED"


class IdentityError(HexcombError):
    """The key file cannot be used."""

    code = "IDENTITY"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 13


class KeyFileExposedError(IdentityError):
    """Others can read the key file."""

    code = "KEY_FILE_EXPOSED"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 14


class HomeInUseError(IdentityError):
    """A second daemon would run with the same key."""

    code = "HOME_IN_USE"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 15


class RefusedError(HexcombError):
    """The coordinator said no."""

    code = "REFUSED"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    exit_code = 6


class InviteMangledError(RefusedError):
    """The invite is not a whole invite."""

    code = "INVITE_MANGLED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 20


class InviteUnknownError(RefusedError):
    """The coordinator never made this invite, or the secret is wrong."""

    code = "INVITE_UNKNOWN"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    exit_code = 21


class InviteExpiredError(RefusedError):
    """The invite's time is over."""

    code = "INVITE_EXPIRED"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    exit_code = 22


class InviteUsedUpError(RefusedError):
    """All uses of the invite are gone."""

    code = "INVITE_USED_UP"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    exit_code = 23


class KeyRefusedError(RefusedError):
    """A small-order or non-canonical Ed25519 key."""

    code = "KEY_REFUSED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 24


class UnauthenticatedError(RefusedError):
    """The caller is not who the message says, or a signature does not hold."""

    code = "UNAUTHENTICATED"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    exit_code = 25


class NotEnrolledError(RefusedError):
    """The caller has no place in this run."""

    code = "NOT_ENROLLED"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    exit_code = 26


class UnreachableError(HexcombError):
    """Nobody answered within the deadline."""

    code = "UNREACHABLE"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    exit_code = 7


class WorkRefusedError(HexcombError):
    """The coordinator will not hand out or take this work."""

    code = "WORK_REFUSED"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class NoWorkError(WorkRefusedError):
    """There is no capacity for more slots now; ask again later."""

    code = "NO_WORK"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    exit_code = 6


class VersionTooOldError(WorkRefusedError):
    """The weights are too old for this work; the error names what to fetch."""

    code = "VERSION_TOO_OLD"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class VersionFromFutureError(WorkRefusedError):
    """The version named does not exist yet."""

    code = "VERSION_FROM_FUTURE"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class RootMismatchError(WorkRefusedError):
    """The node's weights are not the committed ones of that version."""

    code = "ROOT_MISMATCH"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class LeaseUnknownError(WorkRefusedError):
    """No such open lease of this node."""

    code = "LEASE_UNKNOWN"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class RolloutConflictError(WorkRefusedError):
    """The slot holds another rollout already."""

    code = "ROLLOUT_CONFLICT"
    grpc_status = "ALREADY_EXISTS"
    http_status = 409
    exit_code = 6


class RolloutMalformedError(WorkRefusedError):
    """Shape, range, length or signature of a rollout is wrong."""

    code = "ROLLOUT_MALFORMED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 6


class RoundStaleError(WorkRefusedError):
    """The round named is not the open one."""

    code = "ROUND_STALE"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    exit_code = 6


class PartRefusedError(WorkRefusedError):
    """A member's part of a gradient has the wrong length or order, or is not finite."""

    code = "PART_REFUSED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 6


class PartConflictError(WorkRefusedError):
    """The member has sent this part already."""

    code = "PART_CONFLICT"
    grpc_status = "ALREADY_EXISTS"
    http_status = 409
    exit_code = 6


class ManifestRefusedError(HexcombError):
    """A manifest is unsigned, from another run, or inconsistent."""

    code = "MANIFEST_REFUSED"
    grpc_status = "DATA_LOSS"
    http_status = 502
    exit_code = 6


class ChunkCorruptError(HexcombError):
    """Bytes do not have the hash that names them."""

    code = "CHUNK_CORRUPT"
    grpc_status = "DATA_LOSS"
    http_status = 502
    exit_code = 6


class ChunkMissingError(HexcombError):
    """Nobody asked holds the chunk."""

    code = "CHUNK_MISSING"
    grpc_status = "NOT_FOUND"
    http_status = 404
    exit_code = 6


class VersionPastError(ChunkMissingError):
    """The version is past its retention: nobody holds its bytes any more; names those that are held."""

    code = "VERSION_PAST"
    grpc_status = "NOT_FOUND"
    http_status = 410
    exit_code = 6


class RecordRefusedError(HexcombError):
    """A DHT record is too large, unsigned, stale or not its owner's."""

    code = "RECORD_REFUSED"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 6


class JournalError(HexcombError):
    """The journal cannot be read or written."""

    code = "JOURNAL"
    grpc_status = "DATA_LOSS"
    http_status = 500
    exit_code = 16


def _descendants(root: type[HexcombError]) -> list[type[HexcombError]]:
    children = root.__subclasses__()
    return children + [grandchild for child in children for grandchild in _descendants(child)]


_KINDS: list[type[HexcombError]] = [HexcombError, *_descendants(HexcombError)]
ERRORS_BY_CODE: dict[str, type[HexcombError]] = {kind.code: kind for kind in _KINDS}
