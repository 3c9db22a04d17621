"""Rounds: when a batch is cut, who takes part, and when an attempt is given up. Pure.

Invariants: one round is open at most; a batch is cut once for each base version and its slots stay reserved until
that version has a successor, whatever number of attempts it takes; no slot without a live token is in it. A trainer
that is absent, slow or accused delays an attempt by a bounded time and is then left out of it.
"""

from coordinator.core.effects import AbortRound, SendPlan
from coordinator.core.facts import AbortReason, GroupDropped, RoundAborted, RoundSealed, SlotDropped, TrainersFailed
from coordinator.core.live import is_live, live_in_role
from coordinator.core.returns import first_version
from coordinator.core.shares import divide, num_live_tokens
from coordinator.core.state import Batch, Round, Slot
from coordinator.core.turn import Turn
from protocol.ids import PeerId, RoundId, SlotKey, Version
from protocol.lag import is_fresh
from protocol.round import Member, split_evenly

PATIENCE_MS = 5_000
"""How long a round waits for living trainers that do not have the head yet."""

FIRST_PATIENCE_MS = 60_000
"""The same for the first version, whose weights are the largest download, unless a number of trainers is pinned."""

NUM_QUICK_ATTEMPTS = 4
"""Attempts that follow each other at once; later ones wait 1 s, 2 s, 4 s, …"""

MAX_PAUSE_MS = 30_000


def advance(turn: Turn) -> None:
    """Gives up the open round if it cannot end well, and seals the next one if it can begin."""
    if turn.state.round is not None:
        _watch(turn, turn.state.round)
    if turn.state.round is None:
        _seal_if_possible(turn)


def abort(turn: Turn, *, reason: AbortReason, detail: str, suspects: tuple[PeerId, ...]) -> None:
    """Ends the open attempt; the suspects are left out of the next ones at this version, and of more versions each
    time that it happens again."""
    round_, batch = turn.state.round, turn.state.batch
    assert round_ is not None
    assert batch is not None
    turn.emit(RoundAborted(round_.round_id, reason, detail, suspects))
    turn.ask(AbortRound(round_.round_id, round_.peer_ids, f"{reason}: {detail}"))
    turn.soft.attestations.clear()
    turn.soft.waiting_since_ms = None
    late = batch.num_attempts - NUM_QUICK_ATTEMPTS
    pause_ms = min(MAX_PAUSE_MS, 1000 * 2 ** min(late, 10)) if late >= 0 else 0
    turn.soft.reseal_after_ms = turn.now_ms + pause_ms
    turn.soft.roles_dirty = True


def is_ready(turn: Turn, peer_id: PeerId) -> bool:
    """Whether a living trainer has the head loaded and its peer service listens."""
    head, presence = turn.state.head, turn.soft.live[peer_id].presence
    return (
        head is not None
        and presence.version == head.version
        and presence.root == head.root
        and presence.trainer_endpoint != ""
    )


def _watch(turn: Turn, round_: Round) -> None:
    gone = tuple(peer for peer in round_.peer_ids if not is_live(turn, peer, role="trainer"))
    if gone:
        return abort(turn, reason="MEMBER_LOST", detail=", ".join(gone), suspects=gone)
    moved = [
        member.peer_id
        for member in round_.members
        if turn.soft.live[member.peer_id].presence.trainer_endpoint not in ("", member.endpoint)
    ]
    if moved:
        return abort(turn, reason="MEMBER_RESTARTED", detail=", ".join(moved), suspects=())
    if turn.now_ms >= round_.deadline_ms:
        silent = tuple(peer for peer in round_.peer_ids if peer not in turn.soft.attestations)
        return abort(turn, reason="DEADLINE", detail="no word from " + ", ".join(silent), suspects=silent)
    return None


def _seal_if_possible(turn: Turn) -> None:
    state, num_groups = turn.state, turn.rules.spec.groups_per_batch
    has_batch = state.batch is not None or len(state.complete) >= num_groups
    if state.head is None or turn.is_stopped or not has_batch or turn.now_ms < turn.soft.reseal_after_ms:
        turn.soft.stalled_since_ms = None
        return None
    peers = _choose(turn)
    if not peers:
        return _watch_stall(turn)
    turn.soft.stalled_since_ms = None
    if state.batch is None and must_wait(turn):
        return None
    batch = state.batch or _cut(turn)
    if batch is not None:
        _seal(turn, batch, peers)
    return None


def must_wait(turn: Turn) -> bool:
    """Under the policy `wait`: whether a slot is under way whose tokens would be over the bound for the update after
    this one. It is waited for as long as a lease may last, so that no node can stop the run; then its old tokens are
    masked."""
    soft, spec = turn.soft, turn.rules.spec
    if spec.staleness != "wait" or not _has_old_slots(turn):
        soft.old_slots_since_ms = None
        return False
    if soft.old_slots_since_ms is None:
        soft.old_slots_since_ms = turn.now_ms
    return turn.now_ms - soft.old_slots_since_ms < round(spec.lease_s * 1000)


def _has_old_slots(turn: Turn) -> bool:
    after = Version(turn.require_head().version + 1)
    for index, group in turn.state.groups.items():
        if is_fresh(v_train=after, v_token=group.version, max_lag=turn.max_lag):
            continue
        for sample, slot in enumerate(group.slots):
            if slot.status in ("leased", "accepted") or (slot.status == "waiting" and slot.prefix is not None):
                first = first_version(turn, (index, sample), slot) or group.version
                if not is_fresh(v_train=after, v_token=first, max_lag=turn.max_lag):
                    return True
    return False


def _watch_stall(turn: Turn) -> None:
    """Trainers that are alive and yet not ready as long as a round may last have failed."""
    soft, patience_ms = turn.soft, max(FIRST_PATIENCE_MS, round(turn.rules.spec.round_s * 1000))
    if soft.stalled_since_ms is None:
        soft.stalled_since_ms = turn.now_ms
    late = tuple(peer for peer in live_in_role(turn, "trainer") if not is_ready(turn, peer))
    if late and turn.now_ms - soft.stalled_since_ms >= patience_ms:
        turn.emit(TrainersFailed(late))
        soft.stalled_since_ms = None
        soft.roles_dirty = True


def _choose(turn: Turn) -> tuple[PeerId, ...]:
    """The members of a round that could begin now; empty while it should wait."""
    batch, soft = turn.state.batch, turn.soft
    living = live_in_role(turn, "trainer")
    ready = tuple(peer for peer in living if is_ready(turn, peer))
    soft.tardy.difference_update(ready)
    version = turn.require_head().version
    is_first = version == 0 and batch is None
    pinned = turn.rules.num_trainers
    if not ready or (is_first and pinned is not None and len(ready) < pinned):
        return ()
    excluded = [peer for peer in living if turn.state.nodes[peer].left_out_until > version]
    fit = tuple(peer for peer in ready if peer not in excluded)
    awaited = [peer for peer in living if peer not in excluded and peer not in soft.tardy]
    if all(peer in fit for peer in awaited):
        return fit or ready
    if soft.waiting_since_ms is None:
        soft.waiting_since_ms = turn.now_ms
    patience_ms = FIRST_PATIENCE_MS if is_first and pinned is None else PATIENCE_MS
    if turn.now_ms - soft.waiting_since_ms < patience_ms:
        return ()
    soft.tardy.update(peer for peer in awaited if peer not in fit)
    return fit or ready


def _cut(turn: Turn) -> Batch | None:
    """Gate 3: the oldest complete groups with a live token. Drops what is too old; None if too little is left."""
    version, num_groups = turn.require_head().version, turn.rules.spec.groups_per_batch
    chosen: list[int] = []
    num_tokens = 0
    for index in sorted(turn.state.complete, key=lambda index: (turn.state.groups[index].version, index)):
        live = _num_live(turn, index)
        if live == 0:
            turn.emit(GroupDropped(index, "stale"))
            continue
        chosen.append(index)
        num_tokens += live
        if len(chosen) == num_groups:
            return Batch(version, turn.max_lag, tuple(chosen), num_tokens)
    return None


def _num_live(turn: Turn, index: int) -> int:
    slots = (slot for slot in turn.state.groups[index].slots if slot.status == "scored")
    return sum(_num_live_of(turn, slot) for slot in slots)


def _num_live_of(turn: Turn, slot: Slot) -> int:
    version, policy = turn.require_head().version, turn.rules.spec.staleness
    return num_live_tokens(slot, v_train=version, max_lag=turn.max_lag, staleness=policy)


def _seal(turn: Turn, batch: Batch, peers: tuple[PeerId, ...]) -> None:
    soft, spec, body = turn.soft, turn.rules.spec, turn.state.head_body
    assert body is not None
    keys = _reserve(turn, batch)
    known = soft.capabilities
    rates = {peer: known[peer].train_tokens_per_s if peer in known else 0.0 for peer in peers}
    members = tuple(Member(peer, soft.live[peer].presence.trainer_endpoint) for peer in peers)
    sealed = RoundSealed(
        round_id=RoundId(f"{batch.base_version}.{batch.num_attempts}"),
        base_version=batch.base_version,
        max_lag=batch.max_lag,
        groups=batch.groups,
        members=members,
        shares=divide(keys, [_cost(turn, key) for key in keys], rates),
        shards=split_evenly(sum(tensor.num_elements for tensor in body.tensors), peers),
        num_tokens=batch.num_tokens,
        sealed_ms=turn.now_ms,
        deadline_ms=turn.now_ms + round(spec.round_s * 1000),
    )
    turn.emit(sealed)
    soft.attestations.clear()
    soft.waiting_since_ms = None
    turn.ask(
        SendPlan(
            sealed.round_id,
            sealed.base_version,
            turn.require_head().root,
            members,
            sealed.shards,
            spec.loss.divisor(num_tokens=batch.num_tokens, num_sequences=len(keys)),
            spec.round_s,
        )
    )


def _cost(turn: Turn, key: SlotKey) -> float:
    """What the slot costs a trainer, by its completion: of prompts the core knows no length."""
    slot = turn.state.find(key)
    num_tokens = sum(length for _, length in slot.segments) if slot else 0
    return num_tokens + turn.rules.square_cost * num_tokens * num_tokens


def _reserve(turn: Turn, batch: Batch) -> list[SlotKey]:
    """The slots of the batch. On the first attempt the scored ones, less those without a live token, which are
    dropped; later exactly those again."""
    wanted = "scored" if batch.num_attempts == 0 else "in_round"
    keys: list[SlotKey] = []
    for index in batch.groups:
        group = turn.state.groups[index]
        for sample, slot in enumerate(group.slots):
            if slot.status != wanted:
                continue
            if wanted == "in_round" or _num_live_of(turn, slot):
                keys.append(group.key(sample))
            else:
                turn.emit(SlotDropped(group.key(sample)))
    return keys
