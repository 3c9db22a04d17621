"""What can happen to the coordinator: the closed union of events that enter the core by `handle`. Pure.

Events are in the past tense and carry what the shell has already checked (signatures, shapes); the core judges
leases, versions, lag and order. Soft events (`NodeSeen`, `SessionEnded`, `CapabilityLearned`, `PiecesReceived`,
`TurnsAwaited`) change only what is known of live nodes and running slots, which is not journaled and is empty after a
restart.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.manifest import Body
from protocol.rollout import Spans
from protocol.run import Role

InviteRole = Literal["auto", "trainer", "rollout"]
ANY_ROLE: tuple[Role, ...] = ("trainer", "rollout")


@dataclass(frozen=True, slots=True)
class Capability:
    """What a node measured of itself; `reachable` says whether other machines can dial it."""

    decode_tokens_per_s: float
    train_tokens_per_s: float
    memory_bytes: int
    device: str
    link_mbit_per_s: float = 0.0
    rtt_ms: float = 0.0
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class Presence:
    """What the last sign of life said. `version` is -1 while nothing is loaded; endpoints are host:port or empty;
    `unwilling` is why the node's owner wants no work for it now, `allowed_roles` what the owner lets it do at all."""

    version: Version
    root: Digest
    versions_held: tuple[Version, ...]
    endpoint: str
    trainer_endpoint: str
    activity: str
    tokens_per_s: float
    engine: str
    name: str = ""
    unwilling: str = ""
    allowed_roles: tuple[Role, ...] = ANY_ROLE


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The process came up with this journal; counts as an epoch. An open round is aborted, since its plan is lost."""


@dataclass(frozen=True, slots=True)
class InviteCreated:
    """The organizer made an invite; `mac_key` (hex) proves knowledge of its secret. `expires_ms` is absolute."""

    invite_id: InviteId
    mac_key: str
    num_uses: int
    expires_ms: int
    role: InviteRole


@dataclass(frozen=True, slots=True)
class InviteRedeemed:
    """Somebody proved an invite and a key; the same key again is the same enrolment."""

    invite_id: InviteId
    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """Hello or heartbeat of an enrolled node (soft)."""

    peer_id: PeerId
    presence: Presence


@dataclass(frozen=True, slots=True)
class CapabilityLearned:
    """A node's measured capability, from its hello or from the DHT (soft)."""

    peer_id: PeerId
    capability: Capability


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A node's stream broke (soft); it is lost unless it is seen again within two heartbeats."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class BaseRegistered:
    """The organizer's base model; becomes version 0 if there is none yet. `canary` as in `VersionAttested`."""

    body: Body
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkRequested:
    """A node with `version` loaded would fill `num_slots`; the shell drew the lease's id."""

    peer_id: PeerId
    version: Version
    root: Digest
    num_slots: int
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """A node gives the unfilled slots of a lease back. `is_fault`: it tried and could not fill them. `is_try`: nobody
    could have filled them, which counts against them, and not against the node."""

    peer_id: PeerId
    lease_id: LeaseId
    reason: str = ""
    is_fault: bool = False
    is_try: bool = False


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """How far a slot has come: `segments` are (version, number of tokens) of all that was received of it, `edge` is
    the digest (`protocol.rollout.edges_of`) after the last of its pieces, `given` says where the environment's are."""

    peer_id: PeerId
    lease_id: LeaseId
    slot: SlotKey
    segments: tuple[tuple[Version, int], ...]
    edge: Digest
    given: Spans = ()


@dataclass(frozen=True, slots=True)
class PiecesReceived:
    """Slots under way came on since the last event of this kind (soft; it may prolong leases)."""

    progress: tuple[SlotProgress, ...]


@dataclass(frozen=True, slots=True)
class TurnsAwaited:
    """What a node handed in of these slots is with the environment, which takes its time (soft; it may prolong the
    lease)."""

    peer_id: PeerId
    lease_id: LeaseId
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True, slots=True)
class PrefixLost:
    """The pieces that a moved slot should go on from are gone, or their signatures do not hold: it starts anew."""

    slot: SlotKey
    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentReplied:
    """What the environment said to the turn that a rollout ends with: so many tokens, and the digest after them."""

    num_tokens: int
    edge: Digest


@dataclass(frozen=True, slots=True)
class RolloutSubmitted:
    """A filled slot whose shape and signatures the shell has checked. `segments` are (version, number of tokens);
    `edges` the digests after its pieces (`protocol.rollout.edges_of`), `given` where the environment's tokens are. With
    a `reply` it is not at its end; a text is why the environment could not say whether it is."""

    peer_id: PeerId
    lease_id: LeaseId
    slot: SlotKey
    digest: Digest
    segments: tuple[tuple[Version, int], ...]
    edges: tuple[Digest, ...] = ()
    given: Spans = ()
    reply: EnvironmentReplied | str | None = None


@dataclass(frozen=True, slots=True)
class RolloutScored:
    """The grader's word on an accepted rollout; None = missing (a fault of grader or machine, never a zero)."""

    slot: SlotKey
    reward: float | None


@dataclass(frozen=True, slots=True)
class VersionAttested:
    """A member of the open round made these weights; `canary` is what it computes of the probe (`protocol.canary`)."""

    peer_id: PeerId
    round_id: RoundId
    body: Body
    metrics: dict[str, float]
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A member says that the round cannot be finished, and who did not do their part."""

    peer_id: PeerId
    round_id: RoundId
    suspects: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationScored:
    """Accuracy of a version on the held-out tasks, scored by the coordinator's grader."""

    version: Version
    num_tasks: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Time passed: deadlines of leases, rounds and nodes are looked at, and a batch is cut if there is one."""


Event = (
    CoordinatorStarted
    | InviteCreated
    | InviteRedeemed
    | NodeSeen
    | CapabilityLearned
    | SessionEnded
    | BaseRegistered
    | WorkRequested
    | LeaseReturned
    | PiecesReceived
    | TurnsAwaited
    | PrefixLost
    | RolloutSubmitted
    | RolloutScored
    | VersionAttested
    | RoundFailed
    | EvaluationScored
    | TimerFired
)
