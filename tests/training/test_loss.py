"""The loss against numbers computed by hand elsewhere, and the properties that hold for any input."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.training.loss import LossSettings, LossSum, MetricSums, policy_loss
from protocol.errors import EngineError, RolloutMalformedError, UsageError

PAD = 0.0
BEHAVIOUR = [
    [-0.50, -1.20, -0.30, -2.00],
    [-1.00, -0.20, -2.50, PAD],
    [-0.70, -0.10, -1.60, -0.90],
    [-1.00, -1.40, PAD, PAD],
]
PROXIMAL = [
    [-0.45, -1.00, -0.35, -1.20],
    [-1.10, -0.25, -0.80, PAD],
    [-0.75, -0.12, -1.50, -0.95],
    [-1.90, -1.50, PAD, PAD],
]
CURRENT = [
    [-0.40, -0.70, -0.50, -1.10],
    [-1.50, -0.20, -0.70, PAD],
    [-0.65, -0.15, -1.10, -1.20],
    [-1.80, -0.20, PAD, PAD],
]
LENGTHS = [4, 3, 4, 2]
ADVANTAGE = [0.625, -0.375, 0.125, -0.375]
NUM_TOKENS = 13

DEFAULT = LossSettings()
VARIANTS = {
    "naive": (LossSettings(anchor="behaviour", weight="none", dual_clip=None), 0.091024),
    "ppo": (LossSettings(weight="none", dual_clip=None), -0.023341),
    "untruncated": (LossSettings(weight="untruncated", dual_clip=None), 0.007081),
    "tis": (LossSettings(weight="tis", dual_clip=None), -0.091684),
    "tis-dual": (LossSettings(weight="tis"), -0.109154),
    "icepop": (LossSettings(weight="icepop", dual_clip=None), -0.180389),
    "icepop-dual": (LossSettings(weight="icepop"), -0.197859),
    "upper-mask": (LossSettings(dual_clip=None), -0.167428),
    "default": (DEFAULT, -0.184897),
}
ON_POLICY = -0.086538


def tensors() -> dict[str, torch.Tensor]:
    """The fixture, as arguments of `policy_loss`, in double precision."""
    mask = torch.tensor([[at < length for at in range(4)] for length in LENGTHS])
    return {
        "current_BT": torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True),
        "proximal_BT": torch.tensor(PROXIMAL, dtype=torch.float64),
        "behaviour_BT": torch.tensor(BEHAVIOUR, dtype=torch.float64),
        "advantage_B": torch.tensor(ADVANTAGE, dtype=torch.float64),
        "mask_BT": mask,
    }


def loss_of(chosen: LossSettings = DEFAULT, **changes: torch.Tensor) -> LossSum:
    arguments = {**tensors(), **changes}
    return policy_loss(
        arguments["current_BT"],
        proximal_BT=arguments["proximal_BT"],
        behaviour_BT=arguments["behaviour_BT"],
        advantage_B=arguments["advantage_B"],
        mask_BT=arguments["mask_BT"],
        settings=chosen,
        names=["first", "second", "third", "fourth"],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_has_the_expected_value(variant: str) -> None:
    chosen, expected = VARIANTS[variant]
    summed = loss_of(chosen)
    assert summed.num_tokens == NUM_TOKENS
    assert summed.total.item() / NUM_TOKENS == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_variants_agree_on_policy(variant: str) -> None:
    same = tensors()["behaviour_BT"]
    summed = loss_of(VARIANTS[variant][0], current_BT=same, proximal_BT=same, behaviour_BT=same)
    assert summed.total.item() / NUM_TOKENS == pytest.approx(ON_POLICY, abs=6e-7)


def gradient(chosen: LossSettings = DEFAULT, **changes: torch.Tensor) -> torch.Tensor:
    current = changes.pop("current_BT", tensors()["current_BT"]).detach().clone().requires_grad_()
    loss_of(chosen, current_BT=current, **changes).total.backward()
    assert current.grad is not None
    return current.grad / NUM_TOKENS


def test_gradient_of_the_default() -> None:
    expected = [
        [-0.053133, 0.0, -0.039362, -0.118250],
        [0.0, 0.028846, 0.0, 0.0],
        [-0.010108, -0.009146, 0.0, -0.007123],
        [0.012961, 0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(gradient(), torch.tensor(expected, dtype=torch.float64), atol=6e-7, rtol=0)
    expected[3][0] = 0.0
    icepop = gradient(LossSettings(weight="icepop"))
    torch.testing.assert_close(icepop, torch.tensor(expected, dtype=torch.float64), atol=6e-7, rtol=0)


def test_metrics_of_the_default() -> None:
    means = loss_of().metrics.means()
    expected = {
        "loss": -0.184897,
        "mismatch/k1": -0.117692,
        "mismatch/k3": 0.272976,
        "mismatch/ess": 0.557233,
        "mismatch/chi2": 2.470648,
        "behave_filtered_ratio": 1 / 13,
        "clip_ratio/low": 1 / 13,
        "clip_ratio/high": 2 / 13,
        "dual_clip_ratio": 1 / 13,
    }
    assert {name: means[name] for name in expected} == pytest.approx(expected, abs=6e-7)
    icepop = loss_of(LossSettings(weight="icepop")).metrics.means()
    assert icepop["behave_filtered_ratio"] == pytest.approx(2 / 13)
    assert MetricSums().means() == {}


def test_shards_add_up_to_the_whole() -> None:
    upper = loss_of(**{name: value[:2] for name, value in tensors().items()})
    lower = loss_of(**{name: value[2:] for name, value in tensors().items()})
    assert (upper.num_tokens, lower.num_tokens) == (7, 6)
    assert upper.total.item() == pytest.approx(-3.070362, abs=2e-6)
    assert lower.total.item() == pytest.approx(0.666698, abs=2e-6)
    whole = loss_of()
    assert (upper.total + lower.total).item() == pytest.approx(whole.total.item(), rel=1e-12)
    assert (upper.metrics + lower.metrics).means() == pytest.approx(whole.metrics.means(), rel=1e-9)
    mean_of_means = (upper.total / 7 + lower.total / 6).item() / 2
    assert mean_of_means == pytest.approx(-0.163753, abs=2e-6)  # what dividing locally would give


@given(rubbish=st.floats(allow_nan=True, allow_infinity=True))
@settings(max_examples=40, deadline=None)
def test_padding_never_matters(rubbish: float) -> None:
    changed = {
        name: torch.where(tensors()["mask_BT"], value.detach(), rubbish)
        for name, value in tensors().items()
        if name in {"current_BT", "proximal_BT", "behaviour_BT"}
    }
    assert loss_of(**changed).total.item() == loss_of().total.item()
    assert loss_of(**changed).metrics == loss_of().metrics
    assert torch.equal(gradient(**changed), gradient())


@given(order=st.permutations(range(4)))
@settings(max_examples=24, deadline=None)
def test_order_of_rows_never_matters(order: list[int]) -> None:
    permuted = {name: value[list(order)] for name, value in tensors().items()}
    assert loss_of(**permuted).total.item() == pytest.approx(loss_of().total.item(), rel=1e-12)
    torch.testing.assert_close(gradient(**permuted), gradient()[list(order)], rtol=1e-12, atol=0)


def test_only_the_current_policy_gets_a_gradient() -> None:
    proximal = tensors()["proximal_BT"].requires_grad_()
    behaviour = tensors()["behaviour_BT"].requires_grad_()
    current = tensors()["current_BT"]
    loss_of(current_BT=current, proximal_BT=proximal, behaviour_BT=behaviour).total.backward()
    assert proximal.grad is None or not proximal.grad.any()
    assert behaviour.grad is None or not behaviour.grad.any()
    assert current.grad is not None
    assert bool(current.grad.any())


@pytest.mark.parametrize("weight", [5.001, 7.0, math.exp(15), math.exp(60)])
def test_weights_above_the_mask_change_nothing(weight: float) -> None:
    behaviour = tensors()["behaviour_BT"]
    behaviour[1, 2] = tensors()["proximal_BT"][1, 2] - math.log(weight)
    assert loss_of(behaviour_BT=behaviour).total.item() == pytest.approx(loss_of().total.item(), rel=1e-12)
    assert torch.equal(gradient(behaviour_BT=behaviour), gradient())


def test_a_weight_below_the_mask_does_change_the_loss() -> None:
    behaviour = tensors()["behaviour_BT"]
    behaviour[1, 2] = tensors()["proximal_BT"][1, 2] - math.log(4.9)
    assert loss_of(behaviour_BT=behaviour).total.item() != pytest.approx(loss_of().total.item(), rel=1e-3)


def test_no_spread_in_rewards_gives_no_gradient() -> None:
    assert not gradient(advantage_B=torch.zeros(4, dtype=torch.float64)).any()


def test_far_apart_policies_do_not_overflow() -> None:
    far = loss_of(LossSettings(weight="untruncated"), behaviour_BT=tensors()["behaviour_BT"] - 1e6)
    assert math.isfinite(far.total.item())


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_nonsense_from_a_node_is_refused_by_name(value: float) -> None:
    behaviour = tensors()["behaviour_BT"]
    behaviour[2, 1] = value
    with pytest.raises(RolloutMalformedError, match=r"rollout third .* at token 1"):
        loss_of(behaviour_BT=behaviour)


def test_nonsense_of_the_trainer_is_its_own_fault() -> None:
    current = tensors()["current_BT"].detach().clone()
    current[0, 0] = math.nan
    with pytest.raises(EngineError):
        loss_of(current_BT=current)


def test_correcting_twice_is_refused() -> None:
    with pytest.raises(UsageError):
        LossSettings(anchor="behaviour")
    with pytest.raises(UsageError):
        replace(DEFAULT, anchor="behaviour")


def test_a_masked_token_neither_counts_nor_trains() -> None:
    mask = tensors()["mask_BT"]
    mask[0, 0] = False
    summed = loss_of(mask_BT=mask)
    assert summed.num_tokens == NUM_TOKENS - 1
    assert gradient(mask_BT=mask)[0, 0] == 0.0
