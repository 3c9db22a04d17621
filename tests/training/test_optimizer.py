"""The optimizer against torch's, and what it promises beyond."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.training.optimizer import (
    BLOCK_ELEMENTS,
    OptimizerState,
    adamw_step,
    clip_coefficient,
    learning_rate,
)
from protocol.errors import EngineError
from protocol.run import OptimizerSpec

SPEC = OptimizerSpec(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def fresh(weights: np.ndarray) -> OptimizerState:
    return OptimizerState(weights, np.zeros_like(weights), np.zeros_like(weights))


@pytest.mark.parametrize("size", [1, 1000, BLOCK_ELEMENTS + 17])
def test_equals_torch(size: int) -> None:
    chance = np.random.default_rng(size)
    state = fresh(chance.normal(size=size).astype(np.float32))
    parameter = torch.nn.Parameter(torch.from_numpy(state.weights_P.copy()))
    theirs = torch.optim.AdamW(
        [parameter], lr=SPEC.lr, betas=(SPEC.beta1, SPEC.beta2), eps=SPEC.eps, weight_decay=SPEC.weight_decay
    )
    for step in range(1, 21):
        gradient = chance.normal(scale=0.1, size=size).astype(np.float32)
        state = adamw_step(state, gradient, step=step, spec=SPEC)
        parameter.grad = torch.from_numpy(gradient)
        theirs.step()
    np.testing.assert_allclose(state.weights_P, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    moments = theirs.state[parameter]
    np.testing.assert_allclose(state.second_P, moments["exp_avg_sq"].numpy(), rtol=1e-5, atol=1e-9)


def test_a_shard_steps_to_the_same_bits_as_the_whole() -> None:
    chance = np.random.default_rng(0)
    weights, gradient = (chance.normal(size=5000).astype(np.float32) for _ in range(2))
    whole = adamw_step(fresh(weights), gradient, step=1, spec=SPEC, clip=0.3)
    part = adamw_step(fresh(weights[1111:3333]), gradient[1111:3333], step=1, spec=SPEC, clip=0.3)
    assert whole.weights_P[1111:3333].tobytes() == part.weights_P.tobytes()
    assert whole.moments_digest != part.moments_digest


def test_old_state_is_untouched_and_no_negative_zero_remains() -> None:
    weights = np.array([-0.0, 1.0], np.float32)
    new = adamw_step(fresh(weights), np.array([-0.0, 0.0], np.float32), step=1, spec=SPEC)
    assert np.signbit(weights[0])
    for vector in (new.weights_P, new.first_P, new.second_P):
        assert not np.signbit(vector).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_step_that_is_not_finite_is_refused(value: float) -> None:
    gradient = np.array([0.0, value], np.float32)
    with pytest.raises(EngineError, match="not finite"):
        adamw_step(fresh(np.zeros(2, np.float32)), gradient, step=1, spec=SPEC)


@pytest.mark.parametrize(("length", "step"), [(3, 1), (2, 0)])
def test_wrong_length_or_step_is_a_fault(length: int, step: int) -> None:
    with pytest.raises(ValueError, match="step"):
        adamw_step(fresh(np.zeros(2, np.float32)), np.zeros(length, np.float32), step=step, spec=SPEC)


@given(norm=st.floats(0, 1e6), limit=st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_and_leaves_small_ones(norm: float, limit: float) -> None:
    coefficient = clip_coefficient(norm, max_norm=limit)
    assert norm * coefficient <= limit
    assert coefficient == 1.0 or norm > limit - 1e-5
    assert clip_coefficient(norm, max_norm=0.0) == 1.0


def test_warm_up_is_linear_by_version() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_versions=4)
    assert [learning_rate(spec, step=step) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(OptimizerSpec(lr=1.0), step=1) == 1.0


def test_rate_decays_to_its_final_share_and_stays_there() -> None:
    spec = OptimizerSpec(lr=1.0, decay_versions=10, final_share=0.2)
    assert [learning_rate(spec, step=step) for step in (5, 10, 11)] == pytest.approx([0.6, 0.2, 0.2])
