"""What the control plane works with, in one place. Pure: a record."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.announcements import Announcer
from coordinator.authority import Authority
from coordinator.evaluations import Evaluations
from coordinator.grader import Grader
from coordinator.home import CoordinatorHome
from coordinator.join_service import Registrar
from coordinator.pieces import PieceStore
from coordinator.sessions import Sessions
from protocol.run import RunSpec


@dataclass(frozen=True, slots=True)
class Office:
    """The coordinator's parts, as the control service and its helpers see them."""

    home: CoordinatorHome
    spec: RunSpec
    authority: Authority
    registrar: Registrar
    sessions: Sessions
    announcer: Announcer
    grader: Grader
    evaluations: Evaluations
    pieces: PieceStore
    clock: Callable[[], int]
