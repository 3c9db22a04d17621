"""One event's turn: the state it meets, and the facts and effects it leads to. Pure.

Deciders refuse (raise) before the first `emit`; `emit` applies a fact at once, so that the next decision of the same
turn sees it.
"""

from dataclasses import dataclass, field

from coordinator.core.apply import apply
from coordinator.core.effects import Effect
from coordinator.core.facts import Fact
from coordinator.core.rules import Rules
from coordinator.core.soft import Soft
from coordinator.core.state import State, VersionRecord
from protocol.errors import NotEnrolledError, WorkRefusedError
from protocol.ids import PeerId


@dataclass(slots=True)
class Turn:
    """What the deciders share."""

    rules: Rules
    state: State
    soft: Soft
    now_ms: int
    facts: list[Fact] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def emit(self, fact: Fact) -> None:
        """It happened: changes the state and goes to the journal."""
        apply(self.state, fact)
        self.facts.append(fact)

    def ask(self, effect: Effect) -> None:
        """The shell shall do this once the facts are in the journal."""
        self.effects.append(effect)

    @property
    def max_lag(self) -> int:
        """The bound in force. `sequential` and `periodic` are lag 0: a batch is filled and trained on under one
        version; they differ in when a trainer starts on its share, which is not the coordinator's business."""
        return self.rules.spec.max_lag if self.rules.spec.mode == "async" else 0

    @property
    def is_stopped(self) -> bool:
        """Whether the run has reached its last version."""
        head, stop = self.state.head, self.rules.stop_version
        return head is not None and stop is not None and head.version >= stop

    def require_head(self) -> VersionRecord:
        """The newest version. Raises `WorkRefusedError` while there is none."""
        if self.state.head is None:
            raise WorkRefusedError(
                "there is no work yet",
                why="no base model is registered",
                remedy="Wait until the organizer's base model is there.",
            )
        return self.state.head

    def require_enrolled(self, peer_id: PeerId) -> None:
        """Raises `NotEnrolledError` unless the node has a place in this run."""
        if peer_id not in self.state.nodes:
            raise NotEnrolledError(
                f"node {peer_id} was refused",
                why="it has no place in this run",
                remedy="Join with an invite.",
            )
