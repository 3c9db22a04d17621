"""Sums over tokens behind the metrics of an update. Pure.

Invariant: everything here adds up over any split of a batch; only `means` divides.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums over tokens; add those of all micro-batches and trainers, then ask for `means()`. `divisor` is what the loss
    over the same tokens is divided by."""

    num_tokens: float = 0.0
    divisor: float = 0.0
    loss: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    log_ratio_abs: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    filtered: float = 0.0
    approx_kl: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def means(self) -> dict[str, float]:
        """Metrics by the names users know; empty when no token was counted."""
        num_tokens = self.num_tokens
        if not num_tokens:
            return {}
        return {
            "loss": self.loss / self.divisor,
            "mismatch/k1": self.k1 / num_tokens,
            "mismatch/k2": self.k2 / num_tokens,
            "mismatch/k3": self.k3 / num_tokens,
            "mismatch/logp_abs_diff_mean": self.log_ratio_abs / num_tokens,
            "mismatch/w_mean": self.weight / num_tokens,
            "mismatch/chi2": self.weight_squared / num_tokens - 1.0,
            "mismatch/ess": self.weight**2 / (num_tokens * self.weight_squared),
            "clip_ratio/low": self.clipped_low / num_tokens,
            "clip_ratio/high": self.clipped_high / num_tokens,
            "dual_clip_ratio": self.dual_clipped / num_tokens,
            "behave_filtered_ratio": self.filtered / num_tokens,
            "approx_kl": self.approx_kl / num_tokens,
            "entropy": self.entropy / num_tokens,
        }
