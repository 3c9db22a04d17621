"""The soak's verdict: what is sound passes, and each thing that it watches for fails it."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak.ledger import DiskSample, Ledger, ProcessSample, imbalances, size_of
from tests.soak.verdict import PROCESS_KINDS, figures
from tests.soak.victims import KINDS, Deck, Victim

LASTED_S = 2400.0
STATUS: dict[str, Any] = {
    "version": 7,
    "num_diverged": 0,
    "books": dict.fromkeys(("running", "queued", "in_round", "trained", "dropped", "filtered", "failed"), 1)
    | {"issued": 7},
    "leases": {"granted": 4, "open": 1, "filled": 1, "expired": 1, "returned": 1},
}


def sound_ledger(*, rss_mb: Callable[[float], float] = lambda _: 100.0, disk_mb: float = 50.0) -> Ledger:
    """Samples every ten seconds of one long life of each kind, and a version every ten seconds."""
    ledger = Ledger(kills=Counter({f"{kind} killed": 3 for kind in KINDS}))
    for step in range(int(LASTED_S / 10)):
        at_s = 10.0 * step
        ledger.note_status({**STATUS, "version": 7 + step}, at_s=at_s)
        ledger.disks.append(DiskSample(at_s, "coordinator", disk_mb, 5))
        for number, kind in enumerate(PROCESS_KINDS):
            ledger.processes.append(ProcessSample(at_s, kind, (number, 0.0), at_s, rss_mb(at_s), 20))
    return ledger


def failed(ledger: Ledger, *, lasted_s: float = LASTED_S) -> set[str]:
    """The names of the figures that miss their threshold."""
    return {figure.name for figure in figures(ledger, lasted_s=lasted_s) if not figure.passed}


def test_sound_soak_passes() -> None:
    assert failed(sound_ledger()) == set()
    assert failed(sound_ledger(disk_mb=5000.0, rss_mb=lambda at_s: 100.0 + 29 * at_s / LASTED_S)) == set()


def test_leak_of_memory_is_caught_in_a_long_life() -> None:
    ledger = sound_ledger(rss_mb=lambda at_s: 100.0 + 60 * at_s / LASTED_S)
    assert failed(ledger) == {f"memory growth, {kind}" for kind in PROCESS_KINDS}


def test_leak_that_outlives_every_life_is_caught_between_early_and_late_ones() -> None:
    """What a process loads at its start grows, though no life is long enough to show it."""
    ledger = sound_ledger()
    ledger.processes = [
        ProcessSample(at_s, "coordinator", (int(at_s) // 100, 0.0), at_s % 100, 100.0 + at_s / 20, 20)
        for at_s in range(0, int(LASTED_S), 10)
    ]
    assert "memory growth, coordinator" in failed(ledger)


def test_leak_of_descriptors_is_caught() -> None:
    ledger = sound_ledger()
    ledger.processes = [
        ProcessSample(s.at_s, s.kind, s.life, s.age_s, s.rss_mb, int(20 + s.at_s / 50)) for s in ledger.processes
    ]
    assert failed(ledger) == {f"descriptor growth, {kind}" for kind in PROCESS_KINDS}


def test_disk_that_goes_on_growing_is_caught() -> None:
    ledger = sound_ledger()
    ledger.disks = [DiskSample(s.at_s, s.home, 50 + s.at_s / 10, 5) for s in ledger.disks]
    assert failed(ledger) == {"disk growth, coordinator"}


def test_stall_is_caught_also_at_the_end() -> None:
    ledger = sound_ledger()
    ledger.version_times = [pair for pair in ledger.version_times if pair[0] < LASTED_S - 150]
    assert failed(ledger) == {"longest time without a version"}
    ledger = sound_ledger()
    ledger.version_times = [pair for pair in ledger.version_times if not 500 < pair[0] < 650]
    assert failed(ledger) == {"longest time without a version"}


def test_books_that_do_not_balance_are_caught() -> None:
    assert imbalances(STATUS) == []
    ledger = sound_ledger()
    ledger.note_status({**STATUS, "books": {**STATUS["books"], "issued": 8}, "version": 300}, at_s=LASTED_S)
    ledger.note_status({**STATUS, "leases": {**STATUS["leases"], "open": 0}, "version": 301}, at_s=LASTED_S)
    assert len(ledger.unbalanced) == 2
    assert failed(ledger) == {"samples with books that do not balance"}


@pytest.mark.parametrize(
    ("field", "name"),
    [("ended", "daemons that ended by themselves"), ("orphans", "processes that outlived their daemon")],
)
def test_processes_that_end_or_stay_when_they_should_not_are_caught(field: str, name: str) -> None:
    ledger = sound_ledger()
    getattr(ledger, field).append("trainer-1")
    assert failed(ledger) == {name}


def test_divergence_and_silence_are_caught() -> None:
    ledger = sound_ledger()
    ledger.note_status({**STATUS, "num_diverged": 1, "version": 300}, at_s=LASTED_S)
    assert failed(ledger) == {"versions that differed between trainers"}
    ledger = sound_ledger()
    ledger.num_statuses = 10
    assert failed(ledger) == {"samples of the books"}


def test_long_soak_without_samples_or_kills_fails_and_a_short_one_reports() -> None:
    ledger = sound_ledger()
    ledger.processes.clear()
    ledger.kills.clear()
    assert len(failed(ledger)) == 2 * len(PROCESS_KINDS) + len(KINDS)
    ledger.version_times = [(0.0, 1), (50.0, 9)]
    assert failed(ledger, lasted_s=100.0) == set()


def test_every_kind_has_its_turn_and_a_seed_gives_one_order() -> None:
    victims = [Victim(kind, f"rollout-{number}", number, 0.0) for kind in KINDS for number in (1, 2)]
    decks = [Deck(random.Random(5)) for _ in range(2)]
    drawn = [[deck.draw(victims) for _ in range(2 * len(KINDS))] for deck in decks]
    assert drawn[0] == drawn[1]
    for turn in (drawn[0][: len(KINDS)], drawn[0][len(KINDS) :]):
        assert {victim.kind for victim in turn if victim} == set(KINDS)
    assert Deck(random.Random(5)).draw([]) is None


def test_size_counts_every_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(bytes(10))
    (tmp_path / "b").write_bytes(bytes(5))
    assert size_of(tmp_path) == (15, 2)
