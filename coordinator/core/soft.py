"""What is known of live nodes only by hearsay and for a while. Pure.

Soft facts are never journaled and are empty after a restart; nothing in `State` may depend on them except through
a fact. Times are the coordinator's clock in milliseconds.
"""

from dataclasses import dataclass, field

from coordinator.core.events import Capability, Presence, SlotProgress
from protocol.ids import Digest, PeerId, Version
from protocol.manifest import Body


@dataclass(slots=True)
class Sighting:
    """The last sign of life. `ended_ms` is set while the node's stream is broken."""

    presence: Presence
    seen_ms: int
    ended_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Attestation:
    """What a member of the open round says it made."""

    digest: Digest
    body: Body
    metrics: dict[str, float]
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AskedEvaluation:
    """An evaluation that a trainer was asked for and has not answered."""

    version: Version
    peer_id: PeerId
    asked_ms: int


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a leased slot has come, and when that was heard."""

    said: SlotProgress
    at_ms: int


@dataclass(slots=True)
class Pace:
    """How fast single slots come on at a node: tokens over time, both fading."""

    num_tokens: float = 0.0
    span_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of one slot."""
        return self.num_tokens * 1000 / self.span_ms if self.span_ms else 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the living rollout nodes at a time: the best measured rate, the sum of what their wishes count, how many."""

    at_ms: int
    best_measured: float
    weight: float
    num_nodes: int


@dataclass(slots=True)
class Hunger:
    """What a node still wants: slots, when it last asked, how many of those that are free are kept for it, and how many
    it could take as things stand."""

    num_wanted: int
    asked_ms: int
    num_allotted: int = 0
    num_usable: int = 0


@dataclass(slots=True)
class Soft:
    """`live` holds exactly the nodes that count as alive; `watched_ms` is when that was last judged, `thawed_ms` when
    the process last came out of a standstill. `tardy` trainers made a round wait in vain and are not waited for again
    until they are ready. `attestations` belong to the open round, which dies with the process. `progress` is how far
    leased slots have come, by (group index, sample), `newest_piece_ms` when anything last came of a node, `paces` how
    fast its slots come on; `late` are slots that another node may take over, as of `late_seen_ms`, `stalls_seen_ms` and
    `leases_seen_ms` when slots and leases were last looked through. `hungry` and `credits` are for sharing scarce work,
    `pool_credits` for turns of pools, `askers` the last two nodes that asked for it and when, `faults` how many leases
    a node failed in a row and when, `failed_ms` when a slot was last failed. `old_slots_since_ms` is since when a round
    waits for old slots."""

    started_ms: int | None = None
    watched_ms: int | None = None
    thawed_ms: int | None = None
    live: dict[PeerId, Sighting] = field(default_factory=dict)
    capabilities: dict[PeerId, Capability] = field(default_factory=dict)
    newcomer_ms: int = 0
    roles_dirty: bool = False
    waiting_since_ms: int | None = None
    stalled_since_ms: int | None = None
    reseal_after_ms: int = 0
    tardy: set[PeerId] = field(default_factory=set)
    attestations: dict[PeerId, Attestation] = field(default_factory=dict)
    asked: AskedEvaluation | None = None
    progress: dict[tuple[int, int], Advance] = field(default_factory=dict)
    newest_piece_ms: dict[PeerId, int] = field(default_factory=dict)
    paces: dict[PeerId, Pace] = field(default_factory=dict)
    late: list[tuple[int, int]] = field(default_factory=list)
    late_seen_ms: int = 0
    stalls_seen_ms: int = 0
    leases_seen_ms: int = 0
    hungry: dict[PeerId, Hunger] = field(default_factory=dict)
    credits: dict[PeerId, float] = field(default_factory=dict)
    pool_credits: dict[int, float] = field(default_factory=dict)
    askers: tuple[tuple[PeerId, int], ...] = ()
    totals: Totals | None = None
    rooms_ms: int = 0
    faults: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    failed_ms: dict[tuple[int, int], int] = field(default_factory=dict)
    old_slots_since_ms: int | None = None
