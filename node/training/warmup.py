"""The supervised warm-up of a tiny model: just enough for reinforcement learning to have something to reinforce.

Invariants: only prompts of the training split are drawn; it stops at the first check in which held-out greedy
accuracy passes the target; equal seeds give equal weights on one machine with one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from node.training.evaluation import greedy_accuracy
from protocol.errors import EngineError
from protocol.tasks import Environment, Task
from protocol.tokens import Tokenizer

IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmUpSettings:
    """`target` is the held-out greedy accuracy to pass, looked at every `check_steps` optimizer steps."""

    target: float = 0.33
    check_steps: int = 10
    max_steps: int = 5_000
    batch_size: int = 64
    learning_rate: float = 1e-3
    max_new_tokens: int = 6
    num_held_out: int = 200


@dataclass(frozen=True, slots=True)
class WarmUpProgress:
    """One check: after `step` optimizer steps, the last batch's mean loss and the held-out accuracy."""

    step: int
    loss: float
    accuracy: float


def warm_up_tasks(environment: Environment, seed: int) -> Iterator[Task]:
    """What the warm-up learns from, endlessly: training tasks alone."""
    index = 0
    while True:
        yield environment.task(seed, index, "train")
        index += 1


def warm_up(
    model: nn.Module,
    environment: Environment,
    tokenizer: Tokenizer,
    *,
    seed: int,
    settings: WarmUpSettings | None = None,
    progress: Callable[[WarmUpProgress], None] = lambda _: None,
) -> WarmUpProgress:
    """Trains `model` in place and returns its last check. Raises `EngineError` when the target stays out of reach."""
    settings = settings or WarmUpSettings()
    held_out = environment.held_out(settings.num_held_out)
    tasks = warm_up_tasks(environment, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    for step in range(1, settings.max_steps + 1):
        batch = [next(tasks) for _ in range(settings.batch_size)]
        loss = _answer_loss(model, _rows(batch, environment, tokenizer), tokenizer.pad_id)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % settings.check_steps:
            continue
        accuracy = greedy_accuracy(
            model,
            held_out,
            environment=environment,
            tokenizer=tokenizer,
            max_new_tokens=settings.max_new_tokens,
        )
        check = WarmUpProgress(step, float(loss.detach()), accuracy)
        progress(check)
        if accuracy > settings.target:
            return check
    raise EngineError(
        f"the warm-up did not pass {settings.target:.0%} held-out accuracy in {settings.max_steps} steps",
        why="the environment is too hard for a model of this size",
        remedy="Choose easier parameters, or start from a larger base model.",
    )


def _rows(
    tasks: Sequence[Task], environment: Environment, tokenizer: Tokenizer
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt ids and answer ids with the stop id behind them."""
    stop = tokenizer.stop_ids[:1]
    return [(environment.prompt_ids(task, tokenizer), tokenizer.encode(task.answer) + stop) for task in tasks]


def _answer_loss(
    model: nn.Module, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], pad_id: int
) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, targets = [], []
    for prompt, answer in rows:
        gap = width - len(prompt) - len(answer)
        ids.append([*prompt, *answer, *[pad_id] * gap])
        targets.append([*[IGNORED] * len(prompt), *answer, *[IGNORED] * gap])
    output: Any = model(input_ids=torch.tensor(ids), use_cache=False)
    return nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1).float(),
        torch.tensor(targets)[:, 1:].flatten(),
        ignore_index=IGNORED,
    )
