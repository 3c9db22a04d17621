"""Which of the nodes that want work may have it when there is less than they want. Pure.

While there is enough for all, nobody waits. When there is not, groups' worth of slots are allotted by interleaved
weighted round robin (`fair`) to the nodes that asked lately, served or not: first among those that fill what they take,
what they leave goes to the others. What is allotted to a node and not fetched in time is free again.
"""

from collections.abc import Callable, Iterable

from coordinator.core.fair import next_turn
from coordinator.core.pace import weight_of
from coordinator.core.soft import Hunger
from coordinator.core.turn import Turn
from protocol.ids import PeerId

HUNGER_MS = 2_500
"""How long a wish stands: nodes that got nothing ask again within two seconds."""

UNRELIABLE = 0.2
"""Nodes that fail more than this share of their slots are served after the others."""

MAX_HUNGRY = 64
"""So many nodes compete at a time; the others take what is left."""

FEW_HUNGRY, ROOMS_MS = 16, 250
"""What more than a few could take is looked at no more often."""


def allowed_now(
    turn: Turn,
    peer_id: PeerId,
    *,
    num_wanted: int,
    num_there: int,
    room_of: Callable[[PeerId], int],
) -> int:
    """How many of the `num_there` slots the node may take now, of the `num_wanted` that it could. `room_of` says how
    many a node could take if it asked again."""
    hungry = turn.soft.hungry
    if num_wanted <= 0 or num_there <= 0:
        return 0
    for peer in [p for p, h in hungry.items() if turn.now_ms - h.asked_ms > HUNGER_MS or p not in turn.soft.live]:
        del hungry[peer]
    if num_wanted + sum(known.num_wanted for known in hungry.values()) <= num_there:
        return num_wanted
    _look_at_rooms(turn, room_of)
    others = [known for peer, known in hungry.items() if peer != peer_id]
    if not others or num_wanted + sum(known.num_usable for known in others) <= num_there:
        return min(num_wanted, num_there)
    before = hungry.get(peer_id)
    if before is None and len(hungry) >= MAX_HUNGRY:
        return min(num_wanted, max(0, num_there - sum(known.num_allotted for known in others)))
    num_allotted = before.num_allotted if before else 0
    hungry[peer_id] = Hunger(num_wanted, turn.now_ms, num_allotted, num_wanted)
    _allot(turn, num_there)
    return min(num_wanted, num_there, hungry[peer_id].num_allotted)


def note_served(turn: Turn, peer_id: PeerId, *, num_wanted: int, num_got: int, is_behind: bool) -> None:
    """Remembers what a node still wants, and that one that got all will want more soon. What was kept for a node that
    took nothing of it is free again, and nothing is kept for one that asks with older weights than the newest and finds
    nothing for these."""
    hungry = turn.soft.hungry
    if num_wanted <= 0:
        return
    known = hungry.pop(peer_id, None)
    if is_behind and not num_got:
        return
    if known is not None or len(hungry) < MAX_HUNGRY:
        num_left = max(0, known.num_allotted - num_got) if known and num_got else 0
        num_wanted = max(num_wanted - num_got, turn.rules.spec.group_size)
        hungry[peer_id] = Hunger(num_wanted, turn.now_ms, num_left)


def _look_at_rooms(turn: Turn, room_of: Callable[[PeerId], int]) -> None:
    """What each hungry node could take; where there are many, as of a moment ago."""
    soft = turn.soft
    if len(soft.hungry) > FEW_HUNGRY and turn.now_ms - soft.rooms_ms < ROOMS_MS:
        return
    soft.rooms_ms = turn.now_ms
    for peer, known in soft.hungry.items():
        known.num_usable = max(0, min(known.num_wanted, room_of(peer)))
        known.num_allotted = min(known.num_allotted, known.num_usable)


def _allot(turn: Turn, num_there: int) -> None:
    """Hands out what nobody has been allotted yet, a group's worth at a turn."""
    hungry, nodes, credits = turn.soft.hungry, turn.state.nodes, turn.soft.credits
    for gone in [peer for peer in credits if peer not in hungry]:
        del credits[gone]
    size = turn.rules.spec.group_size
    num_free = num_there - sum(h.num_allotted for h in hungry.values())
    good = [peer for peer in hungry if nodes[peer].failure <= UNRELIABLE]
    for peers in (good, [peer for peer in hungry if nodes[peer].failure > UNRELIABLE]):
        num_free = _allot_among(turn, peers, num_free=num_free, size=size)


def _allot_among(turn: Turn, peers: Iterable[PeerId], *, num_free: int, size: int) -> int:
    hungry = turn.soft.hungry
    weights = {peer: weight_of(turn, peer) for peer in peers if hungry[peer].num_allotted < hungry[peer].num_usable}
    while num_free > 0 and weights:
        chosen = next_turn(turn.soft.credits, weights)
        known = hungry[chosen]
        num = min(size, num_free, known.num_usable - known.num_allotted)
        known.num_allotted += num
        num_free -= num
        if known.num_allotted >= known.num_usable:
            del weights[chosen]
    return num_free
