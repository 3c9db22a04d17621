"""Which tasks are opened next: in order, or, where tasks come again in epochs, the longest of a block first. Pure.

A block is as many tasks as a batch has groups, so that no task waits for longer than one batch. Within it nodes that
are faster than the mean take the tasks whose completions were longest in the epoch before, and for the second half of
a large lease the shortest; slower ones take the shortest alone.
What is remembered of a task is one number of four bytes.
"""

from coordinator.core.curriculum import next_indices
from coordinator.core.facts import BlockBegun, OpenedGroup
from coordinator.core.pace import is_slow, length_of
from coordinator.core.turn import Turn
from protocol.ids import PeerId, TaskKey, Version


def open_groups(turn: Turn, peer_id: PeerId, *, version: Version, count: int) -> tuple[OpenedGroup, ...]:
    """So many new groups for a node. Emits a fact for each block that is begun."""
    spec, state = turn.rules.spec, turn.state
    if not spec.environment.num_tasks:
        indices = next_indices(turn, count)
    else:
        indices = []
        is_from_end = is_slow(turn, peer_id)
        ahead = list(state.ahead)
        while len(indices) < count:
            if not ahead:
                ahead = _begin_block(turn)
            is_short = is_from_end or len(indices) >= (count + 1) // 2
            indices.append(ahead.pop(-1 if is_short else 0))
    name, seed, size = spec.environment.name, spec.seed, spec.group_size
    return tuple(OpenedGroup(TaskKey(name, seed, index), version, size) for index in indices)


def _begin_block(turn: Turn) -> list[int]:
    block = next_indices(turn, turn.rules.spec.groups_per_batch)
    ordered = sorted(block, key=lambda index: (-length_of(turn, index), index))
    turn.emit(BlockBegun(tuple(ordered)))
    return ordered
