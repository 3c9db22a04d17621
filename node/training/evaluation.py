"""Greedy accuracy on held-out tasks. Changes nothing in the model.

Invariant: a task counts as solved only at full marks, and the most likely token is taken at every step, so that
equal weights give an equal number. Only for evaluation: rollouts are the engine's business.

Shape letters: B rows, L positions, S stop ids, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from protocol.tasks import Environment, Task
from protocol.tokens import Tokenizer

MAX_ROWS = 64
"""Rows computed at once: keys and values of all of them are in memory."""


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
        for part in (rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS)):
            ids_BL = torch.tensor([prompts[i] for i in part], device=next(model.parameters()).device)
            done = _complete(model, ids_BL, stop_ids=stop_ids, max_new_tokens=max_new_tokens, pad_id=pad_id)
            results.update(zip(part, done, strict=True))
    return [results[i] for i in range(len(prompts))]


def _complete(
    model: nn.Module, ids_BL: Tensor, *, stop_ids: tuple[int, ...], max_new_tokens: int, pad_id: int
) -> list[tuple[int, ...]]:
    """The completions of prompts of one length; keys and values of what was read are kept, not computed again."""
    stop_S = torch.tensor(stop_ids, dtype=torch.long, device=ids_BL.device)
    is_done_B = torch.zeros(len(ids_BL), dtype=torch.bool, device=ids_BL.device)
    columns: list[Tensor] = []
    cache: Any = None
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            output: Any = model(input_ids=ids_BL, past_key_values=cache, use_cache=True, logits_to_keep=1)
        next_B = torch.where(is_done_B, pad_id, output.logits[:, -1].argmax(dim=-1))
        columns.append(next_B)
        is_done_B |= torch.isin(next_B, stop_S)
        if bool(is_done_B.all()):
            break
        ids_BL, cache = next_B[:, None], output.past_key_values
    completions: list[list[int]] = torch.stack(columns, dim=1).tolist()
    ends = [next((at for at, token in enumerate(ids) if token in stop_ids), len(ids)) for ids in completions]
    return [tuple(ids[:end]) for ids, end in zip(completions, ends, strict=True)]


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
