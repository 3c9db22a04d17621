"""What a batch looked like: numbers that the coordinator knows for itself, by the names that users expect. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

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
        **staleness(lags),
        "length/mean": num_tokens / len(trained),
        "num_slots": float(len(trained)),
        "num_tokens": float(batch.num_tokens),
        "num_masked_tokens": float(num_tokens - batch.num_tokens),
        "num_attempts": float(batch.num_attempts),
    }


def staleness(lags: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of (lag, number of tokens): mean, median, 95th percentile, and the largest."""
    counts: Counter[int] = Counter()
    for value, length in lags:
        counts[value] += length
    return {
        "staleness/mean": sum(value * length for value, length in counts.items()) / counts.total(),
        "staleness/p50": _quantile(counts, 0.5),
        "staleness/p95": _quantile(counts, 0.95),
        "staleness/max": float(max(counts)),
    }


def _quantile(counts: Counter[int], part: float) -> float:
    """The least lag that at least this part of the tokens does not exceed."""
    due, seen = part * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= due:
            return float(value)
    raise AssertionError("no tokens")
