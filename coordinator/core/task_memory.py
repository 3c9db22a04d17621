"""What is remembered of tasks, and how facts change it: lengths, growth, which were opened, rewards of pools. Pure.

Only `apply` calls this. A task of an epoch costs eight bytes, a pool a few numbers.
"""

from collections.abc import Sequence

from coordinator.core.facts import LengthLearned
from coordinator.core.state import State

GROWTH_STEP = 0.02
"""Of the tracker of the 75th percentile: it rises by three steps where a task grew by more, else it falls by one."""

REWARD_ALPHA = 0.01
"""Weight of the newest reward in a pool's mean, once there were a hundred."""


def learn_length(state: State, fact: LengthLearned) -> None:
    """Median and longest of a task's completions, instead of those before."""
    _remember(state.lengths, fact.entry, fact.num_tokens)
    before = _remember(state.longest, fact.entry, fact.longest)
    if before and fact.longest:
        has_outgrown = fact.longest > state.growth * before
        state.growth *= 1 + 3 * GROWTH_STEP if has_outgrown else 1 - GROWTH_STEP


def _remember(memory: bytearray, entry: int, number: int) -> int:
    """Sets one number of four bytes; what it was."""
    start = 4 * entry
    if len(memory) < start + 4:
        memory.extend(bytes(start + 4 - len(memory)))
    before = int.from_bytes(memory[start : start + 4], "little")
    memory[start : start + 4] = min(number, 2**32 - 1).to_bytes(4, "little")
    return before


def note_opened(state: State, indices: Sequence[int]) -> None:
    """These tasks are under work, or in the block that comes next."""
    state.next_index = max(state.next_index, max(indices) + 1)
    for index in indices if state.pools else ():
        place, number = divmod(index, len(state.pools))
        pool = state.pools[number]
        pool.num_opened = max(pool.num_opened, place + 1)


def learn_reward(state: State, index: int, reward: float) -> None:
    """A member of a task's group has a reward."""
    if state.pools:
        pool = state.pools[index % len(state.pools)]
        pool.num_rewards += 1
        pool.mean_reward += (reward - pool.mean_reward) * max(REWARD_ALPHA, 1 / pool.num_rewards)
