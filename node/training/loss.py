"""The policy loss for stale data, as a sum, and the sums behind its metrics. Pure torch.

Invariant: everything here adds up. A loss or metric over a batch is the sum over any split of it by rows, and only the
round divides, once, by a count of the whole batch; nothing divides by a local count but a row by its own tokens.
Gradients flow through the current log-probabilities alone. What stands at a masked position never matters.

Shape letters: B rows (completions), T token positions of the longest completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from node.training.loss_metrics import MetricSums
from node.training.objectives import Objective, Tokens, loglinear_proximal, objective, ratio, row_mean
from protocol.errors import EngineError, RolloutMalformedError
from protocol.loss import LossSpec


@dataclass(frozen=True, slots=True)
class LossSum:
    """`total` is a scalar with a gradient, over `num_tokens` live tokens; those that the loss drops are counted."""

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
    lag_BT: Tensor,
    spec: LossSpec,
    names: Sequence[str] = (),
) -> LossSum:
    """The sum over live tokens of the loss that `spec` names. Log-probabilities are natural logs.

    `mask_BT` is true where a token trains; `lag_BT` is its age in versions; `names` are the rows' rollouts, for errors.
    Raises `RolloutMalformedError` when a live behaviour log-probability is not finite, `EngineError` when the trainer's
    own is not.
    """
    _refuse_nonsense(behaviour_BT, mask_BT, names)
    _check_own(current_BT + proximal_BT, mask_BT)
    tokens = Tokens(
        current_BT=torch.where(mask_BT, current_BT, 0.0),
        proximal_BT=torch.where(mask_BT, proximal_BT, 0.0).detach(),
        behaviour_BT=torch.where(mask_BT, behaviour_BT, 0.0).detach(),
        advantage_BT=advantage_B[:, None].expand_as(current_BT),
        mask_BT=mask_BT,
        lag_BT=lag_BT,
    )
    is_between = spec.preset == "loglinear"
    chosen = objective(replace(tokens, proximal_BT=loglinear_proximal(tokens)) if is_between else tokens, spec)
    total = aggregated(chosen.loss_BT, mask_BT, spec)
    return LossSum(total, int(mask_BT.sum()), _metrics(tokens, chosen, total, spec))


def aggregated(loss_BT: Tensor, mask_BT: Tensor, spec: LossSpec) -> Tensor:
    """The sum whose quotient by `spec.divisor` is the loss: over tokens, or over rows of each one's mean."""
    if spec.aggregation == "seq_mean_token_mean":
        return row_mean(loss_BT, mask_BT).sum()
    return (loss_BT * mask_BT).sum()


def _metrics(x: Tokens, chosen: Objective, total: Tensor, spec: LossSpec) -> MetricSums:
    mask_BT, weight_BT = x.mask_BT, ratio(x.proximal_BT, x.behaviour_BT)
    gap_BT = x.proximal_BT - x.behaviour_BT
    step_BT = (x.current_BT - x.proximal_BT).detach()
    num_tokens, num_sequences = int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())
    return MetricSums(
        num_tokens=float(num_tokens),
        divisor=float(spec.divisor(num_tokens=num_tokens, num_sequences=num_sequences)),
        loss=float(total.detach()),
        k1=float(-gap_BT.sum()),
        k2=float(0.5 * gap_BT.square().sum()),
        k3=float(((weight_BT - 1.0 - gap_BT) * mask_BT).sum()),
        log_ratio_abs=float(gap_BT.abs().sum()),
        weight=float((weight_BT * mask_BT).sum()),
        weight_squared=float((weight_BT.square() * mask_BT).sum()),
        clipped_low=float((chosen.is_low_BT & mask_BT).sum()),
        clipped_high=float((chosen.is_high_BT & mask_BT).sum()),
        dual_clipped=float((chosen.is_dual_BT & mask_BT).sum()),
        filtered=float((chosen.is_filtered_BT & mask_BT).sum()),
        approx_kl=float((torch.expm1(step_BT) - step_BT).sum()),
    )


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
