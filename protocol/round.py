"""The signed plan of a round: who averages which gradients, over what, until when. Pure.

Membership of a round is data in this plan, never a race: a trainer works only with the members named here, takes
weights of the average only from here, and drops everything of the round when a plan with a later attempt arrives.
"""

from dataclasses import dataclass

import msgspec

from protocol.errors import RoundStaleError, UnauthenticatedError
from protocol.ids import Digest, PeerId, RoundId, RunId, Version
from protocol.keys import Identity, verify
from protocol.run import Wire

KIND = "round-plan"


@dataclass(frozen=True, slots=True)
class Member:
    """A trainer of the round. `endpoint` (host:port) is its trainer's own peer service."""

    peer_id: PeerId
    endpoint: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of the flat parameter vector (canonical order of the manifest's tensors, in elements) and its owner."""

    owner: PeerId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Turns `base_version` into the next. The sum over the whole batch is divided by `divisor`, whatever the
    shares: its live tokens, or what the run's loss counts instead. Parts and averages travel as `wire` says."""

    run_id: RunId
    round_id: RoundId
    base_version: Version
    base_root: Digest
    members: tuple[Member, ...]
    shards: tuple[Shard, ...]
    divisor: int
    deadline_ms: int
    wire: Wire = "f32"


@dataclass(frozen=True, slots=True)
class SignedPlan:
    """A plan as it travels."""

    payload: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One slot of a batch, as a trainer sees it. `mask[i]` says whether token i is live (sampled, and fresh enough);
    `logprobs` are the sampler's; `segments` are (version, number of tokens)."""

    slot: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[bool, ...]
    segments: tuple[tuple[Version, int], ...]
    advantage: float


def split_evenly(num_elements: int, owners: tuple[PeerId, ...]) -> tuple[Shard, ...]:
    """One contiguous shard for each owner, in order, sizes differing by one element at most."""
    bounds = [num_elements * index // len(owners) for index in range(len(owners) + 1)]
    return tuple(Shard(owner, bounds[i], bounds[i + 1]) for i, owner in enumerate(owners))


def sign_plan(coordinator: Identity, plan: RoundPlan) -> SignedPlan:
    """The coordinator's word on who takes part."""
    payload = msgspec.msgpack.encode(plan)
    return SignedPlan(payload, coordinator.sign(kind=KIND, run_id=plan.run_id, payload=payload))


def open_plan(signed: SignedPlan, *, coordinator_key: bytes, run_id: RunId) -> RoundPlan:
    """The plan, once its signature holds. Raises `UnauthenticatedError` or `RoundStaleError`."""
    verify(coordinator_key, kind=KIND, run_id=run_id, payload=signed.payload, signature=signed.signature)
    try:
        plan = msgspec.msgpack.decode(signed.payload, type=RoundPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RoundStaleError("a round plan was refused", why=f"it cannot be read: {error}") from error
    if plan.run_id != run_id:
        raise UnauthenticatedError("a round plan was refused", why="it belongs to another run")
    return plan
