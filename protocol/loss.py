"""Which policy loss a run trains by, what its sums are divided by, and what a reward is worth in its group. Pure.

Invariant: every `LossSpec` that exists is one that makes sense. A preset has the numbers that it uses and no others;
one whose ratio is to the proximal policy always has a weight for the behaviour policy.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from protocol.errors import UsageError

Preset = Literal[
    "decoupled", "loglinear", "tis", "icepop", "sequence_tis", "geometric",
    "naive", "aipo", "cispo", "gspo", "gipo", "dppo", "rollout_is",
]  # fmt: skip
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
"""The mean over tokens; over sequences, of each one's mean or sum over tokens; or the sum over tokens by the number of
sequences times the most tokens that one may have."""
Advantage = Literal["centred", "standardised"]
"""Reward minus the group's mean; or that by the group's standard deviation."""

STD_EPS = 1e-6
_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
_DECOUPLED = {**_CLIP, "dual_clip": 3.0}
NUMBERS: dict[Preset, dict[str, float]] = {
    "decoupled": {**_DECOUPLED, "weight_high": 5.0},
    "loglinear": {**_DECOUPLED, "weight_high": 5.0},
    "tis": {**_DECOUPLED, "weight_cut": 2.0},
    "icepop": {**_DECOUPLED, "weight_low": 0.5, "weight_high": 5.0},
    "sequence_tis": {**_DECOUPLED, "weight_cut": 2.0},
    "geometric": {**_DECOUPLED, "weight_low": 0.99, "weight_high": 1.01},
    "naive": _CLIP,
    "aipo": {"ratio_cut": 4.0},
    "cispo": _CLIP,
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gipo": {"sigma": 0.5},
    "dppo": {"delta": 0.2, "tau": 1e-3},
    "rollout_is": {"ratio_low": 0.8, "ratio_high": 1.28},
}
"""The numbers of each preset, with their defaults. What they do is in `node.training.objectives`."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`numbers` replace defaults of the preset; `max_tokens` are the most that a sequence may have (`dr_grpo` alone
    needs it). Raises `UsageError` on what does not go together."""

    preset: Preset = "decoupled"
    numbers: dict[str, float] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"
    advantage: Advantage = "centred"
    max_tokens: int = 0

    def __post_init__(self) -> None:
        known = NUMBERS[self.preset]
        for name in self.numbers:
            if name not in known:
                raise UsageError(
                    f"the loss {self.preset!r} has no number `{name}`",
                    why=f"it has {', '.join(known)}",
                    remedy="Leave it out, or choose the preset that uses it.",
                )
        for kind in ("weight", "ratio"):
            if f"{kind}_low" in known and self.number(f"{kind}_low") >= self.number(f"{kind}_high"):
                raise UsageError(f"`{kind}_low` of the loss is not below `{kind}_high`", remedy="No token would train.")
        if self.preset == "gspo" and self.aggregation != "seq_mean_token_mean":
            raise UsageError(
                f"the loss 'gspo' cannot be aggregated by {self.aggregation!r}",
                why="its ratio is one of whole sequences, each of which counts once",
                remedy="Set aggregation = 'seq_mean_token_mean', or leave it out.",
            )
        if self.aggregation == "dr_grpo" and (self.advantage != "centred" or self.max_tokens < 1):
            raise UsageError(
                "the aggregation 'dr_grpo' does not go with this loss",
                why="it takes centred advantages, and the most tokens that a sequence may have",
                remedy="Set advantage = 'centred', or another aggregation.",
            )

    def number(self, name: str) -> float:
        """The value of one of the preset's numbers."""
        return self.numbers.get(name, NUMBERS[self.preset][name])

    def divisor(self, *, num_tokens: int, num_sequences: int) -> int:
        """What the sum over a whole batch is divided by. `num_tokens` are its live tokens, whatever the loss rejects of
        them; `num_sequences` its slots with a live token."""
        match self.aggregation:
            case "token_mean":
                return num_tokens
            case "seq_mean_token_mean" | "seq_mean_token_sum":
                return num_sequences
            case "dr_grpo":
                return num_sequences * self.max_tokens


def default_aggregation(preset: Preset) -> Aggregation:
    """What a preset's sums are divided by where the organizer does not say."""
    return "seq_mean_token_mean" if preset == "gspo" else "token_mean"


def baseline(rewards: Sequence[float], advantage: Advantage) -> tuple[float, float]:
    """What is subtracted from a reward of a group of two at least, and what the difference is divided by. The standard
    deviation is the unbiased one."""
    mean = math.fsum(rewards) / len(rewards)
    match advantage:
        case "centred":
            return mean, 1.0
        case "standardised":
            return mean, statistics.stdev(rewards) + STD_EPS
