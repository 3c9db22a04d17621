"""The probe and what two right computations of it may differ by."""

import math

import pytest

from protocol.canary import TOLERANCES, max_difference, mean_k3, probe_for


@pytest.mark.parametrize("vocab_size", [64, 128, 49_152, 151_936])
def test_every_vocabulary_has_its_probe(vocab_size: int) -> None:
    probe = probe_for(vocab_size)
    ids = probe.prompt_ids + probe.completion_ids
    assert (len(probe.prompt_ids), len(probe.completion_ids)) == (4, 28)
    assert all(0 <= token < vocab_size for token in ids)
    assert len(set(ids)) >= min(vocab_size, 20)
    assert probe == probe_for(vocab_size)


def test_differences_that_are_no_number_are_infinite() -> None:
    assert max_difference((-1.0, -2.0), (-1.5, -2.0)) == 0.5
    assert max_difference((), ()) == 0.0
    for other in ((-1.0,), (-1.0, math.nan), (-1.0, -math.inf)):
        assert max_difference((-1.0, -2.0), other) == math.inf
        assert mean_k3((-1.0, -2.0), other) == math.inf


def test_k3_is_the_papers_and_never_overflows() -> None:
    trainer, sampler = (-1.0, -2.0, -0.5), (-1.1, -1.7, -0.5)
    expected = sum(math.exp(p - b) - 1 - (p - b) for p, b in zip(trainer, sampler, strict=True)) / 3
    assert mean_k3(trainer, sampler) == pytest.approx(expected, rel=1e-12)
    assert mean_k3(trainer, trainer) == 0.0
    assert mean_k3((0.0,), (-2000.0,)) == math.inf


def test_k3_is_exact_where_the_difference_is_tiny() -> None:
    """The noise of two float32 computations, about 5e-6, is far below what is allowed, and 3e-3 is above it."""
    allowed = TOLERANCES["float32"].max_k3
    for difference in (5e-6, 1e-4):
        k3 = mean_k3((-1.0 + difference,), (-1.0,))
        assert k3 == pytest.approx(difference**2 / 2, rel=1e-3)
        assert k3 < allowed
    assert mean_k3((-1.0 + 3e-3,) * 4, (-1.0,) * 4) > allowed
