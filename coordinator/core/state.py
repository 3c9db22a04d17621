"""What the coordinator knows for certain. Pure.

`State` is hard: only `apply.apply` changes it, it is what a snapshot holds, and two replays of the same facts give
the same bytes (so it has no sets, and every dict is in order of insertion). What is only known of live nodes is in
`soft.Soft`. A group is found by its task's index, a slot by its group and sample.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from coordinator.core.events import InviteRole
from coordinator.core.facts import LeaseEnd
from protocol.errors import JournalError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, TaskKey, Version
from protocol.manifest import Body
from protocol.rollout import Spans
from protocol.round import Member, Shard
from protocol.run import Role

Status = Literal["waiting", "leased", "accepted", "scored", "in_round", "trained", "dropped", "filtered", "failed"]
"""Where a slot is: waiting for a node, leased to one, accepted (no reward yet), scored, reserved by a batch; then
the four ends: trained, dropped (stale), filtered (its group had too few rewards), failed (no reward)."""

Claim = LeaseEnd | Literal["granted", "open"]
"""The columns of the lease book, which counts slots under lease: granted = open + filled + expired + returned."""


def _zeros() -> dict[Status, int]:
    return dict.fromkeys(get_args(Status), 0)


@dataclass(slots=True)
class Invite:
    """`mac_key` (hex) proves knowledge of the invite's secret."""

    mac_key: str
    num_uses: int
    expires_ms: int
    role: InviteRole
    num_used: int = 0


@dataclass(slots=True)
class Node:
    """An enrolled key. `num_leased` counts the slots that it holds now. `credit` is the
    slots that it filled less those that it let expire. `failure` is the share of its slots that it failed to fill, as
    a moving average. `rate` is what the coordinator measures of it, in tokens per second of work: `busy_tokens` over
    `busy_ms`, both fading, up to `measured_ms`. `num_strikes` counts the attempts in a row that failed because of it;
    it is left out of rounds below version `left_out_until`."""

    invite_id: InviteId
    invite_role: InviteRole
    enrolled_ms: int
    num_leased: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    num_rounds: int = 0
    num_strikes: int = 0
    left_out_until: int = 0
    credit: int = 0
    failure: float = 0.0
    rate: float = 0.0
    measured_ms: int = 0
    busy_ms: float = 0.0
    busy_tokens: float = 0.0
    num_losses: int = 0


@dataclass(slots=True)
class Lease:
    """Permission of one node; `slots` are the (group index, sample) still unfilled. `granted_ms` is when it began."""

    peer_id: PeerId
    deadline_ms: int
    slots: list[tuple[int, int]]
    granted_ms: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was received of a slot before it moved: whoever fills it must go on from exactly this. `given` is where the
    environment's tokens are; where it ends with them, `answered` is the digest before."""

    segments: tuple[tuple[Version, int], ...]
    edge: Digest
    given: Spans = ()
    answered: Digest | None = None

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return sum(length for _, length in self.segments)


@dataclass(slots=True)
class Slot:
    """One sample. `peer_id`, `digest`, `segments`, and `given` (where the environment's tokens are) are set once it is
    filled. While it waits or runs, `prefix` is what it goes on from, `num_tries` counts the nodes that failed it, and
    `failed_by` is the last of them."""

    status: Status = "waiting"
    lease_id: LeaseId | None = None
    peer_id: PeerId | None = None
    digest: Digest | None = None
    segments: tuple[tuple[Version, int], ...] = ()
    reward: float | None = None
    prefix: Prefix | None = None
    num_tries: int = 0
    failed_by: PeerId | None = None
    given: Spans = ()

    @property
    def sampled(self) -> tuple[tuple[Version, int], ...]:
        """`segments` less the environment's tokens, which no version sampled."""
        if not self.given:
            return self.segments
        found, start = list[tuple[Version, int]](), 0
        for version, length in self.segments:
            stop = start + length
            num_given = sum(max(0, min(stop, at + num) - max(start, at)) for at, num in self.given)
            found.append((version, length - num_given))
            start = stop
        return tuple(found)


@dataclass(slots=True)
class Group:
    """The slots of one task, opened under `version`."""

    task: TaskKey
    version: Version
    slots: list[Slot]

    def key(self, sample: int) -> SlotKey:
        """The name of a slot."""
        return SlotKey(self.version, self.task, sample)

    @property
    def rewards(self) -> list[float]:
        """Of the members that have one."""
        return [slot.reward for slot in self.slots if slot.reward is not None]

    @property
    def is_complete(self) -> bool:
        """Whether every slot has come to an end or has its reward."""
        return all(slot.status not in ("waiting", "leased", "accepted") for slot in self.slots)


@dataclass(slots=True)
class Pool:
    """Some of a run's tasks. `num_opened` of them were opened, or stand in the present block; `mean_reward` is a moving
    average over the members' rewards, of which there were `num_rewards`."""

    num_opened: int = 0
    num_rewards: int = 0
    mean_reward: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A slot that nobody could fill, why the last of them gave up, and the version at that time."""

    slot: SlotKey
    reason: str
    at_version: Version


@dataclass(slots=True)
class Retired:
    """What is kept of a finished group, to answer late duplicates: who filled each slot, with what."""

    task: TaskKey
    version: Version
    at_version: Version
    fills: tuple[tuple[PeerId, Digest] | None, ...]


@dataclass(slots=True)
class Batch:
    """Groups reserved for the update that starts from `base_version`, whatever number of attempts it takes."""

    base_version: Version
    max_lag: int
    groups: tuple[int, ...]
    num_tokens: int
    num_attempts: int = 0


@dataclass(slots=True)
class Round:
    """The open attempt at the batch."""

    round_id: RoundId
    members: tuple[Member, ...]
    shares: tuple[tuple[PeerId, tuple[SlotKey, ...]], ...]
    shards: tuple[Shard, ...]
    sealed_ms: int
    deadline_ms: int

    @property
    def peer_ids(self) -> tuple[PeerId, ...]:
        """Of the members, in the plan's order."""
        return tuple(member.peer_id for member in self.members)


@dataclass(slots=True)
class VersionRecord:
    """A committed version as people see it."""

    version: Version
    root: Digest
    committed_ms: int
    round_id: RoundId | None
    metrics: dict[str, float]
    accuracy: float | None = None
    num_tasks: int = 0


@dataclass(slots=True)
class State:
    """Everything hard. `versions` is the recent history, newest last; `roots` those that the lag rule still needs;
    `lag_histogram` counts trained tokens by their lag. Tasks are opened by blocks of a batch: `ahead` are those of the
    present block that are not open yet, `next_index` is where the next block begins. `lengths` and `longest` hold, for
    each task of an epoch, median and maximum of its last completions, four bytes each; `growth` follows the 75th
    percentile of what these maxima grow by, `mean_length` is a moving average over all (tokens). `move_credit` is
    earned by filled slots and spent on outliers that move; `num_moved` counts these, `moved` names those under way that
    no node has failed since, by group and sample: they do not move again. `pools` are there where a
    curriculum chooses between them: a task's is its index modulo their number."""

    epoch: int = 0
    invites: dict[InviteId, Invite] = field(default_factory=dict)
    nodes: dict[PeerId, Node] = field(default_factory=dict)
    roles: dict[PeerId, Role] = field(default_factory=dict)
    roles_given: bool = False
    num_vacant_seats: int = 0

    base_root: Digest | None = None
    head_body: Body | None = None
    versions: list[VersionRecord] = field(default_factory=list)
    roots: dict[Version, Digest] = field(default_factory=dict)
    evaluations_due: list[Version] = field(default_factory=list)

    next_index: int = 0
    ahead: list[int] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    lengths: bytearray = field(default_factory=bytearray)
    longest: bytearray = field(default_factory=bytearray)
    growth: float = 1.0
    move_credit: int = 0
    num_moved: int = 0
    moved: dict[int, list[int]] = field(default_factory=dict)
    mean_length: float = 0.0
    num_issued: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    retired: dict[int, Retired] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    batch: Batch | None = None
    round: Round | None = None

    tally: dict[Status, int] = field(default_factory=_zeros)
    retired_tally: dict[Status, int] = field(default_factory=_zeros)
    claims: dict[Claim, int] = field(
        default_factory=lambda: {"granted": 0, "open": 0, "filled": 0, "expired": 0, "returned": 0}
    )
    num_groups_trained: int = 0
    num_groups_dropped: int = 0
    num_filtered_in_row: int = 0
    num_stale_returns: int = 0
    dead_letters: list[DeadLetter] = field(default_factory=list)
    num_tokens_trained: int = 0
    num_tokens_masked: int = 0
    lag_histogram: dict[int, int] = field(default_factory=dict)
    num_aborted: int = 0
    num_diverged: int = 0

    @property
    def head(self) -> VersionRecord | None:
        """The newest version."""
        return self.versions[-1] if self.versions else None

    def find(self, key: SlotKey) -> Slot | None:
        """The slot of that name, unless its group is finished or never was."""
        group = self.groups.get(key.task.index)
        if group is None or group.task != key.task or group.version != key.version:
            return None
        return group.slots[key.sample] if 0 <= key.sample < len(group.slots) else None

    def record(self, version: Version) -> VersionRecord | None:
        """A version of the recent history."""
        position = version - self.versions[0].version if self.versions else -1
        return self.versions[position] if 0 <= position < len(self.versions) else None


def encode_state(state: State) -> bytes:
    """The state as a snapshot; equal states have equal bytes."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> State:
    """The inverse of `encode_state`. Raises `JournalError`."""
    try:
        return msgspec.msgpack.decode(data, type=State)
    except msgspec.DecodeError as error:
        raise JournalError(
            "a snapshot of the journal cannot be read",
            why=str(error),
            remedy="Use the release of hexcomb that wrote the journal, or restore a backup.",
        ) from error
