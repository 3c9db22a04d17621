"""The only code that changes `State`: one function from a fact to the state after it. Pure.

`apply` decides nothing and refuses nothing; a fact that does not fit the state is a bug and fails an assertion or a
look-up. Every change of a slot's status goes through `_move`, which keeps the books. `task_memory` is a part of this.
"""

from bisect import bisect_left, insort
from typing import assert_never

from coordinator.core import facts as f
from coordinator.core.state import (
    Batch,
    DeadLetter,
    Group,
    Invite,
    Lease,
    Node,
    Pool,
    Prefix,
    Retired,
    Round,
    Slot,
    State,
    Status,
    VersionRecord,
)
from coordinator.core.task_memory import learn_length, learn_reward, note_opened
from protocol.ids import LeaseId, SlotKey
from protocol.lag import lag

HISTORY = 1000
"""Versions that the state remembers for the status page."""

STRIKES_TO_FAIL = 3
"""So many failed attempts in a row, and a trainer's seat goes to another node if one can take it."""

MAX_DOUBLINGS = 6
"""A trainer's n-th strike in a row leaves it out of the next 2 ** (n - 1) versions, up to this exponent."""

MAX_CREDIT = 1 << 16

MAX_EVALUATIONS_DUE = 8
"""Evaluations that nobody could do are forgotten, oldest first."""

MAX_DEAD_LETTERS = 100

MAX_RETIRED = 32_768
"""Finished groups whose late duplicates are known; commits forget them sooner."""

FAILURE_ALPHA = 0.1
"""Weight of the newest slot in a node's share of failures (an exponential moving average)."""

RATE_HALF_MS = 300_000
"""A node's rate forgets half of what was measured in so much time of work."""

MIN_BUSY_MS = 500

LENGTH_ALPHA = 0.01

MOVE_COST, MAX_MOVE_CREDIT = 25, 1024
"""A filled slot earns 1, a slot that is taken over costs so much: four in a hundred, and forty that were saved up."""


def apply(state: State, fact: f.Fact) -> None:
    """Changes `state` to what it is after `fact`."""
    match fact:
        case f.Started():
            state.epoch = fact.epoch
        case f.InviteMade():
            state.invites[fact.invite_id] = Invite(fact.mac_key, fact.num_uses, fact.expires_ms, fact.role)
        case f.NodeEnrolled():
            state.invites[fact.invite_id].num_used += 1
            state.nodes[fact.peer_id] = Node(fact.invite_id, fact.role, fact.enrolled_ms)
        case f.RoleGiven():
            _give_role(state, fact)
        case f.NodeLost():
            state.num_vacant_seats += state.roles.pop(fact.peer_id) == "trainer"
            state.nodes[fact.peer_id].num_losses += 1
        case f.TrainersFailed():
            _fail_trainers(state, fact)
        case f.VersionCommitted():
            _commit(state, fact)
        case f.LeaseGranted():
            _grant(state, fact)
        case f.BlockBegun():
            state.ahead += fact.indices
            note_opened(state, fact.indices)
        case f.CurriculumBegun():
            state.pools = [Pool() for _ in range(fact.num_pools)]
        case f.LengthLearned():
            learn_length(state, fact)
        case f.LeaseExtended():
            state.leases[fact.lease_id].deadline_ms = fact.deadline_ms
        case f.LeaseClosed():
            _close(state, fact)
        case f.SlotMoved():
            _slot(state, fact.slot).prefix = Prefix(fact.segments, fact.edge, fact.given)
        case f.TurnTaken():
            _take_turn(state, fact)
        case f.PrefixDropped():
            _slot(state, fact.slot).prefix = None
        case f.SlotFailed():
            _fail(state, fact)
        case f.SlotCancelled():
            _cancel(state, fact)
        case f.SlotGivenBack():
            _give_back(state, fact)
        case f.RolloutAccepted():
            _accept(state, fact)
        case f.RewardRecorded():
            _reward(state, fact)
        case f.SlotDropped():
            _move(state, _slot(state, fact.slot), "dropped")
        case f.GroupDropped():
            _drop_group(state, fact)
        case f.RoundSealed():
            _seal(state, fact)
        case f.RoundAborted():
            _abort(state, fact)
        case f.EvaluationRecorded():
            _evaluate(state, fact)
        case _:
            assert_never(fact)


def _slot(state: State, key: SlotKey) -> Slot:
    slot = state.find(key)
    assert slot is not None, f"no slot {key}"
    return slot


def _move(state: State, slot: Slot, status: Status) -> None:
    state.tally[slot.status] -= 1
    state.tally[status] += 1
    slot.status = status


def _fail_trainers(state: State, fact: f.TrainersFailed) -> None:
    for peer_id in fact.peer_ids:
        state.nodes[peer_id].num_strikes = STRIKES_TO_FAIL


def _give_role(state: State, fact: f.RoleGiven) -> None:
    state.roles[fact.peer_id] = fact.role
    state.roles_given = True
    node = state.nodes[fact.peer_id]
    node.num_strikes = node.left_out_until = 0
    if fact.role == "trainer":
        state.num_vacant_seats = max(0, state.num_vacant_seats - 1)


def _grant(state: State, fact: f.LeaseGranted) -> None:
    for opened in fact.opened:
        index = opened.task.index
        state.groups[index] = Group(opened.task, opened.version, [Slot() for _ in range(opened.num_slots)])
        if index in state.ahead:
            state.ahead.remove(index)
        note_opened(state, (index,))
        state.num_issued += opened.num_slots
        state.tally["waiting"] += opened.num_slots
        for sample in range(opened.num_slots):
            insort(state.waiting, (index, sample))
    claimed = {(key.task.index, key.sample) for key in fact.slots}
    for place in claimed:
        position = bisect_left(state.waiting, place)  # many may wait
        assert state.waiting[position : position + 1] == [place], f"{place} does not wait"
        del state.waiting[position]
    for key in fact.slots:
        slot = _slot(state, key)
        _move(state, slot, "leased")
        slot.lease_id = fact.lease_id
    state.leases[fact.lease_id] = Lease(fact.peer_id, fact.deadline_ms, sorted(claimed), fact.granted_ms)
    node = state.nodes[fact.peer_id]
    if node.num_leased == 0:
        node.measured_ms = fact.granted_ms  # idle time does not count
    node.num_leased += len(claimed)
    state.claims["granted"] += len(claimed)
    state.claims["open"] += len(claimed)


def _close(state: State, fact: f.LeaseClosed) -> None:
    lease = state.leases[fact.lease_id]
    if fact.is_fault:
        node = state.nodes[lease.peer_id]
        node.credit = max(0, node.credit - len(lease.slots))
    for place in list(lease.slots):
        _end_claim(state, fact.lease_id, place, how=fact.how)
        _wait_again(state, place)
        slot = state.groups[place[0]].slots[place[1]]
        slot.num_tries += fact.is_fault or fact.is_try
        if fact.is_fault:
            node.failure += FAILURE_ALPHA * (1 - node.failure)
            slot.failed_by = lease.peer_id
            if place[1] in state.moved.get(place[0], ()):
                state.moved[place[0]].remove(place[1])
    del state.leases[fact.lease_id]


def _fail(state: State, fact: f.SlotFailed) -> None:
    slot = _slot(state, fact.slot)
    assert slot.status == "waiting"
    state.waiting.remove((fact.slot.task.index, fact.slot.sample))
    _end(state, fact.slot, "failed")
    version = state.versions[-1].version
    state.dead_letters = [*state.dead_letters, DeadLetter(fact.slot, fact.reason, version)][-MAX_DEAD_LETTERS:]


def _cancel(state: State, fact: f.SlotCancelled) -> None:
    place = (fact.slot.task.index, fact.slot.sample)
    if fact.lease_id is None:
        state.waiting.remove(place)
    else:
        _end_claim(state, fact.lease_id, place, how="returned")
    _end(state, fact.slot, "dropped")


def _end(state: State, key: SlotKey, status: Status) -> None:
    """A slot ends without a rollout; its group may be complete by that."""
    slot = _slot(state, key)
    _move(state, slot, status)
    slot.lease_id = slot.prefix = None
    if state.groups[key.task.index].is_complete:
        insort(state.complete, key.task.index)


def _give_back(state: State, fact: f.SlotGivenBack) -> None:
    place = (fact.slot.task.index, fact.slot.sample)
    _end_claim(state, fact.lease_id, place, how="returned")
    _wait_again(state, place)
    _slot(state, fact.slot).prefix = None
    state.num_stale_returns += fact.reason == "stale"
    if fact.reason == "outgrown":
        state.moved.setdefault(place[0], []).append(place[1])
        state.num_moved += 1
        state.move_credit -= MOVE_COST


def _end_claim(state: State, lease_id: LeaseId, place: tuple[int, int], *, how: f.LeaseEnd) -> None:
    lease = state.leases[lease_id]
    lease.slots.remove(place)
    state.nodes[lease.peer_id].num_leased -= 1
    state.claims["open"] -= 1
    state.claims[how] += 1


def _wait_again(state: State, place: tuple[int, int]) -> None:
    slot = state.groups[place[0]].slots[place[1]]
    _move(state, slot, "waiting")
    slot.lease_id = None
    insort(state.waiting, place)


def _accept(state: State, fact: f.RolloutAccepted) -> None:
    _end_claim(state, fact.lease_id, (fact.slot.task.index, fact.slot.sample), how="filled")
    slot = _slot(state, fact.slot)
    _move(state, slot, "accepted")
    num_tokens = sum(length for _, length in fact.segments)
    num_before = slot.prefix.num_tokens if slot.prefix else 0
    slot.lease_id, slot.peer_id, slot.prefix = None, fact.peer_id, None
    slot.digest, slot.segments, slot.given = fact.digest, fact.segments, fact.given
    node = state.nodes[fact.peer_id]
    node.num_accepted += 1
    node.num_tokens += num_tokens - sum(length for _, length in fact.given) if fact.given else num_tokens
    _credit(node, num_tokens - num_before, now_ms=fact.accepted_ms)
    state.mean_length += (num_tokens - state.mean_length) * (LENGTH_ALPHA if state.mean_length else 1.0)
    state.move_credit = min(state.move_credit + 1, MAX_MOVE_CREDIT)


def _take_turn(state: State, fact: f.TurnTaken) -> None:
    place, slot = (fact.slot.task.index, fact.slot.sample), _slot(state, fact.slot)
    _end_claim(state, fact.lease_id, place, how="filled")
    num_before = slot.prefix.num_tokens if slot.prefix else 0
    slot.prefix = Prefix(fact.segments, fact.edge, fact.given, fact.answered)
    num_sampled = slot.prefix.num_tokens - fact.given[-1][1] - num_before
    _credit(state.nodes[fact.peer_id], num_sampled, now_ms=fact.taken_ms)
    _wait_again(state, place)


def _credit(node: Node, num_tokens: int, *, now_ms: int) -> None:
    """The node did with a slot what it was asked for, and sampled so many tokens for it."""
    node.credit = min(node.credit + 1, MAX_CREDIT)
    node.failure -= FAILURE_ALPHA * node.failure
    _measure(node, num_tokens, now_ms=now_ms)


def _measure(node: Node, num_tokens: int, *, now_ms: int) -> None:
    """Adds tokens, and the time since the last ones, to sums that forget. A mean of windows would count short lucky
    ones as much as long dry ones."""
    length_ms = now_ms - node.measured_ms
    kept = 0.5 ** (length_ms / RATE_HALF_MS)
    node.busy_ms = node.busy_ms * kept + length_ms
    node.busy_tokens = node.busy_tokens * kept + num_tokens
    node.measured_ms = now_ms
    if node.busy_ms >= MIN_BUSY_MS:
        node.rate = node.busy_tokens * 1000 / node.busy_ms


def _reward(state: State, fact: f.RewardRecorded) -> None:
    slot = _slot(state, fact.slot)
    slot.reward = fact.reward
    if fact.reward is not None:
        learn_reward(state, fact.slot.task.index, fact.reward)
    _move(state, slot, "failed" if fact.reward is None else "scored")
    if state.groups[fact.slot.task.index].is_complete:
        insort(state.complete, fact.slot.task.index)


def _drop_group(state: State, fact: f.GroupDropped) -> None:
    for slot in state.groups[fact.index].slots:
        if slot.status == "scored":
            _move(state, slot, "dropped" if fact.reason == "stale" else "filtered")
    state.complete.remove(fact.index)
    state.num_groups_dropped += 1
    state.num_filtered_in_row += fact.reason == "no_variance"
    _retire(state, fact.index)


def _retire(state: State, index: int) -> None:
    group = state.groups.pop(index)
    state.moved.pop(index, None)
    for slot in group.slots:
        state.retired_tally[slot.status] += 1
    fills = tuple((s.peer_id, s.digest) if s.peer_id and s.digest else None for s in group.slots)
    state.retired[index] = Retired(group.task, group.version, state.versions[-1].version, fills)
    if len(state.retired) > MAX_RETIRED:
        del state.retired[next(iter(state.retired))]


def _seal(state: State, fact: f.RoundSealed) -> None:
    if state.batch is None:
        state.batch = Batch(fact.base_version, fact.max_lag, fact.groups, fact.num_tokens)
        state.complete = [index for index in state.complete if index not in fact.groups]
        for _, keys in fact.shares:
            for key in keys:
                _move(state, _slot(state, key), "in_round")
    state.batch.num_attempts += 1
    state.round = Round(fact.round_id, fact.members, fact.shares, fact.shards, fact.sealed_ms, fact.deadline_ms)


def _abort(state: State, fact: f.RoundAborted) -> None:
    assert state.batch is not None
    state.round = None
    for peer_id in fact.suspects:
        node = state.nodes[peer_id]
        node.num_strikes += 1
        node.left_out_until = state.batch.base_version + 2 ** min(node.num_strikes - 1, MAX_DOUBLINGS)
    state.num_aborted += 1
    state.num_diverged += fact.reason == "DIVERGED"


def _commit(state: State, fact: f.VersionCommitted) -> None:
    state.versions.append(VersionRecord(fact.version, fact.root, fact.committed_ms, fact.round_id, fact.metrics))
    del state.versions[:-HISTORY]
    state.head_body = fact.body
    state.base_root = state.base_root or fact.root
    state.roots[fact.version] = fact.root
    if state.batch is not None and state.round is not None:
        _train(state, state.batch, state.round)
    state.num_filtered_in_row = 0
    state.roots = {version: root for version, root in state.roots.items() if version >= fact.keep_from}
    state.retired = {i: group for i, group in state.retired.items() if group.at_version >= fact.keep_from}
    if fact.evaluate:
        state.evaluations_due = [*state.evaluations_due, fact.version][-MAX_EVALUATIONS_DUE:]


def _evaluate(state: State, fact: f.EvaluationRecorded) -> None:
    record = state.record(fact.version)
    if record is not None:
        record.accuracy, record.num_tasks = fact.accuracy, fact.num_tasks
    state.evaluations_due = [v for v in state.evaluations_due if v != fact.version]


def _count_trained(state: State, batch: Batch, slot: Slot) -> None:
    assert slot.peer_id is not None
    state.nodes[slot.peer_id].num_trained += 1
    for version, length in slot.sampled:
        age = lag(v_train=batch.base_version, v_token=version)
        if age > batch.max_lag:
            state.num_tokens_masked += length
        else:
            state.lag_histogram[age] = state.lag_histogram.get(age, 0) + length


def _train(state: State, batch: Batch, round_: Round) -> None:
    for index in batch.groups:
        for slot in state.groups[index].slots:
            if slot.status == "in_round":
                _move(state, slot, "trained")
                _count_trained(state, batch, slot)
        _retire(state, index)
    for peer_id in round_.peer_ids:
        node = state.nodes[peer_id]
        node.num_rounds += 1
        node.num_strikes = node.left_out_until = 0
    state.num_groups_trained += len(batch.groups)
    state.num_tokens_trained += batch.num_tokens
    state.batch = state.round = None
