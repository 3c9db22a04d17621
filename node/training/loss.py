"""The policy loss for stale data, as a sum over tokens, and the sums behind its metrics. Pure torch.

Invariant: everything here adds up. A loss or metric over a batch is the sum over any split of it, and only the round
divides, once, by the global number of tokens; nothing divides by a local count. Gradients flow through the current
log-probabilities alone. What stands at a masked position never matters.

Shape letters: B rows (completions), T token positions of the longest completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from protocol.errors import EngineError, RolloutMalformedError, UsageError

BehaviourWeight = Literal["none", "untruncated", "tis", "icepop", "upper_mask"]
Anchor = Literal["proximal", "behaviour"]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this, so that one node's wild log-probability cannot overflow `exp`."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which policy loss. The default is the decoupled loss with an upper mask and a dual clip.

    The ratio that is clipped is current over `anchor`. With the anchor `proximal`, each token is weighted by
    proximal over behaviour, treated by `weight`: `none` ignores it, `untruncated` takes it as it is, `tis` cuts it
    at `weight_cut`, `icepop` drops tokens outside `[weight_low, weight_high]`, `upper_mask` those above `weight_high`.
    """

    anchor: Anchor = "proximal"
    weight: BehaviourWeight = "upper_mask"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    weight_low: float = 0.5
    weight_high: float = 5.0
    weight_cut: float = 2.0

    def __post_init__(self) -> None:
        if self.anchor == "behaviour" and self.weight != "none":
            raise UsageError(
                f"the loss cannot use weight {self.weight!r} with the anchor 'behaviour'",
                why="its ratio already corrects for the behaviour policy",
                remedy="Set weight = 'none', or anchor = 'proximal'.",
            )


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums over tokens; add those of all micro-batches and trainers, then ask for `means()`."""

    num_tokens: float = 0.0
    loss: float = 0.0
    k1: float = 0.0
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
            "loss": self.loss / num_tokens,
            "mismatch/k1": self.k1 / num_tokens,
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


@dataclass(frozen=True, slots=True)
class LossSum:
    """`total` is a scalar with a gradient, over `num_tokens` live tokens; those that `weight` drops are counted."""

    total: Tensor
    num_tokens: int
    metrics: MetricSums


def policy_loss(
    current_BT: Tensor,
    *,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    settings: LossSettings,
    names: Sequence[str] = (),
) -> LossSum:
    """The sum over live tokens of the loss that `settings` names. Log-probabilities are natural logs.

    `mask_BT` is true where a token trains; `names` are the rows' rollouts, for errors. Raises `RolloutMalformedError`
    when a live behaviour log-probability is not finite, `EngineError` when the trainer's own is not.
    """
    _refuse_nonsense(behaviour_BT, mask_BT, names)
    _check_own(current_BT + proximal_BT, mask_BT)
    current_BT = torch.where(mask_BT, current_BT, 0.0)
    proximal_BT = torch.where(mask_BT, proximal_BT, 0.0).detach()
    behaviour_BT = torch.where(mask_BT, behaviour_BT, 0.0).detach()
    advantage_BT = advantage_B[:, None].expand_as(current_BT)

    anchor_BT = proximal_BT if settings.anchor == "proximal" else behaviour_BT
    ratio_BT = _ratio(current_BT, anchor_BT)
    clipped_BT = ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    plain_BT, bounded_BT = -advantage_BT * ratio_BT, -advantage_BT * clipped_BT
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    is_dual_BT = torch.zeros_like(mask_BT)
    if settings.dual_clip is not None:
        ceiling_BT = -advantage_BT * settings.dual_clip
        is_dual_BT = (advantage_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(is_dual_BT, ceiling_BT, loss_BT)

    raw_weight_BT = _ratio(proximal_BT, behaviour_BT)
    weight_BT = _behaviour_weight(raw_weight_BT, settings)
    total = (loss_BT * weight_BT * mask_BT).sum()
    is_clipped_BT = mask_BT & (bounded_BT > plain_BT)
    gap_BT = proximal_BT - behaviour_BT
    step_BT = (current_BT - proximal_BT).detach()
    metrics = MetricSums(
        num_tokens=float(mask_BT.sum()),
        loss=float(total.detach()),
        k1=float(-gap_BT.sum()),
        k3=float(((raw_weight_BT - 1.0 - gap_BT) * mask_BT).sum()),
        log_ratio_abs=float(gap_BT.abs().sum()),
        weight=float((raw_weight_BT * mask_BT).sum()),
        weight_squared=float((raw_weight_BT.square() * mask_BT).sum()),
        clipped_low=float((is_clipped_BT & (ratio_BT < 1.0)).sum()),
        clipped_high=float((is_clipped_BT & (ratio_BT > 1.0)).sum()),
        dual_clipped=float((is_dual_BT & mask_BT).sum()),
        filtered=float((mask_BT & (weight_BT == 0.0)).sum()),
        approx_kl=float((torch.expm1(step_BT) - step_BT).sum()),
    )
    return LossSum(total, int(mask_BT.sum()), metrics)


def _ratio(upper_BT: Tensor, lower_BT: Tensor) -> Tensor:
    return torch.exp((upper_BT - lower_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _behaviour_weight(weight_BT: Tensor, settings: LossSettings) -> Tensor:
    """The detached weight of each token, after the treatment that `settings` names."""
    match settings.weight:
        case "none":
            return torch.ones_like(weight_BT)
        case "untruncated":
            return weight_BT
        case "tis":
            return weight_BT.clamp(max=settings.weight_cut)
        case "icepop":
            is_kept_BT = (weight_BT >= settings.weight_low) & (weight_BT <= settings.weight_high)
        case "upper_mask":
            is_kept_BT = weight_BT <= settings.weight_high
    return torch.where(is_kept_BT, weight_BT, 0.0)


def _refuse_nonsense(behaviour_BT: Tensor, mask_BT: Tensor, names: Sequence[str]) -> None:
    is_bad_BT = mask_BT & ~torch.isfinite(behaviour_BT)
    if not bool(is_bad_BT.any()):
        return
    row, position = (int(i) for i in is_bad_BT.nonzero()[0])
    name = names[row] if row < len(names) else f"row {row}"
    raise RolloutMalformedError(
        f"rollout {name} has log-probability {float(behaviour_BT[row, position])} at token {position}",
        why="a log-probability is a finite number",
        remedy="Refuse the rollout; its node sent nonsense.",
    )


def _check_own(logprob_BT: Tensor, mask_BT: Tensor) -> None:
    if not bool(torch.isfinite(torch.where(mask_BT, logprob_BT, 0.0)).all()):
        raise EngineError(
            "the trainer computed a log-probability that is not finite",
            why="the weights or the numeric range are broken",
            remedy="Go back to the last good version and lower the learning rate.",
        )
