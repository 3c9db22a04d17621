"""What the core asks its shell to do once the outcome is in the journal: the closed union of effects. Pure."""

from dataclasses import dataclass

from protocol.ids import Digest, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.manifest import Body
from protocol.round import Member, Shard
from protocol.run import Role


@dataclass(frozen=True, slots=True)
class AssignRole:
    """Tell a node its role."""

    peer_id: PeerId
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ScoreRollout:
    """Have the grader score an accepted rollout; its answer comes back as `RolloutScored`."""

    slot: SlotKey


@dataclass(frozen=True, slots=True)
class CancelLeases:
    """Tell a node that these leases are over."""

    peer_id: PeerId
    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class CancelSlots:
    """Tell a node to stop working on single slots."""

    peer_id: PeerId
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Sign the plan of a sealed round and send it to its members. The sum over the batch is divided by `divisor`;
    `remaining_s` is the time until the deadline."""

    round_id: RoundId
    base_version: Version
    base_root: Digest
    members: tuple[Member, ...]
    shards: tuple[Shard, ...]
    divisor: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class AbortRound:
    """Tell the members that the round is over without a version."""

    round_id: RoundId
    members: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceVersion:
    """Tell every live node that a version was committed."""

    version: Version
    body: Body


@dataclass(frozen=True, slots=True)
class RequestEvaluation:
    """Have a trainer complete the held-out tasks greedily under a version that it holds."""

    peer_id: PeerId
    version: Version


Effect = (
    AssignRole | ScoreRollout | CancelLeases | CancelSlots | SendPlan | AbortRound | AnnounceVersion | RequestEvaluation
)
