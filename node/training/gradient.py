"""The sum of policy gradients over a share of a batch, as one flat vector. Impure only in the model's `.grad`.

Invariants: the vector is a sum, so the vectors of any split of a batch add up to the whole batch's; parameters lie in
it in the order of their sorted names, tied ones once. There is one optimizer step a version, so the proximal policy
is the current one, detached. Rows are padded on the right and attention is causal, so padding changes nothing.

Shape letters: B rows, L positions of prompt and completion, T positions of the completions, V vocabulary, P parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from node.training.loss import policy_loss
from node.training.loss_metrics import MetricSums
from protocol.loss import LossSpec


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion to learn from; `behaviour_logprobs` and `mask` stand beside `completion_ids`.

    `mask` is false where a token must not train (too old, or not the model's own); `lags` are the tokens' ages in
    versions (empty = nought). `name` is for errors.
    """

    name: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    mask: tuple[bool, ...]
    advantage: float
    lags: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.behaviour_logprobs), len(self.mask)}
        if len(lengths) != 1 or not self.prompt_ids or not self.completion_ids:
            raise ValueError(f"sample {self.name}: {lengths} tokens, log-probabilities and mask must be one length")


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """Where one parameter lies in the flat vector: `numel` values from `start`, row-major."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BatchGradient:
    """`vector_P`: float32, the sum of gradients on the CPU; `num_tokens` are the live tokens that it sums over."""

    vector_P: Tensor
    num_tokens: int
    num_samples: int
    metrics: MetricSums


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that train, by sorted name; a tied parameter appears once, under its first name."""
    return sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)


def flat_layout(model: nn.Module) -> list[ParameterSpan]:
    """Where each parameter lies in the flat vector, in order and without gaps."""
    spans, start = [], 0
    for name, parameter in trained_parameters(model):
        spans.append(ParameterSpan(name, tuple(parameter.shape), start, parameter.numel()))
        start += parameter.numel()
    return spans


def batch_gradient(
    model: nn.Module,
    samples: Sequence[TrainSample],
    *,
    spec: LossSpec | None = None,
    micro_batch_tokens: int = 16_384,
    pad_id: int = 0,
) -> BatchGradient:
    """Sums the gradient of the policy loss over `samples`; an empty share gives zeros.

    At most `micro_batch_tokens` positions (padding included) are computed at once, unless one sample is longer. The
    model is left without gradients. Raises what `policy_loss` raises; then no gradient is left either.
    """
    spec = spec or LossSpec()
    metrics, num_tokens = MetricSums(), 0
    model.zero_grad(set_to_none=True)
    try:
        for micro_batch in _micro_batches(samples, micro_batch_tokens):
            current_BT, entropy_BT = completion_logprobs(model, micro_batch, pad_id=pad_id)
            mask_BT = _padded(current_BT, [s.mask for s in micro_batch], False).bool()
            summed = policy_loss(
                current_BT,
                proximal_BT=current_BT.detach(),
                behaviour_BT=_padded(current_BT, [s.behaviour_logprobs for s in micro_batch], 0.0),
                advantage_B=current_BT.new_tensor([s.advantage for s in micro_batch]),
                mask_BT=mask_BT,
                lag_BT=_padded(current_BT, [s.lags for s in micro_batch], 0.0),
                spec=spec,
                names=[s.name for s in micro_batch],
            )
            summed.total.backward()  # type: ignore[no-untyped-call]
            entropy = float((entropy_BT * mask_BT).sum())
            metrics += replace(summed.metrics, entropy=entropy)
            num_tokens += summed.num_tokens
        return BatchGradient(_flat_gradient(model), num_tokens, len(samples), metrics)
    finally:
        model.zero_grad(set_to_none=True)


def completion_logprobs(model: nn.Module, samples: Sequence[TrainSample], *, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token, with gradient, and the detached entropy there: two B x T, float32.

    T is the longest completion; what stands behind a shorter one is finite and means nothing. A prompt that several
    samples share is computed once: its keys and values serve them all, and its gradient is the sum of theirs.
    """
    device = next(model.parameters()).device
    prompts = list(dict.fromkeys(sample.prompt_ids for sample in samples))
    row_of = {prompt: row for row, prompt in enumerate(prompts)}
    row_B = torch.tensor([row_of[sample.prompt_ids] for sample in samples], device=device)
    prompt_UL, seen_UL = _left_padded(prompts, pad_id, device)
    target_BT = _right_padded([sample.completion_ids for sample in samples], pad_id, device)

    place_UL = (seen_UL.cumsum(1) - 1).clamp(min=0)
    read: Any = model(
        input_ids=prompt_UL, attention_mask=seen_UL, position_ids=place_UL, use_cache=True, logits_to_keep=1
    )
    logits_BTV = read.logits[row_B]
    num_steps = target_BT.shape[1] - 1
    if num_steps:
        read.past_key_values.batch_select_indices(row_B)
        seen_BL = torch.cat([seen_UL[row_B], seen_UL.new_ones(len(samples), num_steps)], dim=1)
        place_BT = place_UL[row_B, -1:] + 1 + torch.arange(num_steps, device=device)
        written: Any = model(
            input_ids=target_BT[:, :-1],
            attention_mask=seen_BL,
            position_ids=place_BT,
            past_key_values=read.past_key_values,
            use_cache=True,
        )
        logits_BTV = torch.cat([logits_BTV, written.logits], dim=1)
    logprob_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    logprob_BT = logprob_BTV.gather(2, target_BT[:, :, None]).squeeze(2)
    with torch.no_grad():
        entropy_BT = -(logprob_BTV.exp() * logprob_BTV).sum(dim=-1)
    return logprob_BT, entropy_BT


def _left_padded(rows: Sequence[tuple[int, ...]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids, and ones where they are real: both U x L, the last position real in every row."""
    width = max(map(len, rows))
    ids_UL = torch.tensor([[*[pad_id] * (width - len(row)), *row] for row in rows], device=device)
    seen_UL = torch.tensor([[*[0] * (width - len(row)), *[1] * len(row)] for row in rows], device=device)
    return ids_UL, seen_UL


def _right_padded(rows: Sequence[tuple[int, ...]], pad_id: int, device: torch.device) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=device)


def _micro_batches(samples: Sequence[TrainSample], limit: int) -> Iterator[list[TrainSample]]:
    """Groups of samples of like length, those of one prompt side by side, whose padded size stays under `limit`."""
    batch: list[TrainSample] = []
    longest = 0
    for sample in sorted(samples, key=lambda s: (len(s.prompt_ids), s.prompt_ids, len(s.completion_ids))):
        longest = max(longest, _length(sample))
        if batch and (len(batch) + 1) * longest > limit:
            yield batch
            batch, longest = [], _length(sample)
        batch.append(sample)
    if batch:
        yield batch


def _length(sample: TrainSample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def _padded(like_BT: Tensor, rows: Sequence[Sequence[float]], filler: float) -> Tensor:
    width = like_BT.shape[1]
    return like_BT.new_tensor([[*map(float, row), *[filler] * (width - len(row))] for row in rows])


def _flat_gradient(model: nn.Module) -> Tensor:
    parts = [
        torch.zeros(p.numel(), dtype=torch.float32) if p.grad is None else p.grad.detach().flatten().float().cpu()
        for _, p in trained_parameters(model)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)
