"""What the coordinator wants of a trainer, and whom a failed round blames. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.orders import EvaluationRequested
from protocol.errors import HexcombError, RoundStaleError
from protocol.ids import PeerId, RoundId, Version
from protocol.round import Member, RoundPlan


@dataclass(slots=True)
class TrainerOrders:
    """What the coordinator wants of a trainer; outlives the child, so that a new one goes on from it."""

    plan: tuple[RoundPlan, bytes] | None = None
    evaluation: EvaluationRequested | None = None
    over: set[RoundId] = field(default_factory=set)
    aborted: RoundId | None = None

    def note_plan(self, plan: RoundPlan, payload: bytes) -> None:
        """A round was sealed; a later plan replaces an earlier one."""
        if plan.round_id not in self.over:
            self.plan = (plan, payload)
            self.over = {over for over in self.over if int(over.partition(".")[0]) >= plan.base_version}

    @property
    def members(self) -> tuple[Member, ...]:
        """The trainers that the last plan named."""
        return self.plan[0].members if self.plan is not None else ()

    def note_abort(self, round_id: RoundId) -> None:
        """A round is over without a version."""
        self.over.add(round_id)
        self.aborted = round_id

    def is_wanted(self, plan: RoundPlan, *, version: Version) -> bool:
        """Whether the round is still to be worked on from `version`."""
        is_latest = self.plan is not None and self.plan[0].round_id == plan.round_id
        return is_latest and plan.round_id not in self.over and plan.base_version == version


def suspects_in(error: HexcombError, *, members: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """The members that an error of the round blames: `why` of a ROUND_STALE error lists them with commas."""
    if not isinstance(error, RoundStaleError):
        return ()
    named = {part.strip() for part in error.why.split(",")}
    return tuple(member for member in members if member in named)
