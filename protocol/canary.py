"""A fixed short probe, and how far its log-probabilities may lie from what they should be. Pure.

Trainers score the probe under each version that they make; every engine scores it after each load. Invariant: the probe
follows from the size of the vocabulary alone, so that nobody has to be told it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_PROMPT_TOKENS, NUM_SCORED_TOKENS = 4, 28


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids; those of the completion are scored."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What two right computations of one type may differ by: `max_difference` between two log-probabilities of one
    token, `max_k3` between sampler and trainer over a probe."""

    max_difference: float
    max_k3: float


TOLERANCES = {
    "float32": Tolerance(max_difference=1e-3, max_k3=1e-6),
    "float16": Tolerance(max_difference=0.2, max_k3=1e-3),
    "bfloat16": Tolerance(max_difference=1.5, max_k3=2e-2),
}
"""By the type that an engine computes in; the trainer's side is always float32."""


def probe_for(vocab_size: int) -> Probe:
    """The probe of every model with so many token ids: ids spread over all of them."""
    ids = tuple((7 + 7919 * i + 31 * i * i) % vocab_size for i in range(NUM_PROMPT_TOKENS + NUM_SCORED_TOKENS))
    return Probe(ids[:NUM_PROMPT_TOKENS], ids[NUM_PROMPT_TOKENS:])


def max_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two lists of log-probabilities; infinite where one is longer or holds no number."""
    if len(found) != len(expected):
        return math.inf
    differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


def mean_k3(trainer: Sequence[float], sampler: Sequence[float]) -> float:
    """The estimator k3 of the divergence of sampler and trainer, mean of exp(d) - 1 - d with d = trainer - sampler; 0
    where they agree, and infinite where `max_difference` is."""
    if math.isinf(max_difference(trainer, sampler)):
        return math.inf
    ratios = [one - other for one, other in zip(trainer, sampler, strict=True)]
    if not ratios or max(ratios) > 700.0:  # exp would overflow
        return math.inf if ratios else 0.0
    return math.fsum(math.expm1(ratio) - ratio for ratio in ratios) / len(ratios)
