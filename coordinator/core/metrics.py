"""What a batch looked like: numbers that the coordinator knows for itself, by the names that users expect. Pure."""

import math
import statistics

from coordinator.core.state import Batch, State
from protocol.lag import lag


def batch_metrics(state: State, batch: Batch) -> dict[str, float]:
    """Reward, staleness (in versions, over tokens) and length of the batch. Rewards are over all scored slots of its
    groups; staleness and length over those that are trained."""
    groups = [state.groups[index] for index in batch.groups]
    rewards = [reward for group in groups for reward in group.rewards]
    spreads = [statistics.pstdev(group.rewards) for group in groups]
    trained = [slot for group in groups for slot in group.slots if slot.status == "in_round"]
    lags = [
        (lag(v_train=batch.base_version, v_token=version), length)
        for slot in trained
        for version, length in slot.sampled
    ]
    num_tokens = sum(length for _, length in lags)
    return {
        "reward": math.fsum(rewards) / len(rewards),
        "reward_std": math.fsum(spreads) / len(spreads),
        "frac_reward_zero_std": sum(spread == 0 for spread in spreads) / len(spreads),
        "staleness/mean": sum(value * length for value, length in lags) / num_tokens,
        "staleness/max": float(max(value for value, _ in lags)),
        "length/mean": num_tokens / len(trained),
        "num_slots": float(len(trained)),
        "num_tokens": float(batch.num_tokens),
        "num_masked_tokens": float(num_tokens - batch.num_tokens),
        "num_attempts": float(batch.num_attempts),
    }
