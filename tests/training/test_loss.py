"""The loss against numbers computed by hand elsewhere, and the properties that hold for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.training.loss import LossSum, policy_loss
from node.training.loss_metrics import MetricSums
from node.training.objectives import Tokens, clipped_ratio, loglinear_proximal, ratio, sequence_ratio, weighted
from protocol.errors import EngineError, RolloutMalformedError
from protocol.loss import NUMBERS, LossSpec, baseline, default_aggregation

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
REWARDS = [1.0, 0.0, 0.5, 0.0]
ADVANTAGE = [0.625, -0.375, 0.125, -0.375]
NUM_TOKENS = 13

VERSIONS = [[3, 3, 4, 4], [3, 3, 3, 9], [4, 4, 5, 5], [5, 6, 0, 9]]
V_TRAIN = 6

DEFAULT = LossSpec()
NO_DUAL = {"dual_clip": 1e9}
ON_POLICY = -0.086538
ROWS: dict[int, tuple[LossSpec, float]] = {
    1: (LossSpec("naive"), 0.091024),
    4: (LossSpec("tis", NO_DUAL), -0.091684),
    5: (LossSpec("tis"), -0.109154),
    6: (LossSpec("icepop", NO_DUAL), -0.180389),
    7: (LossSpec("icepop"), -0.197859),
    8: (LossSpec("decoupled", NO_DUAL), -0.167428),
    9: (DEFAULT, -0.184897),
    10: (LossSpec(aggregation="seq_mean_token_mean"), -0.062609),
    11: (LossSpec(aggregation="seq_mean_token_sum"), -0.600916),
    12: (LossSpec(aggregation="dr_grpo", max_tokens=8), -0.075114),
    13: (LossSpec(advantage="standardised"), -0.386237),
    14: (LossSpec("loglinear"), 0.023509),
    15: (LossSpec("sequence_tis"), -0.238027),
    16: (LossSpec("aipo", {"ratio_cut": 2.0}), -0.135457),
    18: (LossSpec("cispo"), 0.067261),
    21: (LossSpec("dppo"), -0.015078),
    22: (LossSpec("rollout_is"), -0.082904),
}
"""Rows of the fixture that are presets. The others are functions that no preset gives without a behaviour weight."""
PRESETS = [LossSpec(preset, aggregation=default_aggregation(preset)) for preset in NUMBERS]


def tensors() -> dict[str, torch.Tensor]:
    """The fixture, as arguments of `policy_loss`, in double precision."""
    mask = torch.tensor([[at < length for at in range(4)] for length in LENGTHS])
    return {
        "current_BT": torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True),
        "proximal_BT": torch.tensor(PROXIMAL, dtype=torch.float64),
        "behaviour_BT": torch.tensor(BEHAVIOUR, dtype=torch.float64),
        "advantage_B": torch.tensor(ADVANTAGE, dtype=torch.float64),
        "mask_BT": mask,
        "lag_BT": V_TRAIN - torch.tensor(VERSIONS),
    }


def loss_of(chosen: LossSpec = DEFAULT, **changes: torch.Tensor) -> LossSum:
    arguments = {**tensors(), **changes}
    return policy_loss(
        arguments["current_BT"],
        proximal_BT=arguments["proximal_BT"],
        behaviour_BT=arguments["behaviour_BT"],
        advantage_B=arguments["advantage_B"],
        mask_BT=arguments["mask_BT"],
        lag_BT=arguments["lag_BT"],
        spec=chosen,
        names=["first", "second", "third", "fourth"],
    )


def value_of(chosen: LossSpec, **changes: torch.Tensor) -> float:
    """The loss over the fixture as a whole batch."""
    mean, scale = baseline(REWARDS, chosen.advantage)
    advantage = (torch.tensor(REWARDS, dtype=torch.float64) - mean) / scale
    summed = loss_of(chosen, **{"advantage_B": advantage, **changes})
    assert summed.num_tokens == NUM_TOKENS
    value = summed.total.item() / chosen.divisor(num_tokens=NUM_TOKENS, num_sequences=len(LENGTHS))
    assert summed.metrics.means()["loss"] == pytest.approx(value)
    return value


@pytest.mark.parametrize("row", ROWS)
def test_row_of_the_fixture(row: int) -> None:
    chosen, expected = ROWS[row]
    assert value_of(chosen) == pytest.approx(expected, abs=6e-7)


def fixture_tokens(**changes: torch.Tensor) -> Tokens:
    """The fixture as the table takes it, with zeros at masked positions."""
    parts = {**tensors(), **changes}
    live = {name: torch.where(parts["mask_BT"], parts[name], 0.0) for name in ("current_BT", "proximal_BT")}
    return Tokens(
        **live,
        behaviour_BT=torch.where(parts["mask_BT"], parts["behaviour_BT"], 0.0),
        advantage_BT=parts["advantage_B"][:, None].expand(4, 4),
        mask_BT=parts["mask_BT"],
        lag_BT=parts["lag_BT"],
    )


def test_rows_that_are_no_presets() -> None:
    """Proximal ratios without a weight, and untruncated ones, are parts of the table that nobody can choose."""
    x = fixture_tokens()
    plain = clipped_ratio(x, ratio(x.current_BT, x.proximal_BT), 0.2, 0.28)
    untruncated = weighted(plain, ratio(x.proximal_BT, x.behaviour_BT))
    rows = {2: (plain, -0.023341), 3: (untruncated, 0.007081)}
    for of, expected in rows.values():
        assert (of.loss_BT * x.mask_BT).sum().item() / NUM_TOKENS == pytest.approx(expected, abs=6e-7)
    same = {"behaviour_BT": tensors()["proximal_BT"]}  # rows 17, 19 and 20 have the proximal policy as their anchor
    assert value_of(LossSpec("cispo"), **same) == pytest.approx(0.045742, abs=6e-7)
    gspo = LossSpec("gspo", {"clip_low": 0.2, "clip_high": 0.28}, "seq_mean_token_mean")
    assert value_of(gspo, **same) == pytest.approx(0.073607, abs=6e-7)
    assert value_of(LossSpec("gspo", {}, "seq_mean_token_mean"), **same) == pytest.approx(0.094936, abs=6e-7)
    policy_gradient_alone = LossSpec("dppo", {"tau": 0.0})
    assert value_of(policy_gradient_alone) == pytest.approx(-0.015618, abs=6e-7)


def test_ratios_of_sequences_and_the_policy_between() -> None:
    x = fixture_tokens(behaviour_BT=tensors()["proximal_BT"])
    assert sequence_ratio(x)[:, 0].tolist() == pytest.approx([1.077884, 0.920044, 1.056541, 2.013753], abs=6e-7)
    weights = sequence_ratio(fixture_tokens(current_BT=tensors()["proximal_BT"]))[:, 0].tolist()
    assert weights == pytest.approx([1.284025, 1.676430, 0.995012, 0.606531], abs=6e-7)
    between = loglinear_proximal(fixture_tokens())
    expected = [
        [-0.433333, -0.866667, -0.4, -1.55],
        [-1.333333, -0.2, -1.3, 0.0],
        [-0.675, -0.125, -1.6, -0.9],
        [-1.0, -1.4, 0.0, 0.0],
    ]
    torch.testing.assert_close(between, torch.tensor(expected, dtype=torch.float64), atol=6e-7, rtol=0)


def test_the_geometric_mask_keeps_whole_rows() -> None:
    only_third = loss_of(LossSpec("geometric")).metrics
    assert only_third.filtered == NUM_TOKENS - LENGTHS[2]
    wide = LossSpec("geometric", {"weight_low": 0.7, "weight_high": 1.3})
    assert loss_of(wide).metrics.filtered == LENGTHS[1] + LENGTHS[3]


@pytest.mark.parametrize(("log_ratio", "weight"), [(0.0, 1.0), (0.25, 0.882), (0.5, 0.607), (1.0, 0.135)])
@pytest.mark.parametrize("sign", [1, -1])
def test_gipo_weighs_by_distance_alone(log_ratio: float, weight: float, sign: int) -> None:
    current = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    behaviour = current.detach() - sign * log_ratio
    one = {"advantage_B": torch.ones(1).double(), "mask_BT": torch.ones(1, 1).bool(), "lag_BT": torch.ones(1, 1)}
    loss_of(LossSpec("gipo"), current_BT=current, proximal_BT=current, behaviour_BT=behaviour, **one).total.backward()
    assert current.grad is not None
    assert -current.grad.item() / math.exp(sign * log_ratio) == pytest.approx(weight, abs=5e-4)


def test_aipo_never_weighs_more_than_its_cut() -> None:
    at_most = 4.0 * torch.tensor(ADVANTAGE).abs()[:, None].double() / NUM_TOKENS
    far = tensors()["behaviour_BT"] - 9.0
    grown = gradient(LossSpec("aipo"), behaviour_BT=far)
    torch.testing.assert_close(grown.abs(), (at_most * tensors()["mask_BT"]), rtol=1e-12, atol=0)


AT_REST = [chosen for chosen in PRESETS if chosen.preset != "cispo"]


@pytest.mark.parametrize("chosen", AT_REST, ids=lambda chosen: chosen.preset)
def test_all_losses_agree_on_policy(chosen: LossSpec) -> None:
    """Row 23. Where nothing is stale all are the policy gradient; the value of CISPO is in another unit."""
    same = tensors()["behaviour_BT"]
    token_mean = LossSpec(chosen.preset) if chosen.preset != "gspo" else chosen
    expected = ON_POLICY if chosen.preset != "gspo" else 0.0  # the advantages of a group sum to nought
    assert value_of(
        token_mean, current_BT=same, proximal_BT=same, behaviour_BT=same, lag_BT=torch.zeros(4, 4)
    ) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize("chosen", PRESETS, ids=lambda chosen: chosen.preset)
def test_all_gradients_agree_on_policy(chosen: LossSpec) -> None:
    same = {name: tensors()["behaviour_BT"] for name in ("current_BT", "proximal_BT", "behaviour_BT")}
    advantage_B1, mask_BT = tensors()["advantage_B"][:, None], tensors()["mask_BT"]
    per_row = torch.tensor(LENGTHS)[:, None] if chosen.preset == "gspo" else torch.ones(4, 1)
    expected = -advantage_B1 * mask_BT / per_row / NUM_TOKENS
    torch.testing.assert_close(gradient(chosen, **same, lag_BT=torch.zeros(4, 4)), expected, rtol=1e-9, atol=0)


def gradient(chosen: LossSpec = DEFAULT, **changes: torch.Tensor) -> torch.Tensor:
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
    icepop = gradient(LossSpec("icepop"))
    torch.testing.assert_close(icepop, torch.tensor(expected, dtype=torch.float64), atol=6e-7, rtol=0)


def test_metrics_of_the_default() -> None:
    means = loss_of().metrics.means()
    expected = {
        "loss": -0.184897,
        "mismatch/k1": -0.117692,
        "mismatch/k2": 0.170112,
        "mismatch/k3": 0.272976,
        "mismatch/ess": 0.557233,
        "mismatch/chi2": 2.470648,
        "behave_filtered_ratio": 1 / 13,
        "clip_ratio/low": 1 / 13,
        "clip_ratio/high": 2 / 13,
        "dual_clip_ratio": 1 / 13,
    }
    assert {name: means[name] for name in expected} == pytest.approx(expected, abs=6e-7)
    icepop = loss_of(LossSpec("icepop")).metrics.means()
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


@pytest.mark.parametrize("chosen", PRESETS, ids=lambda chosen: chosen.preset)
@given(rubbish=st.floats(allow_nan=True, allow_infinity=True), width=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_padding_never_matters(chosen: LossSpec, rubbish: float, width: int) -> None:
    changed = {
        name: torch.where(tensors()["mask_BT"], value.detach(), rubbish)
        for name, value in tensors().items()
        if name in {"current_BT", "proximal_BT", "behaviour_BT"}
    }
    assert loss_of(chosen, **changed).metrics == loss_of(chosen).metrics
    assert torch.equal(gradient(chosen, **changed), gradient(chosen))
    wider = {
        name: value if name == "advantage_B" else torch.nn.functional.pad(value, (0, width))
        for name, value in {**tensors(), **changed}.items()
    }
    assert loss_of(chosen, **wider).total.item() == pytest.approx(loss_of(chosen).total.item(), rel=1e-12)


@pytest.mark.parametrize("chosen", PRESETS, ids=lambda chosen: chosen.preset)
@given(order=st.permutations(range(4)))
@settings(max_examples=8, deadline=None)
def test_order_of_rows_never_matters(chosen: LossSpec, order: list[int]) -> None:
    permuted = {name: value[list(order)] for name, value in tensors().items()}
    assert loss_of(chosen, **permuted).total.item() == pytest.approx(loss_of(chosen).total.item(), rel=1e-12)
    torch.testing.assert_close(gradient(chosen, **permuted), gradient(chosen)[list(order)], rtol=1e-12, atol=0)


AGGREGATED = [*PRESETS, *(ROWS[row][0] for row in (10, 11, 12))]


@pytest.mark.parametrize("chosen", AGGREGATED, ids=lambda chosen: f"{chosen.preset}-{chosen.aggregation}")
@given(cut=st.integers(0, 4))
@settings(max_examples=5, deadline=None)
def test_any_split_by_rows_adds_up(chosen: LossSpec, cut: int) -> None:
    parts = [
        loss_of(chosen, **{name: value[where] for name, value in tensors().items()})
        for where in (slice(0, cut), slice(cut, 4))
    ]
    whole = loss_of(chosen)
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-12)
    assert (parts[0].metrics + parts[1].metrics).means() == pytest.approx(whole.metrics.means(), rel=1e-9)


@pytest.mark.parametrize("chosen", PRESETS, ids=lambda chosen: chosen.preset)
def test_only_the_current_policy_gets_a_gradient(chosen: LossSpec) -> None:
    proximal = tensors()["proximal_BT"].requires_grad_()
    behaviour = tensors()["behaviour_BT"].requires_grad_()
    current = tensors()["current_BT"]
    loss_of(chosen, current_BT=current, proximal_BT=proximal, behaviour_BT=behaviour).total.backward()
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


NO_REGULARISER = [chosen for chosen in PRESETS if chosen.preset != "dppo"]


@pytest.mark.parametrize("chosen", [*NO_REGULARISER, LossSpec("dppo", {"tau": 0.0})], ids=lambda chosen: chosen.preset)
def test_no_spread_in_rewards_gives_no_gradient(chosen: LossSpec) -> None:
    assert not gradient(chosen, advantage_B=torch.zeros(4, dtype=torch.float64)).any()


@pytest.mark.parametrize("weight", [0.499, 5.001])
def test_icepop_gives_no_gradient_to_tokens_outside(weight: float) -> None:
    behaviour = tensors()["behaviour_BT"]
    behaviour[2, 0] = tensors()["proximal_BT"][2, 0] - math.log(weight)
    assert gradient(LossSpec("icepop"), behaviour_BT=behaviour)[2, 0] == 0.0
    behaviour[2, 0] = tensors()["proximal_BT"][2, 0] - math.log(0.501)
    assert gradient(LossSpec("icepop"), behaviour_BT=behaviour)[2, 0] != 0.0


@pytest.mark.parametrize("row", [6, 9])
def test_the_divisor_is_of_tokens_before_rejection(row: int) -> None:
    chosen, expected = ROWS[row]
    summed = loss_of(chosen)
    assert summed.metrics.filtered
    assert summed.total.item() / (NUM_TOKENS - summed.metrics.filtered) != pytest.approx(expected, abs=1e-3)


def test_far_apart_policies_do_not_overflow() -> None:
    far = loss_of(LossSpec("aipo"), behaviour_BT=tensors()["behaviour_BT"] - 1e6)
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


def test_a_masked_token_neither_counts_nor_trains() -> None:
    mask = tensors()["mask_BT"]
    mask[0, 0] = False
    summed = loss_of(mask_BT=mask)
    assert summed.num_tokens == NUM_TOKENS - 1
    assert gradient(mask_BT=mask)[0, 0] == 0.0
