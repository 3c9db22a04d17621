"""The noise is the murmur3 that it claims to be, Gumbel distributed, and the same in torch as in numpy."""

import struct

import numpy as np
import pytest
import torch

from node.rollout import noise

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
POSITIONS = [0, 1, 2, 3, 2**31, 4095]


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """Murmur3 as published, byte by byte; `data` in whole words."""
    state = seed
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) & 0xFFFFFFFF
        state ^= word * 0x1B873593 & 0xFFFFFFFF
        state = (state << 13 | state >> 19) & 0xFFFFFFFF
        state = state * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_reference_hash_gives_the_published_vectors() -> None:
    assert murmur3_32(b"", 1) == 0x514E28B7
    assert murmur3_32(b"aaaa", 0x9747B28C) == 0x5A97808A
    assert murmur3_32(b"test") == 0xBA6BD213


def test_noise_is_gumbel_of_the_hash_of_seed_position_and_token() -> None:
    noise_BV = noise.gumbel(SEEDS, POSITIONS, vocab_size=5)
    for seed, position, noise_V in zip(SEEDS, POSITIONS, noise_BV, strict=True):
        for token in range(5):
            uniform = (murmur3_32(struct.pack("<qII", seed, position, token)) + 0.5) / 2**32
            assert noise_V[token] == pytest.approx(-np.log(-np.log(uniform)), rel=1e-6)


def test_a_row_is_the_same_alone_and_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_BV = noise.gumbel(SEEDS, POSITIONS, vocab_size=100)
    monkeypatch.setattr(noise, "_NUM_CACHED", 250)
    np.testing.assert_array_equal(noise.gumbel(SEEDS, POSITIONS, vocab_size=100), whole_BV)
    alone_1V = noise.gumbel(SEEDS[4:5], POSITIONS[4:5], vocab_size=100)
    np.testing.assert_array_equal(alone_1V[0], whole_BV[4])


def test_noise_has_the_moments_of_a_gumbel_and_is_finite() -> None:
    noise_BV = noise.gumbel(range(2000), [7] * 2000, vocab_size=128)
    assert np.isfinite(noise_BV).all()
    assert noise_BV.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise_BV.var() == pytest.approx(np.pi**2 / 6, rel=0.02)


def test_torch_computes_the_same_noise() -> None:
    noise_BV = noise.gumbel_on(torch.device("cpu"), SEEDS, POSITIONS, vocab_size=1000).numpy()
    np.testing.assert_array_max_ulp(noise_BV, noise.gumbel(SEEDS, POSITIONS, vocab_size=1000), maxulp=1)


def test_perturb_divides_and_shifts_random_rows_and_leaves_greedy_ones() -> None:
    logits_BV = torch.randn(3, 50)
    perturbed_BV = noise.perturb(logits_BV, temperatures=[1.0, 0.0, 0.5], seeds=[1, 2, 3], positions=[0, 0, 9])
    noise_BV = torch.from_numpy(noise.gumbel([1, 2, 3], [0, 0, 9], vocab_size=50))
    torch.testing.assert_close(perturbed_BV[0], logits_BV[0] + noise_BV[0])
    assert torch.equal(perturbed_BV[1], logits_BV[1])
    torch.testing.assert_close(perturbed_BV[2], logits_BV[2] / 0.5 + noise_BV[2])


def test_samples_follow_softmax_at_the_temperature() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0])
    num = 20000
    perturbed_BV = noise.perturb(
        logits_V.expand(num, 4), temperatures=[0.7] * num, seeds=range(num), positions=[0] * num
    )
    shares_V = torch.bincount(perturbed_BV.argmax(-1), minlength=4) / num
    torch.testing.assert_close(shares_V, (logits_V / 0.7).softmax(-1), atol=0.01, rtol=0)
