"""The table of losses: each preset's loss of each token, from the log-probabilities of three policies. Pure torch.

Invariants: gradients flow through the current policy alone; a row depends on no other row, so that sums over rows add
up; masked positions, whose log-probabilities are zero in all policies, are in no mean.

Shape letters: B rows (completions), T token positions of the longest completion.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protocol.loss import LossSpec

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this, so that one node's wild log-probability cannot overflow `exp`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Natural log-probabilities of the sampled tokens: under the policy that learns, at the start of the step (both
    the trainer's), and under the one that sampled. `lag_BT` is each token's age in versions."""

    current_BT: Tensor
    proximal_BT: Tensor
    behaviour_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    lag_BT: Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of each token, and which tokens were clipped (below, above, by the dual clip) or left out."""

    loss_BT: Tensor
    is_low_BT: Tensor
    is_high_BT: Tensor
    is_dual_BT: Tensor
    is_filtered_BT: Tensor


def objective(x: Tokens, spec: LossSpec) -> Objective:
    """The loss that `spec` names, r being current over behaviour, w proximal over behaviour, A the advantage.

    Decoupled presets clip current over proximal and weight it by w (PPO, arXiv 1707.06347; decoupled as in AReaL):
    kept up to `weight_high` (`decoupled`, `loglinear`), cut at `weight_cut` (`tis`; `sequence_tis` by the product over
    the row), kept within `weight_low` and `weight_high` (`icepop`; `geometric` by the geometric mean over the row).
    """
    clip_low, clip_high = spec_clip(spec)
    match spec.preset:
        case "decoupled" | "loglinear" | "tis" | "icepop" | "sequence_tis" | "geometric":
            ratio_BT = ratio(x.current_BT, x.proximal_BT)
            clipped = clipped_ratio(x, ratio_BT, clip_low, clip_high, dual_clip=spec.number("dual_clip"))
            return weighted(clipped, behaviour_weight(x, spec))
        case "naive":  # PPO on what was sampled
            return clipped_ratio(x, ratio(x.current_BT, x.behaviour_BT), clip_low, clip_high)
        case "gspo":  # arXiv 2507.18071
            return clipped_ratio(x, sequence_ratio(x), clip_low, clip_high)
        case "cispo":  # arXiv 2506.13585: -sg(clip(r)) A log pi
            cut_BT = _detached_ratio(x).clamp(1.0 - clip_low, 1.0 + clip_high)
            return _cut(x, -cut_BT * x.advantage_BT * x.current_BT, clip_low=1.0 - clip_low, clip_high=1.0 + clip_high)
        case "aipo":  # LlamaRL, arXiv 2505.24034: the gradient of -sg(min(r, cut)) A log pi
            cut = spec.number("ratio_cut")
            step_BT = 1.0 + x.current_BT - x.current_BT.detach()
            loss_BT = -_detached_ratio(x).clamp(max=cut) * x.advantage_BT * step_BT
            return _cut(x, loss_BT, clip_low=0.0, clip_high=cut)
        case "gipo":  # AcceRL, arXiv 2603.18464: -sg(exp(-(ln r / sigma)^2 / 2)) r A
            gap_BT = (x.current_BT - x.behaviour_BT).detach() / spec.number("sigma")
            return weighted(_plain(x), torch.exp(-0.5 * gap_BT.square()))
        case "rollout_is":  # a hard mask on r
            ratio_BT = _detached_ratio(x)
            return weighted(_plain(x), within(ratio_BT, spec.number("ratio_low"), spec.number("ratio_high")).float())
        case "dppo":  # binary total variation, as in prime-rl
            return _dppo(x, delta=spec.number("delta"), tau=spec.number("tau"))


def clipped_ratio(
    x: Tokens, ratio_BT: Tensor, clip_low: float, clip_high: float, *, dual_clip: float | None = None
) -> Objective:
    """PPO's max(-A r, -A clip(r, 1 - low, 1 + high)); at most -A times `dual_clip` where A is negative."""
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_BT, bounded_BT = -x.advantage_BT * ratio_BT, -x.advantage_BT * clipped_BT
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    is_dual_BT = torch.zeros_like(x.mask_BT)
    if dual_clip is not None:
        ceiling_BT = -x.advantage_BT * dual_clip
        is_dual_BT = (x.advantage_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(is_dual_BT, ceiling_BT, loss_BT)
    is_clipped_BT = bounded_BT > plain_BT
    none_BT = torch.zeros_like(x.mask_BT)
    return Objective(loss_BT, is_clipped_BT & (ratio_BT < 1.0), is_clipped_BT & (ratio_BT > 1.0), is_dual_BT, none_BT)


def weighted(of: Objective, weight_BT: Tensor) -> Objective:
    """Times a detached weight; tokens of weight zero are left out."""
    return replace(of, loss_BT=of.loss_BT * weight_BT, is_filtered_BT=weight_BT == 0.0)


def behaviour_weight(x: Tokens, spec: LossSpec) -> Tensor:
    """The detached weight of each token for who sampled it, as the decoupled preset treats it."""
    weight_BT = ratio(x.proximal_BT, x.behaviour_BT)
    gap_BT = x.proximal_BT - x.behaviour_BT
    match spec.preset:
        case "tis":
            return weight_BT.clamp(max=spec.number("weight_cut"))
        case "sequence_tis":
            product_B1 = gap_BT.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            return product_B1.clamp(max=spec.number("weight_cut")).expand_as(weight_BT)
        case "geometric":
            mean_B1 = row_mean(gap_BT, x.mask_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            is_kept_BT = within(mean_B1, spec.number("weight_low"), spec.number("weight_high")).expand_as(weight_BT)
        case "icepop":
            is_kept_BT = within(weight_BT, spec.number("weight_low"), spec.number("weight_high"))
        case _:
            is_kept_BT = weight_BT <= spec.number("weight_high")
    return torch.where(is_kept_BT, weight_BT, 0.0)


def loglinear_proximal(x: Tokens) -> Tensor:
    """The policy one version ago, between the one that sampled a token and the current one on the line of their log-
    probabilities (A-3PO): at lag n it is (n - 1) / n of the way; at lag 0 and 1 it is the behaviour policy."""
    part_BT = ((x.lag_BT - 1) / x.lag_BT.clamp(min=1)).clamp(0.0, 1.0).to(x.current_BT.dtype)
    return (x.behaviour_BT + part_BT * (x.current_BT - x.behaviour_BT)).detach()


def sequence_ratio(x: Tokens) -> Tensor:
    """B x T: the geometric mean over a row of current over behaviour, the same for all of its tokens."""
    gap_B1 = row_mean(x.current_BT - x.behaviour_BT, x.mask_BT)
    return gap_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().expand_as(x.current_BT)


def ratio(upper_BT: Tensor, lower_BT: Tensor) -> Tensor:
    """The ratio of two policies."""
    return torch.exp((upper_BT - lower_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def row_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """B x 1: the mean over a row's live tokens; zero where there is none."""
    return (value_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def within(value: Tensor, low: float, high: float) -> Tensor:
    """Whether it is in the closed range."""
    return (value >= low) & (value <= high)


def spec_clip(spec: LossSpec) -> tuple[float, float]:
    """Both sides of the preset's clip; zeros for a preset that does not clip."""
    has_clip = spec.preset not in ("aipo", "gipo", "dppo", "rollout_is")
    return (spec.number("clip_low"), spec.number("clip_high")) if has_clip else (0.0, 0.0)


def _detached_ratio(x: Tokens) -> Tensor:
    return ratio(x.current_BT, x.behaviour_BT).detach()


def _plain(x: Tokens) -> Objective:
    none_BT = torch.zeros_like(x.mask_BT)
    return Objective(-x.advantage_BT * ratio(x.current_BT, x.behaviour_BT), none_BT, none_BT, none_BT, none_BT)


def _cut(x: Tokens, loss_BT: Tensor, *, clip_low: float, clip_high: float) -> Objective:
    ratio_BT, none_BT = _detached_ratio(x), torch.zeros_like(x.mask_BT)
    return Objective(loss_BT, ratio_BT < clip_low, ratio_BT > clip_high, none_BT, none_BT)


def _dppo(x: Tokens, *, delta: float, tau: float) -> Objective:
    """-A r, without tokens whose probability has moved by more than `delta` the way A pushes it, + tau (ln r)^2."""
    moved_BT = (x.current_BT.exp() - x.behaviour_BT.exp()).detach()
    is_over_BT = ((x.advantage_BT > 0) & (moved_BT > delta)) | ((x.advantage_BT < 0) & (moved_BT < -delta))
    kept = weighted(_plain(x), (~is_over_BT).float())
    gap_BT = (x.current_BT - x.behaviour_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return replace(kept, loss_BT=kept.loss_BT + tau * gap_BT.square())
