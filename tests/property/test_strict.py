"""`max_lag = 0`, by whichever mode: every token of every batch is of exactly the version that the batch starts from.

The account of the machine asserts it of each token at each cut (`Account._check_item`); here it plays nothing but such
histories, and is shown a core whose mode does not bind.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from coordinator.core.turn import Turn
from tests.property.swarm import Swarm

SETTINGS = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
KINDS: dict[str, dict[str, object]] = {
    "sequential": {"mode": "sequential", "max_lag": 4},
    "periodic": {"mode": "periodic", "max_lag": 4},
    "async": {"mode": "async", "max_lag": 0},
}


class Strict(Swarm):
    """Counts what the batches of all histories held."""

    num_batches = 0

    def teardown(self) -> None:
        super().teardown()
        for sealed in self.book.sealed.values():
            keys = [key for _, part in sealed.shares for key in part]
            versions = {version for key in keys for version, _ in self.book.segments[key]}
            assert versions == {sealed.base_version}, "a token of another version"
            assert {key.version for key in keys} == {sealed.base_version}, "a slot of another version"
        Strict.num_batches += len(self.book.sealed)
        assert not self.world.core.state.num_tokens_masked


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_token_is_of_the_version_that_the_batch_starts_from(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strict, "kind", KINDS[kind])
    monkeypatch.setattr(Strict, "num_batches", 0)
    run_state_machine_as_test(Strict, settings=SETTINGS)
    assert Strict.num_batches >= 25, "too few batches to say anything"


@pytest.mark.parametrize("kind", ["sequential", "periodic"])
def test_a_mode_that_does_not_bind_would_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: lag is what `max_lag` says, whatever the mode."""
    monkeypatch.setattr(Strict, "kind", KINDS[kind])
    monkeypatch.setattr(Turn, "max_lag", property(lambda turn: turn.rules.spec.max_lag))
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Strict, settings=settings(SETTINGS, max_examples=200, phases=[Phase.generate]))
