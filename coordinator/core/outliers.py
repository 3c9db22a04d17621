"""The long tail: slots that outlast the others, and who takes them over. Pure.

Which slots are the last is judged twice. By the group: a batch exists only once it is cut, from whatever groups are
complete, so what a straggler holds up, and lets grow stale, is its own group. And by all that the lag bound lets be
under way: when that comes to its end, as each batch does at lag 0, what is left of it is all that there is to do. When
a slot moves is judged by whoever asks for work: a node that finds too little, and has most of its places free, takes
slots over in the turn of its request. So they never wait between two nodes, and where all have work nothing moves.

Invariants: all tokens that were received are kept (`returns.take_from_node`), and none is of a version that the other
node does not have; a slot moves once, unless a node fails it after that; never to a node where it is not sooner done,
what was received computed anew; no more than four in a hundred move (`apply.MOVE_COST`). Where no pieces come, or
nothing is remembered of tasks, nothing moves. A request costs a few looks, and one in two seconds a walk over the
oldest slots.
"""

import heapq
import math
from itertools import islice

from coordinator.core.apply import MOVE_COST
from coordinator.core.events import SlotProgress, WorkRequested
from coordinator.core.pace import longest_of
from coordinator.core.returns import take_from_node
from coordinator.core.turn import Turn
from protocol.ids import SlotKey, Version
from protocol.lag import is_fresh

ALPHA = 0.1
"""The last are a tenth of a group, but at least one slot of it, or a tenth of all that may be under way."""

MIN_BETA = 1.1
"""A slot has outgrown its task when it is longer than the longest that is remembered, by this factor or by what three
in four tasks do not grow by, whichever is larger."""

LOOK_MS, MAX_LOOKED_AT, MAX_LATE = 2_000, 4096, 64
"""How often, and among how many running slots, late ones are looked for; how many of them are kept."""

MAX_AT_ONCE, MAX_TRIED = 4, 16
"""What one request takes, so that several nodes share, and how many late slots it looks at."""

RESERVE = 10 * MOVE_COST
"""Credit that is kept for slots that have outgrown their tasks."""

PREFILL_SPEED = 20
"""Tokens of a prompt are computed so many times as fast as new ones are sampled; engines on a GPU do better."""

HANDOVER_S = 2.0
"""What else a move costs: what came after the last piece, and the way."""

WORTHWHILE = 0.75
"""The part of its time here that a slot may take there, all included."""


def take_outliers(turn: Turn, event: WorkRequested, *, most: int) -> tuple[SlotKey, ...]:
    """Takes up to `most` slots from their nodes, for one that lacks work; they wait then. Emits nothing if it takes
    none."""
    soft, taken = turn.soft, list[SlotKey]()
    num_free = event.num_slots - turn.state.nodes[event.peer_id].num_leased
    if not turn.rules.spec.environment.num_tasks or turn.state.move_credit < MOVE_COST:
        return ()
    if turn.now_ms - soft.late_seen_ms >= LOOK_MS:
        soft.late_seen_ms = turn.now_ms
        soft.late = _late_slots(turn)
    for place in soft.late[:MAX_TRIED]:
        if len(taken) >= min(num_free, most, MAX_AT_ONCE):
            break
        advance = soft.progress.get(place)
        if advance is None or _has_moved(turn, place):
            soft.late.remove(place)
        elif _has_credit(turn, place, advance.said) and _may_move(turn, event, place, advance.said):
            soft.late.remove(place)
            take_from_node(turn, place, advance.said, "outgrown")
            taken.append(advance.said.slot)
    return tuple(taken)


def _late_slots(turn: Turn) -> list[tuple[int, int]]:
    """Running slots among the last, those first that have most time left where they are."""
    paces, is_end = turn.soft.paces, _is_end(turn)
    found = list[tuple[float, tuple[int, int]]]()
    for place, advance in islice(turn.soft.progress.items(), MAX_LOOKED_AT):
        said = advance.said
        pace = paces.get(said.peer_id)
        if pace is None or not pace.tokens_per_s or _has_moved(turn, place):
            continue
        if is_end or (_has_outgrown(turn, place, said) and _is_last(turn, place[0])):
            found.append((_num_left(turn, place, said) / pace.tokens_per_s, place))
    return [place for _, place in heapq.nlargest(MAX_LATE, found)]


def _is_end(turn: Turn) -> bool:
    """Whether what is left of all that may be under way is its last tenth."""
    spec, tally = turn.rules.spec, turn.state.tally
    num_allowed = (turn.max_lag + 1) * spec.groups_per_batch * spec.group_size
    return tally["leased"] + tally["waiting"] <= ALPHA * num_allowed


def _has_moved(turn: Turn, place: tuple[int, int]) -> bool:
    """Whether the slot was taken over before, and not failed since."""
    return place[1] in turn.state.moved.get(place[0], ())


def _has_outgrown(turn: Turn, place: tuple[int, int], said: SlotProgress) -> bool:
    return 0 < longest_of(turn, place[0]) * max(MIN_BETA, turn.state.growth) < _num_tokens(said)


def _is_last(turn: Turn, index: int) -> bool:
    """Whether what is left of a group is its last tenth."""
    slots = turn.state.groups[index].slots
    return sum(slot.status in ("waiting", "leased") for slot in slots) <= math.ceil(ALPHA * len(slots))


def _has_credit(turn: Turn, place: tuple[int, int], said: SlotProgress) -> bool:
    needed = MOVE_COST if _has_outgrown(turn, place, said) else MOVE_COST + RESERVE
    return turn.state.move_credit >= needed


def _may_move(turn: Turn, event: WorkRequested, place: tuple[int, int], said: SlotProgress) -> bool:
    newest = said.segments[-1][0]
    return (
        said.peer_id != event.peer_id
        and _can_go_on(turn, newest, event.version)
        and _is_better(turn, event, place, said)
    )


def _can_go_on(turn: Turn, newest: Version, loaded: Version) -> bool:
    """Whether a node may add to tokens of that version with what it has loaded, and they are worth it."""
    is_in_order = newest <= loaded if turn.rules.spec.interrupt else newest == loaded
    return is_in_order and is_fresh(v_train=turn.require_head().version, v_token=newest, max_lag=turn.max_lag)


def _is_better(turn: Turn, event: WorkRequested, place: tuple[int, int], said: SlotProgress) -> bool:
    """Whether the slot is sooner done at the node that asks, by the speed at which slots came on at both."""
    here, there = turn.soft.paces.get(said.peer_id), turn.soft.paces.get(event.peer_id)
    if here is None or there is None or there.tokens_per_s <= here.tokens_per_s:
        return False
    num_left = _num_left(turn, place, said)
    anew_s = (num_left + _num_tokens(said) / PREFILL_SPEED) / there.tokens_per_s + HANDOVER_S
    return anew_s < WORTHWHILE * num_left / here.tokens_per_s


def _num_left(turn: Turn, place: tuple[int, int], said: SlotProgress) -> int:
    """Tokens that may be left of a slot: up to the longest that is remembered; one that has gone past that is taken to
    go on for as long as it has been past it. 0 where nothing is remembered."""
    longest, num_tokens = longest_of(turn, place[0]), _num_tokens(said)
    most = turn.rules.spec.sampling.max_new_tokens - num_tokens
    return min(abs(longest - num_tokens), most) if longest else 0


def _num_tokens(said: SlotProgress) -> int:
    return sum(length for _, length in said.segments)
