"""Random histories of a swarm: what can never happen does not, and a healthy rest always goes on.

The machine in `swarm.py` keeps its own account. For each of the seven lines of the design under "What can never happen"
`bugs.INVARIANTS` has seeded bugs, and the machine finds every one of them.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.account import CountedWorld
from tests.property.bugs import INVARIANTS
from tests.property.swarm import Swarm

MIN_EVENTS = 10_000
QUICK = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(
    QUICK,
    max_examples=1000,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
)
SEEDED = [(number, bug) for number, invariant in INVARIANTS.items() for bug in invariant.bugs]


def test_random_histories() -> None:
    before = CountedWorld.num_events
    run_state_machine_as_test(Swarm, settings=QUICK)
    assert CountedWorld.num_events - before >= MIN_EVENTS, "too few events to say anything"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_histories() -> None:
    run_state_machine_as_test(Swarm, settings=settings(QUICK, max_examples=600, stateful_step_count=80))


def test_every_invariant_has_seeded_bugs() -> None:
    assert list(INVARIANTS) == [1, 2, 3, 4, 5, 6, 7]
    assert all(invariant.bugs for invariant in INVARIANTS.values())


@pytest.mark.parametrize(("number", "bug"), SEEDED, ids=[f"{number}: {bug}" for number, bug in SEEDED])
def test_machine_finds_seeded_bugs(number: int, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = INVARIANTS[number].bugs[bug]
    monkeypatch.setattr(seeded.place, seeded.name, seeded.wrong)
    monkeypatch.setattr(Swarm, "kind", seeded.kind)
    with pytest.raises((AssertionError, KeyError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(Swarm, settings=HUNT)
