"""Who is alive in which role. Pure."""

from coordinator.core.turn import Turn
from protocol.ids import PeerId
from protocol.run import Role


def is_live(turn: Turn, peer_id: PeerId, *, role: Role) -> bool:
    """Whether the node is alive in that role."""
    return peer_id in turn.soft.live and turn.state.roles.get(peer_id) == role


def live_in_role(turn: Turn, role: Role) -> list[PeerId]:
    """The living nodes of a role, by peer id."""
    return sorted(peer for peer, given in turn.state.roles.items() if given == role and peer in turn.soft.live)
