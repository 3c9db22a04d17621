"""Random histories of a swarm: what can never happen does not, and a healthy rest always goes on.

The machine in `swarm.py` keeps its own account. Each planted bug shows that it would see one of its kind.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from coordinator.core import apply, attestation, leases, ledger, roster, rounds, shares
from coordinator.core.soft import Attestation
from coordinator.core.turn import Turn
from protocol.ids import Digest, RoundId
from protocol.manifest import Body
from tests.property.swarm import Swarm

QUICK = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(QUICK, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True)


def test_random_histories() -> None:
    run_state_machine_as_test(Swarm, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_histories() -> None:
    run_state_machine_as_test(Swarm, settings=settings(QUICK, max_examples=600, stateful_step_count=80))


def forget_leases(turn: Turn) -> None:
    """Leases end without giving their slots back."""
    turn.state.leases.clear()


def take_for_equal(digest: Digest, body: Body, metrics: dict[str, float]) -> Attestation:
    """All bodies pass for the same."""
    return Attestation(Digest("same"), body, metrics)


BUGS: dict[str, tuple[object, str, object]] = {
    "gate 3 lets old tokens through": (shares, "is_fresh", lambda **_: True),
    "any version is accepted": (ledger, "_check_segments", lambda turn, event: turn.require_head().version),
    "any lease will do": (ledger, "_check_lease", lambda *_: None),
    "duplicates are not known": (ledger, "_fill_of", lambda *_: None),
    "slots of late leases are forgotten": (leases, "expire_leases", forget_leases),
    "bodies that differ are committed": (attestation, "Attestation", take_for_equal),
    "trained groups stay": (apply, "_retire", lambda *_: None),
    "useless trainers keep their seats": (roster, "STRIKES_TO_FAIL", 10**9),
    "every attempt has the same name": (rounds, "RoundId", lambda text: RoundId("0.0")),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_machine_finds_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong = BUGS[bug]
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises((AssertionError, KeyError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(Swarm, settings=HUNT)
