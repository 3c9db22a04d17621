"""Greedy accuracy on held-out tasks. Changes nothing in the model.

Invariant: a task counts as solved only at full marks, and the most likely token is taken at every step, so that
equal weights give an equal number. Only for evaluation: rollouts are the engine's business.

Shape letters: B rows, L positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from protocol.tasks import Environment, Task
from protocol.tokens import Tokenizer


def greedy_completions(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    *,
    stop_ids: tuple[int, ...],
    max_new_tokens: int,
    pad_id: int = 0,
) -> list[tuple[int, ...]]:
    """The most likely completion of each prompt, without its stop id. Prompts of one length are computed together."""
    results: dict[int, tuple[int, ...]] = {}
    for length in sorted({len(p) for p in prompts}):
        rows = [i for i, p in enumerate(prompts) if len(p) == length]
        ids_BL = torch.tensor([prompts[i] for i in rows], device=next(model.parameters()).device)
        is_done_B = torch.zeros(len(rows), dtype=torch.bool, device=ids_BL.device)
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                output: Any = model(input_ids=ids_BL, use_cache=False, logits_to_keep=1)
            next_B = torch.where(is_done_B, pad_id, output.logits[:, -1].argmax(dim=-1))
            ids_BL = torch.cat([ids_BL, next_B[:, None]], dim=1)
            is_done_B |= torch.isin(next_B, torch.tensor(stop_ids, device=next_B.device))
            if bool(is_done_B.all()):
                break
        for i, ids in zip(rows, ids_BL[:, length:].tolist(), strict=True):
            end = next((at for at, token in enumerate(ids) if token in stop_ids), len(ids))
            results[i] = tuple(ids[:end])
    return [results[i] for i in range(len(prompts))]


def greedy_accuracy(
    model: nn.Module,
    tasks: Sequence[Task],
    *,
    environment: Environment,
    tokenizer: Tokenizer,
    max_new_tokens: int,
) -> float:
    """The share of `tasks` that the model solves with its most likely completion; 0 to 1."""
    prompts = [environment.prompt_ids(task, tokenizer) for task in tasks]
    completions = greedy_completions(
        model,
        prompts,
        stop_ids=tokenizer.stop_ids,
        max_new_tokens=max_new_tokens,
        pad_id=tokenizer.pad_id,
    )
    scores = [environment.score(t, tokenizer.decode(c)) for t, c in zip(tasks, completions, strict=True)]
    return sum(score >= 1.0 for score in scores) / len(tasks) if tasks else 0.0
