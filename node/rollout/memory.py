"""How many samples an engine may run at a time, how long they may be, and the memory for their keys and values. Pure.

Invariant: what is expected to be in use never exceeds `HIGH_WATER` of the cache, and one sample of full length always
fits into it, so that nothing is thrown out and computed again at the expected lengths.
"""

from dataclasses import dataclass

from protocol.errors import ModelRefusedError

HIGH_WATER = 0.9
BLOCK_TOKENS = 32
"""The smallest block that the CPU kernels take; lengths are rounded up to it, and one more."""
MIN_CACHE_BYTES = 64 << 20
MIN_LEN = 64


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device has: `free_bytes` before the engine starts; `weight_copies` that it holds at the most, an update
    included; of the rest `share` may go to the cache, and never more than `max_cache_bytes`."""

    free_bytes: int
    weight_copies: float
    share: float
    max_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine is allowed beside its two numbers. `expected_tokens` of a sample, prompt included, are counted on
    (0 = all that one may have); `cache_share` of what a device would give is taken for keys and values;
    of a GPU's memory no more than `gpu_memory_share` is taken, weights included (0 = what is free);
    `trust_remote_code` lets a model's own code run."""

    expected_tokens: int = 0
    cache_share: float = 1.0
    gpu_memory_share: float = 0.0
    trust_remote_code: bool = False


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine may take."""

    max_num_seqs: int
    max_len: int
    cache_bytes: int


def room_for(
    memory: Memory,
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    max_len: int,
    expected_tokens: int,
    max_num_seqs: int,
) -> Room:
    """The most that fits, up to `max_num_seqs` samples of `expected_tokens` each (prompt included, at the 95th
    percentile or above) of which none may be longer than `max_len`. Raises `ModelRefusedError` where not even one short
    sample fits beside the weights."""
    left = memory.free_bytes - int(weight_bytes * memory.weight_copies)
    most = min(int(left * memory.share), memory.max_cache_bytes)
    num_tokens = int(most * HIGH_WATER) // kv_bytes_per_token
    longest = min(max_len, num_tokens // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS)
    if left <= 0 or longest < min(max_len, MIN_LEN):
        raise ModelRefusedError(
            "the model is too large for this machine",
            why=f"its weights take {_mib(weight_bytes)} MiB, up to {memory.weight_copies:g} times, and a sample "
            f"{_mib(kv_bytes_per_token * MIN_LEN)} MiB, of {_mib(memory.free_bytes)} MiB that are free",
            remedy="Free memory, or join a run with a smaller model.",
        )
    each = _blocks(min(expected_tokens, longest))
    num_seqs = max(1, min(max_num_seqs, num_tokens // each))
    needed = max(num_seqs * each, _blocks(longest)) * kv_bytes_per_token
    return Room(num_seqs, longest, max(MIN_CACHE_BYTES, int(needed / HIGH_WATER) + 1))


def _blocks(num_tokens: int) -> int:
    """What a sample of so many tokens takes of the cache, in tokens: whole blocks, and the one that it writes next."""
    return (num_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20
