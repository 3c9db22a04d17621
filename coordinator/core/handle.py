"""The one door into the core: an event comes in, is decided, and has changed the state when it comes out. Pure.

Invariants: a refusal is a raised `HexcombError` and changes nothing; everything else that happens to `State` is in
`Decision.facts`, and replaying those gives the same state, byte for byte. Every event also moves on what waits: roles,
rounds, evaluations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from coordinator.core import attestation, evaluation, invites, leases, ledger, returns, roster, rounds
from coordinator.core import events as e
from coordinator.core.apply import apply
from coordinator.core.books import Books, books
from coordinator.core.effects import Effect
from coordinator.core.facts import Fact, Started
from coordinator.core.replies import Reply
from coordinator.core.rules import Rules
from coordinator.core.shares import ShareItem, share_of
from coordinator.core.soft import Soft
from coordinator.core.state import State
from coordinator.core.turn import Turn
from coordinator.core.waits import waiting_for
from protocol.errors import HexcombError
from protocol.ids import PeerId, RoundId

ROLES_AT_ONCE = 256
"""Up to so many living nodes roles are looked at with each event that may change them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What an event came to: the answer, what goes to the journal, and what the shell shall do after that."""

    reply: Reply
    facts: tuple[Fact, ...]
    effects: tuple[Effect, ...]


class Core:
    """The authority's mind. `state` and `soft` are for reading; only `handle` and `replay` change them."""

    def __init__(self, rules: Rules, state: State | None = None) -> None:
        self.rules = rules
        self.state = state if state is not None else State()
        self.soft = Soft()

    def handle(self, event: e.Event, now_ms: int) -> Decision:
        """Decides an event. Raises a `HexcombError` if it is refused; then nothing has changed."""
        if self.soft.started_ms is None:
            self.soft.started_ms = now_ms
        turn = self._turn(now_ms)
        try:
            reply = _decide(turn, event)
        except HexcombError as refusal:
            if turn.facts:
                raise AssertionError(f"{type(event).__name__} was refused after it was decided") from refusal
            raise
        _move_on(turn, event)
        return Decision(reply, tuple(turn.facts), tuple(turn.effects))

    def replay(self, facts: Iterable[Fact]) -> None:
        """Brings the state to what it was after `facts`."""
        for fact in facts:
            apply(self.state, fact)

    def share_of(self, round_id: RoundId, peer_id: PeerId) -> tuple[ShareItem, ...]:
        """What a member trains on. Raises `RoundStaleError` or `NotEnrolledError`."""
        return share_of(self.state, round_id, peer_id, self.rules.spec.loss.advantage)

    def books(self) -> Books:
        """Where every slot is."""
        return books(self.state)

    def waiting_for(self, now_ms: int) -> tuple[str, str]:
        """What the run waits for: a stable code and a sentence."""
        return waiting_for(self._turn(now_ms))

    def _turn(self, now_ms: int) -> Turn:
        return Turn(self.rules, self.state, self.soft, now_ms)


def _decide(turn: Turn, event: e.Event) -> Reply:
    match event:
        case e.InviteRedeemed():
            return invites.redeem(turn, event)
        case e.WorkRequested():
            return leases.request_work(turn, event)
        case e.RolloutSubmitted():
            return ledger.submit(turn, event)
        case e.CoordinatorStarted():
            _start(turn)
        case e.InviteCreated():
            invites.create(turn, event)
        case e.NodeSeen():
            roster.see(turn, event)
        case e.CapabilityLearned():
            roster.learn(turn, event)
        case e.SessionEnded():
            roster.end_session(turn, event)
        case e.BaseRegistered():
            attestation.register_base(turn, event)
        case e.LeaseReturned():
            leases.return_lease(turn, event)
        case e.PiecesReceived():
            returns.take_progress(turn, event)
        case e.TurnsAwaited():
            returns.await_environment(turn, event)
        case e.PrefixLost():
            returns.lose_prefix(turn, event)
        case e.RolloutScored():
            ledger.score(turn, event)
        case e.VersionAttested():
            attestation.attest(turn, event)
        case e.RoundFailed():
            attestation.fail(turn, event)
        case e.EvaluationScored():
            evaluation.record(turn, event)
        case e.TimerFired():
            roster.forgive_own_silence(turn)
            leases.expire_leases(turn)
            roster.watch_nodes(turn)
        case _:
            assert_never(event)
    return None


def _start(turn: Turn) -> None:
    """A new process: nobody is known to be alive, the plan of an open round is gone, the grader has forgotten all."""
    turn.emit(Started(turn.state.epoch + 1))
    turn.soft.started_ms = turn.now_ms
    if turn.state.round is not None:
        rounds.abort(turn, reason="RESTART", detail="the coordinator was restarted", suspects=())
        turn.soft.reseal_after_ms = turn.now_ms
    leases.allow_return(turn)
    ledger.ask_for_scores(turn)


def _move_on(turn: Turn, event: e.Event) -> None:
    """What waits may go on now. With thousands of nodes a look at all of them is too dear for every event: roles wait
    for the timer then, and events that cannot matter to a round do not make it look."""
    is_timer = isinstance(event, e.TimerFired)
    had_roles = turn.soft.roles_dirty
    if had_roles and (is_timer or len(turn.soft.live) <= ROLES_AT_ONCE):
        roster.assign_roles(turn)
    if is_timer or had_roles or _may_matter(turn, event):
        rounds.advance(turn)
        evaluation.request(turn)


def _may_matter(turn: Turn, event: e.Event) -> bool:
    match event:
        case e.NodeSeen(peer_id=peer_id):
            return turn.state.roles.get(peer_id) == "trainer"
        case e.RolloutScored():
            return turn.state.round is None and len(turn.state.complete) >= turn.rules.spec.groups_per_batch
        case e.WorkRequested() | e.RolloutSubmitted() | e.LeaseReturned():
            return False
        case e.PiecesReceived() | e.TurnsAwaited() | e.PrefixLost():
            return False
        case _:
            return True
