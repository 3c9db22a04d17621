"""What the core answers to whoever brought an event. Pure. Refusals are not replies: they are raised, typed."""

from dataclasses import dataclass
from typing import Literal

from coordinator.core.events import InviteRole
from protocol.ids import LeaseId, PeerId, SlotKey


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A place in the run. `is_new` says whether this call made it."""

    peer_id: PeerId
    role: InviteRole
    is_new: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease: slots to fill until `deadline_ms` of the coordinator's clock."""

    lease_id: LeaseId
    slots: tuple[SlotKey, ...]
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a rollout. VERSION_TOO_OLD = refused, and the slot was given back to be filled anew; TURN_TAKEN =
    the slot goes on after the environment's reply; SLOT_FAILED = the environment could not reply."""

    slot: SlotKey
    outcome: Literal["ACCEPTED", "DUPLICATE", "VERSION_TOO_OLD", "TURN_TAKEN", "SLOT_FAILED"]
    detail: str = ""


Reply = Enrolment | Grant | Receipt | None
