"""How old a batch was."""

import pytest

from coordinator.core.metrics import staleness


def test_staleness_of_the_fixture() -> None:
    """Thirteen tokens of the versions 3 3 4 4, 3 3 3, 4 4 5 5, 5 6, in an update from version 6."""
    lags = [(3, 2), (2, 2), (3, 3), (2, 2), (1, 2), (1, 1), (0, 1)]
    expected = {"mean": 2.0, "p50": 2.0, "p95": 3.0, "max": 3.0}
    assert staleness(lags) == pytest.approx({f"staleness/{name}": value for name, value in expected.items()})


def test_percentiles_are_over_tokens() -> None:
    told = staleness([(0, 94), (4, 5), (9, 1)])
    assert (told["staleness/p50"], told["staleness/p95"], told["staleness/max"]) == (0.0, 4.0, 9.0)
    assert staleness([(7, 1)])["staleness/p50"] == 7.0
