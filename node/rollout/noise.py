"""The chance in sampling: Gumbel noise that is a pure function of (seed, position, token id).

    token = argmax_j( logit_j / T + G(seed, position, j) ),   G = -log(-log u),   u = (hash + 1/2) / 2**32

where `hash` is the 32-bit murmur3 of the 16 bytes (seed: i64, position: u32, j: u32), little-endian.
Invariant: the noise of one sample depends on nothing else in the batch, on no engine, device or version, so
that whoever knows the seed can say which token had to win. Pure.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_C1, _C2 = 0xCC9E2D51, 0x1B873593
_NUM_HASHED_BYTES = 16
_MASK = 0xFFFFFFFF
_NUM_CACHED = 1 << 16  # values computed at once: what stays in a core's cache is three times as fast


def perturb(
    logits_BV: "torch.Tensor",
    *,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> "torch.Tensor":
    """What the argmax is taken of: `logits / T + G` in rows with T > 0, the bare logits in rows with T = 0.

    `logits_BV` is float32; the other arguments have one entry a row. The result is a new tensor unless every
    T is 0.
    """
    import torch

    if not any(temperatures):
        return logits_BV
    noise_BV = gumbel_like(logits_BV, seeds=seeds, positions=positions)
    temperature_B1 = torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)[:, None]
    random_B1 = temperature_B1 > 0
    return logits_BV / temperature_B1.where(random_B1, 1.0) + noise_BV * random_B1


def gumbel_like(logits_BV: "torch.Tensor", *, seeds: Sequence[int], positions: Sequence[int]) -> "torch.Tensor":
    """`gumbel` on the device of `logits_BV`; an accelerator hashes for itself, as large vocabularies need."""
    import torch

    vocab_size = logits_BV.shape[1]
    if logits_BV.device.type == "cpu":
        return torch.from_numpy(gumbel(seeds, positions, vocab_size=vocab_size))
    return gumbel_on(logits_BV.device, seeds, positions, vocab_size=vocab_size)


def gumbel_on(
    device: "torch.device", seeds: Sequence[int], positions: Sequence[int], *, vocab_size: int
) -> "torch.Tensor":
    """`gumbel`, computed by torch on `device`."""
    import torch

    prefix_B1 = torch.from_numpy(_prefix(seeds, positions).astype(np.int64)).to(device)[:, None]
    token_key_V = torch.from_numpy(_token_keys(vocab_size).astype(np.int64)).to(device)
    return _gumbel_torch(prefix_B1, token_key_V)


def gumbel(seeds: Sequence[int], positions: Sequence[int], *, vocab_size: int) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise, float32 of shape (len(seeds), vocab_size); always finite.

    `seeds` are signed 64-bit, `positions` count the tokens of the completion from 0.
    """
    prefix_B = _prefix(seeds, positions)
    token_key_V = _token_keys(vocab_size)
    noise_BV = np.empty((len(prefix_B), vocab_size), dtype=np.float32)
    num_rows = max(1, _NUM_CACHED // vocab_size)
    for start in range(0, len(prefix_B), num_rows):
        rows = slice(start, start + num_rows)
        hash_BV = _finish(_absorb(prefix_B[rows, None], token_key_V))
        uniform_BV = (hash_BV + 0.5) * 2.0**-32  # float64: float32 would round the largest to 1, infinite noise
        noise_BV[rows] = -np.log(-np.log(uniform_BV))
    return noise_BV


def _prefix(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint32]:
    """The state of the hash after seed and position: the part that a whole row shares."""
    seed_B = np.asarray(seeds, dtype=np.int64).view(np.uint64)
    state_B = np.zeros(len(seeds), dtype=np.uint32)
    for word_B in (seed_B & _MASK, seed_B >> np.uint64(32), np.asarray(positions, dtype=np.uint64)):
        state_B = _absorb(state_B, _scramble(word_B.astype(np.uint32)))
    return state_B


@lru_cache(maxsize=4)
def _token_keys(vocab_size: int) -> npt.NDArray[np.uint32]:
    return _scramble(np.arange(vocab_size, dtype=np.uint32))


def _scramble(word: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    word = word * np.uint32(_C1)
    return _rotated(word, 15) * np.uint32(_C2)


def _absorb(state: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    state = state ^ key
    return _rotated(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(word: npt.NDArray[np.uint32], num_bits: int) -> npt.NDArray[np.uint32]:
    return (word << np.uint32(num_bits)) | (word >> np.uint32(32 - num_bits))


def _finish(state: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    state ^= np.uint32(_NUM_HASHED_BYTES)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state ^= state >> np.uint32(shift)
        state *= np.uint32(factor)
    state ^= state >> np.uint32(16)
    return state


def _gumbel_torch(prefix_B1: "torch.Tensor", token_key_V: "torch.Tensor") -> "torch.Tensor":
    """The last word, the finish and the logarithms in torch; 32-bit words live in int64, masked after each
    product.
    """
    state: Any = prefix_B1 ^ token_key_V
    state = ((((state << 13) & _MASK) | (state >> 19)) * 5 + 0xE6546B64) & _MASK
    state = state ^ _NUM_HASHED_BYTES
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    state = state ^ (state >> 16)
    uniform_BV = (state.double() + 0.5) * 2.0**-32
    result: torch.Tensor = -((-uniform_BV.log()).log()).float()
    return result
