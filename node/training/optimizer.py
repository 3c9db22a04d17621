"""AdamW over flat float32 vectors, as a pure function: state and averaged gradient in, new state out.
numpy.

Invariants: each arithmetic operation is one correctly rounded numpy operation on float32 (nothing is
fused), so equal inputs give equal bits on every machine whose scalars agree; the old state is never written
to; no result holds a negative zero, and one that is not finite is refused.

Shape letters: P parameters, in the canonical order of the manifest's tensors.
"""

import math
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np

from protocol.errors import EngineError
from protocol.ids import Digest
from protocol.run import OptimizerSpec

Vector = np.ndarray[Any, np.dtype[np.float32]]
Moments = tuple[Vector, Vector]
WIRE_DTYPE = np.dtype("<f4")
BLOCK_ELEMENTS = 1 << 16
"""Vectors are walked in blocks of this size: intermediate results stay in the cache, and memory stays
bounded.
"""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Weights, first and second moments: three float32 vectors of one length, never changed once they are
    here.
    """

    weights_P: Vector
    first_P: Vector
    second_P: Vector

    @property
    def num_elements(self) -> int:
        """The length of each vector."""
        return len(self.weights_P)

    @property
    def moments(self) -> Moments:
        """First and second moments."""
        return self.first_P, self.second_P

    @property
    def moments_digest(self) -> Digest:
        """The name of the moments: BLAKE3 of first, then second, little-endian. What a body calls
        `optimizer`.
        """
        return digest_of_vectors(self.first_P, self.second_P)


def digest_of_vectors(*vectors: Vector) -> Digest:
    """BLAKE3 of the vectors' bytes, one after the other, little-endian float32."""
    hasher = blake3.blake3()
    for vector in vectors:
        hasher.update(bytes_of(vector))
    return Digest(hasher.hexdigest())


def bytes_of(vector: Vector) -> memoryview:
    """The vector's bytes, little-endian float32, without a copy where the machine is little-endian."""
    return np.ascontiguousarray(vector, dtype=WIRE_DTYPE).view(np.uint8).data


def learning_rate(spec: OptimizerSpec, *, step: int) -> float:
    """The rate of the step that makes version `step`: linear warm-up over `warmup_versions`; linear decay, if there is
    one, to `final_share` of the rate at `decay_versions`, and constant after that."""
    warm = min(1.0, step / spec.warmup_versions) if spec.warmup_versions > 0 else 1.0
    gone = min(1.0, step / spec.decay_versions) if spec.decay_versions > 0 else 0.0
    return spec.lr * warm * (1.0 - gone * (1.0 - spec.final_share))


def clip_coefficient(norm: float, *, max_norm: float) -> float:
    """What the gradient is multiplied by so that its norm is at most `max_norm`; 1 where it is or where
    that is 0.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def adamw_step(
    state: OptimizerState, average_P: Vector, *, step: int, spec: OptimizerSpec, clip: float = 1.0
) -> OptimizerState:
    """The state after one step of AdamW (decoupled weight decay) with the gradient `average_P * clip`.

    `step` counts from 1 and equals the version that the step makes. Raises `EngineError` if a result is not
    finite.
    """
    if len(average_P) != state.num_elements or step < 1:
        raise ValueError(f"step {step} over {len(average_P)} gradients and {state.num_elements} weights")
    new = OptimizerState(*(np.empty(state.num_elements, np.float32) for _ in range(3)))
    rate = learning_rate(spec, step=step)
    scalars = _Scalars(
        decay=np.float32(1.0 - rate * spec.weight_decay),
        beta1=np.float32(spec.beta1),
        rest1=np.float32(1.0 - spec.beta1),
        beta2=np.float32(spec.beta2),
        rest2=np.float32(1.0 - spec.beta2),
        root2=np.float32(math.sqrt(1.0 - spec.beta2**step)),
        eps=np.float32(spec.eps),
        size=np.float32(rate / (1.0 - spec.beta1**step)),
        clip=np.float32(clip),
    )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, state.num_elements, BLOCK_ELEMENTS):
            _step_block(state, new, average_P, scalars, slice(start, start + BLOCK_ELEMENTS))
    return new


@dataclass(frozen=True, slots=True)
class _Scalars:
    decay: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    root2: np.float32
    eps: np.float32
    size: np.float32
    clip: np.float32


def _step_block(state: OptimizerState, new: OptimizerState, average_P: Vector, scalars: _Scalars, where: slice) -> None:
    weights, first, second = new.weights_P[where], new.first_P[where], new.second_P[where]
    gradient = average_P[where] * scalars.clip
    scratch = gradient * scalars.rest1
    np.multiply(state.first_P[where], scalars.beta1, out=first)
    first += scratch
    np.multiply(gradient, gradient, out=scratch)
    scratch *= scalars.rest2
    np.multiply(state.second_P[where], scalars.beta2, out=second)
    second += scratch
    np.sqrt(second, out=scratch)
    scratch /= scalars.root2
    scratch += scalars.eps
    np.divide(first, scratch, out=scratch)
    scratch *= scalars.size
    np.multiply(state.weights_P[where], scalars.decay, out=weights)
    weights -= scratch
    for vector in (weights, first, second):
        vector += np.float32(0.0)  # turns -0.0 into 0.0
        if not np.isfinite(vector).all():
            raise EngineError(
                "the optimizer's step gave a number that is not finite",
                why="the averaged gradient or the state before it is out of range",
                remedy="Lower the learning rate; the version before stays in force.",
            )
