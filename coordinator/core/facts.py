"""What did happen: the closed union of hard outcomes that the core decides and the journal keeps. Pure.

Facts are in the past tense and carry everything that `apply` needs, so that replaying them never decides anything
again and gives the same state, byte for byte. A fact travels as `[its class's name, its fields]` in msgpack.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from coordinator.core.events import InviteRole
from protocol.errors import JournalError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, TaskKey, Version
from protocol.manifest import Body
from protocol.rollout import Spans
from protocol.round import Member, Shard
from protocol.run import Role

AbortReason = Literal["RESTART", "MEMBER_LOST", "MEMBER_RESTARTED", "DEADLINE", "FAILED", "DIVERGED"]
DropReason = Literal["stale", "too_few_rewards", "no_variance"]
LeaseEnd = Literal["filled", "expired", "returned"]


@dataclass(frozen=True, slots=True)
class Started:
    """A coordinator process took over this journal."""

    epoch: int


@dataclass(frozen=True, slots=True)
class InviteMade:
    """An invite exists."""

    invite_id: InviteId
    mac_key: str
    num_uses: int
    expires_ms: int
    role: InviteRole


@dataclass(frozen=True, slots=True)
class NodeEnrolled:
    """A key got a place in the run and used an invite once."""

    peer_id: PeerId
    invite_id: InviteId
    role: InviteRole
    enrolled_ms: int


@dataclass(frozen=True, slots=True)
class RoleGiven:
    """A node's role from now on."""

    peer_id: PeerId
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node with a role gave no sign of life for too long; it has no role until it returns."""

    peer_id: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TrainersFailed:
    """Living trainers were not ready for a batch for so long that another node shall have their seats."""

    peer_ids: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """A version exists. The open batch (its `groups`) is trained; what is older than `keep_from` may be forgotten.
    `canary` are the log-probabilities of the probe that its trainers agree on, empty where they do not."""

    version: Version
    root: Digest
    body: Body
    round_id: RoundId | None
    committed_ms: int
    metrics: dict[str, float]
    groups: tuple[int, ...]
    keep_from: Version
    evaluate: bool
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """A new task under work, and the version under which its slots were opened."""

    task: TaskKey
    version: Version
    num_slots: int

    def key(self, sample: int) -> SlotKey:
        """The name of a slot."""
        return SlotKey(self.version, self.task, sample)


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """The next tasks of an epoch, in the order in which they shall be opened: longest first."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CurriculumBegun:
    """From now on a task's index modulo `num_pools` is its pool."""

    num_pools: int


@dataclass(frozen=True, slots=True)
class LengthLearned:
    """Median length of a task's completions, in tokens, and the longest. `entry` is its place in the epoch."""

    entry: int
    num_tokens: int
    longest: int = 0


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A node may fill `slots`; some of them belong to groups that were opened for it."""

    lease_id: LeaseId
    peer_id: PeerId
    slots: tuple[SlotKey, ...]
    opened: tuple[OpenedGroup, ...]
    deadline_ms: int
    granted_ms: int = 0


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """The slots of a lease make progress: it ends later."""

    lease_id: LeaseId
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """A lease ended; its unfilled slots wait for another node. A lost node's leases count as expired. `is_fault` says
    whether that speaks against the node and counts as a try of its slots, `is_try` that it counts as a try alone."""

    lease_id: LeaseId
    how: LeaseEnd
    reason: str = ""
    is_fault: bool = False
    is_try: bool = False


@dataclass(frozen=True, slots=True)
class SlotMoved:
    """A slot that waits again keeps what was received of it: whoever fills it goes on from there. `segments` are
    (version, number of tokens), `edge` is the digest after the last piece, `given` where the environment's are."""

    slot: SlotKey
    segments: tuple[tuple[Version, int], ...]
    edge: Digest
    given: Spans = ()


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """A node handed in a turn of a slot, and the environment replied: the slot waits again, and goes on after the
    reply. `segments`, `edge` and `given` are of all up to there; `answered` is the digest before the reply."""

    slot: SlotKey
    lease_id: LeaseId
    peer_id: PeerId
    segments: tuple[tuple[Version, int], ...]
    edge: Digest
    given: Spans
    answered: Digest
    taken_ms: int


@dataclass(frozen=True, slots=True)
class PrefixDropped:
    """A slot that waits starts anew: what was received of it is too old, or cannot be trusted, or is gone."""

    slot: SlotKey
    reason: str


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """A waiting slot was tried too often, or its environment failed: it ends without a reward, as a dead letter."""

    slot: SlotKey
    reason: str


@dataclass(frozen=True, slots=True)
class SlotCancelled:
    """A running slot is dropped before its end, since at the cut it would be too old. `lease_id` is None where it
    waits."""

    slot: SlotKey
    lease_id: LeaseId | None


@dataclass(frozen=True, slots=True)
class SlotGivenBack:
    """One slot left its lease unfilled: what was handed in was too old, nothing came of it any more, the environment
    had no reply to it, or it has outgrown what its task came to before and another node will sooner be done with it."""

    lease_id: LeaseId
    slot: SlotKey
    reason: Literal["stale", "stalled", "no_reply", "outgrown"] = "stale"


@dataclass(frozen=True, slots=True)
class RolloutAccepted:
    """A slot is filled. `segments` are (version, number of tokens), `given` says where the environment's are."""

    slot: SlotKey
    lease_id: LeaseId
    peer_id: PeerId
    digest: Digest
    segments: tuple[tuple[Version, int], ...]
    accepted_ms: int
    given: Spans = ()


@dataclass(frozen=True, slots=True)
class RewardRecorded:
    """The grader's word on a slot; None = missing."""

    slot: SlotKey
    reward: float | None


@dataclass(frozen=True, slots=True)
class SlotDropped:
    """At the cut no token of the slot was live; its reward still shapes its group's mean."""

    slot: SlotKey


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A complete group will not be trained on; its capacity returns."""

    index: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class RoundSealed:
    """A batch is reserved for one attempt at the next version. `shares` are (member, its slots)."""

    round_id: RoundId
    base_version: Version
    max_lag: int
    groups: tuple[int, ...]
    members: tuple[Member, ...]
    shares: tuple[tuple[PeerId, tuple[SlotKey, ...]], ...]
    shards: tuple[Shard, ...]
    num_tokens: int
    sealed_ms: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """An attempt is over without a version; its slots stay reserved for the next attempt, without the suspects."""

    round_id: RoundId
    reason: AbortReason
    detail: str
    suspects: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class EvaluationRecorded:
    """Held-out accuracy of a version."""

    version: Version
    num_tasks: int
    accuracy: float


Fact = (
    Started
    | InviteMade
    | NodeEnrolled
    | RoleGiven
    | NodeLost
    | TrainersFailed
    | VersionCommitted
    | BlockBegun
    | CurriculumBegun
    | LengthLearned
    | LeaseGranted
    | LeaseExtended
    | LeaseClosed
    | SlotMoved
    | TurnTaken
    | PrefixDropped
    | SlotFailed
    | SlotCancelled
    | SlotGivenBack
    | RolloutAccepted
    | RewardRecorded
    | SlotDropped
    | GroupDropped
    | RoundSealed
    | RoundAborted
    | EvaluationRecorded
)
_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in get_args(Fact)}


def encode_fact(fact: Fact) -> bytes:
    """The fact as the journal keeps it."""
    return msgspec.msgpack.encode((type(fact).__name__, fact))


def decode_fact(data: bytes) -> Fact:
    """The inverse of `encode_fact`. Raises `JournalError`."""
    try:
        name, fields = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        return msgspec.msgpack.decode(fields, type=_KINDS[name])
    except (msgspec.DecodeError, KeyError) as error:
        raise JournalError(
            "a fact of the journal cannot be read",
            why=str(error),
            remedy="Use the release of hexcomb that wrote the journal, or restore a backup.",
        ) from error
