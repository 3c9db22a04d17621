"""Which losses can exist, what divides them, and what a reward is worth."""

import msgspec
import pytest

from protocol.errors import UsageError
from protocol.loss import NUMBERS, Aggregation, LossSpec, Preset, baseline, default_aggregation


@pytest.mark.parametrize("preset", NUMBERS)
def test_a_preset_takes_its_own_numbers_alone(preset: Preset) -> None:
    aggregation = default_aggregation(preset)
    every = {name for numbers in NUMBERS.values() for name in numbers}
    for name in every - NUMBERS[preset].keys():
        with pytest.raises(UsageError, match=name):
            LossSpec(preset, {name: 0.5}, aggregation)
    for name, default in NUMBERS[preset].items():
        assert LossSpec(preset, {}, aggregation).number(name) == default
        assert LossSpec(preset, {name: 1.001 * default}, aggregation).number(name) == 1.001 * default


@pytest.mark.parametrize(
    ("preset", "numbers", "others"),
    [
        ("icepop", {"weight_low": 5.0}, {}),
        ("geometric", {"weight_high": 0.9}, {}),
        ("rollout_is", {"ratio_low": 1.3}, {}),
        ("gspo", {}, {}),
        ("gspo", {}, {"aggregation": "dr_grpo", "max_tokens": 8}),
        ("decoupled", {}, {"aggregation": "dr_grpo"}),
        ("decoupled", {}, {"aggregation": "dr_grpo", "max_tokens": 8, "advantage": "standardised"}),
    ],
)
def test_what_does_not_go_together_is_refused(
    preset: Preset, numbers: dict[str, float], others: dict[str, str]
) -> None:
    with pytest.raises(UsageError):
        LossSpec(preset, numbers, **others)  # type: ignore[arg-type]


def test_a_wrong_loss_cannot_come_over_the_wire() -> None:
    right = LossSpec("tis", {"weight_cut": 3.0})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(right), type=LossSpec) == right
    for wrong in ({"preset": "tis", "numbers": {"sigma": 1.0}}, {"preset": "none"}):
        with pytest.raises((msgspec.ValidationError, UsageError)):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=LossSpec)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 13), ("seq_mean_token_mean", 4), ("seq_mean_token_sum", 4), ("dr_grpo", 32)],
)
def test_what_the_sum_is_divided_by(aggregation: Aggregation, expected: int) -> None:
    spec = LossSpec(aggregation=aggregation, max_tokens=8)
    assert spec.divisor(num_tokens=13, num_sequences=4) == expected


def test_baselines_of_a_group() -> None:
    assert baseline([1.0, 0.0, 0.5, 0.0], "centred") == (0.375, 1.0)
    mean, scale = baseline([1.0, 0.0, 0.5, 0.0], "standardised")
    assert (mean, scale) == (0.375, pytest.approx(0.4787136 + 1e-6))
    mean, scale = baseline([0.5, 0.5], "standardised")
    assert (0.5 - mean) / scale == 0.0
