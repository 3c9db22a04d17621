"""What the coordinator says to a node, as dataclasses: the messages of the session, leases and receipts.
Pure.

Signatures inside are not checked here: manifests and plans are opened, with the coordinator's key, by those
who act.
"""

from dataclasses import dataclass

from protocol.errors import HexcombError, RefusedError
from protocol.ids import Digest, LeaseId, RoundId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from protocol.rollout import Piece, unpack_ids
from protocol.round import SignedPlan
from protocol.run import Role, RunSpec
from protocol.v1 import control_pb2
from protocol.wire import piece_of, signed_manifest, signed_plan, slot_key, task_key


@dataclass(frozen=True, slots=True)
class Welcome:
    """The run, the coordinator's clock (Unix ms), the count of its starts, and where the directory is entered."""

    spec: RunSpec
    now_ms: int
    epoch: int
    bootstraps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """The node's role from now on, and why."""

    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """A committed version, and who holds it, best first."""

    manifest: SignedManifest
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundSealed:
    """The node is a member of a round."""

    plan: SignedPlan


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """The round will not be finished in this form."""

    round_id: RoundId
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationRequested:
    """Prompts to complete greedily under a version."""

    version: Version
    tasks: tuple[TaskKey, ...]
    prompt_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LeasesCancelled:
    """Leases to stop working on, and single slots of leases that go on."""

    lease_ids: tuple[LeaseId, ...]
    slots: tuple[SlotKey, ...] = ()


Order = Welcome | RoleAssigned | VersionAnnounced | RoundSealed | RoundAborted | EvaluationRequested | LeasesCancelled


@dataclass(frozen=True, slots=True)
class SlotWork:
    """A slot to fill. `prompt_ids` is empty where the node is expected to have the environment; `pieces` are what
    others have sampled of it."""

    slot: SlotKey
    prompt_digest: Digest
    prompt_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to fill `slots` for `remaining_s` seconds from its arrival."""

    lease_id: LeaseId
    slots: tuple[SlotWork, ...]
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a rollout: "ACCEPTED", "DUPLICATE", "TURN_TAKEN" (another lease goes on with the slot),
    "SLOT_FAILED" (its environment failed), or the code of the refusal."""

    slot: SlotKey
    outcome: str
    detail: str

    @property
    def is_taken(self) -> bool:
        """Whether the coordinator has the rollout, and nothing is left to do for the slot under this lease."""
        return self.outcome in ("ACCEPTED", "DUPLICATE", "TURN_TAKEN", "SLOT_FAILED")


@dataclass(frozen=True, slots=True)
class PiecesReceived:
    """The answer to pieces handed in: slots that the node no longer holds, the position from which pieces of a slot are
    missing, and the seconds until each lease ends."""

    unwanted: tuple[SlotKey, ...] = ()
    gaps: tuple[tuple[SlotKey, int], ...] = ()
    remaining_s: tuple[tuple[LeaseId, float], ...] = ()


def order_of(message: control_pb2.SessionResponse) -> Order:
    """The order in a message of the session. Raises `RefusedError` on one that this program does not know."""
    match message.WhichOneof("message"):
        case "welcome":
            return _welcome(message.welcome)
        case "role_assigned":
            return RoleAssigned(_role(message.role_assigned.role), message.role_assigned.reason)
        case "version_announced":
            return announcement_of(message.version_announced)
        case "round_sealed":
            return RoundSealed(signed_plan(message.round_sealed.plan))
        case "round_aborted":
            return RoundAborted(RoundId(message.round_aborted.round_id), message.round_aborted.reason)
        case "evaluation_requested":
            prompts = message.evaluation_requested.prompts
            return EvaluationRequested(
                Version(message.evaluation_requested.version),
                tuple(task_key(prompt.task) for prompt in prompts),
                tuple(unpack_ids(prompt.token_ids) for prompt in prompts),
            )
        case "leases_cancelled":
            lease_ids = tuple(LeaseId(name) for name in message.leases_cancelled.lease_ids)
            return LeasesCancelled(lease_ids, tuple(slot_key(slot) for slot in message.leases_cancelled.slots))
        case _:
            raise _unknown("a message of an unknown kind came")


def announcement_of(message: control_pb2.VersionAnnounced) -> VersionAnnounced:
    """A committed version, unverified."""
    return VersionAnnounced(signed_manifest(message.manifest), tuple(message.holders))


def lease_of(message: control_pb2.LeaseWorkResponse) -> Lease:
    """A lease."""
    slots = tuple(
        SlotWork(
            slot_key(work.slot),
            Digest(work.prompt_digest),
            unpack_ids(work.prompt_ids),
            tuple(piece_of(piece) for piece in work.pieces),
        )
        for work in message.slots
    )
    return Lease(LeaseId(message.lease_id), slots, message.remaining_s)


def receipt_of(message: control_pb2.RolloutReceipt) -> Receipt:
    """A receipt."""
    return Receipt(slot_key(message.slot), message.outcome, message.detail)


def pieces_received_of(message: control_pb2.SubmitPiecesResponse) -> PiecesReceived:
    """An answer to pieces."""
    return PiecesReceived(
        tuple(slot_key(slot) for slot in message.unwanted),
        tuple((slot_key(gap.slot), gap.start) for gap in message.gaps),
        tuple((LeaseId(lease.lease_id), lease.remaining_s) for lease in message.leases),
    )


def _welcome(message: control_pb2.Welcome) -> Welcome:
    try:
        spec = RunSpec.from_bytes(message.run_spec)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise _unknown(f"the run's spec cannot be read: {error}") from error
    return Welcome(spec, message.now_ms, message.epoch, tuple(message.dht_bootstraps))


def _role(text: str) -> Role:
    match text:
        case "trainer" | "rollout" | "idle":
            return text
        case _:
            raise _unknown(f"the role {text[:32]!a} is unknown")


def _unknown(why: str) -> HexcombError:
    return RefusedError("the coordinator's word was not understood", why=why, remedy="Update hexcomb on both sides.")
