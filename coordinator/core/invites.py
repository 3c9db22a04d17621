"""Invites: made by the organizer, used up by keys. Pure.

Invariants: an invite enrols at most `num_uses` keys; the same key again is the same enrolment and uses nothing.
"""

from coordinator.core.events import InviteCreated, InviteRedeemed
from coordinator.core.facts import InviteMade, NodeEnrolled
from coordinator.core.replies import Enrolment
from coordinator.core.turn import Turn
from protocol.errors import InviteExpiredError, InviteUnknownError, InviteUsedUpError, UsageError

ASK = "Ask the organizer for a new invite."


def create(turn: Turn, event: InviteCreated) -> None:
    """Raises `UsageError` if the invite could never be used, or its id is taken by another."""
    known = turn.state.invites.get(event.invite_id)
    if known is not None and known.mac_key == event.mac_key:
        return
    if known is not None or event.num_uses < 1 or event.expires_ms <= turn.now_ms:
        raise UsageError(
            f"invite {event.invite_id} was not made",
            why="its id is taken, it has no uses, or it ends in the past",
            remedy="Make it with at least one use and a time in the future.",
        )
    turn.emit(InviteMade(event.invite_id, event.mac_key, event.num_uses, event.expires_ms, event.role))


def redeem(turn: Turn, event: InviteRedeemed) -> Enrolment:
    """Enrols a key. Raises `InviteUnknownError`, `InviteExpiredError` or `InviteUsedUpError`."""
    invite = turn.state.invites.get(event.invite_id)
    if invite is None:
        raise InviteUnknownError("the invite was refused", why="this run never made it", remedy=ASK)
    node = turn.state.nodes.get(event.peer_id)
    if node is not None:
        return Enrolment(event.peer_id, node.invite_role, is_new=False)
    if turn.now_ms >= invite.expires_ms:
        raise InviteExpiredError("the invite was refused", why="its time is over", remedy=ASK)
    if invite.num_used >= invite.num_uses:
        raise InviteUsedUpError("the invite was refused", why="all its uses are gone", remedy=ASK)
    turn.emit(NodeEnrolled(event.peer_id, event.invite_id, invite.role, turn.now_ms))
    return Enrolment(event.peer_id, invite.role, is_new=True)
