"""What the soak's samples come to, as figures with thresholds. Pure.

Memory and descriptors are compared in two ways, and the worse one counts: within each long life of a process, and
between young and late times of the soak among processes that are past their start. A soak that is too short to judge
reports without a threshold; a long one that could not judge fails.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

from tests.bench.table import Figure, at_least, at_most, reported
from tests.soak.ledger import DiskSample, Ledger, ProcessSample
from tests.soak.victims import KINDS

WARM_AGE_S = 45.0
"""Until then a process still loads libraries and caches."""
LONG_LIFE_S = 240.0
JUDGED_S = 1200.0
"""From this length on, missing samples are a failure."""
MAX_STALL_S = 120.0
GROWTH_SHARE = 0.2
RSS_ROOM_MB, FILES_ROOM, DISK_ROOM_MB = 30.0, 16.0, 20.0
PROCESS_KINDS = (
    "coordinator",
    "coordinator directory",
    "coordinator p2pd",
    "coordinator grader",
    "trainer daemon",
    "trainer compute",
    "trainer directory",
    "trainer p2pd",
    "rollout daemon",
    "rollout compute",
    "rollout directory",
    "rollout p2pd",
)


def figures(ledger: Ledger, *, lasted_s: float) -> list[Figure]:
    """The table but for what is read from the journal."""
    num_versions = ledger.version_times[-1][1] if ledger.version_times else 0
    made = [
        at_least("versions made", num_versions, lasted_s / 60, anchor="one a minute"),
        at_most(
            "longest time without a version", ledger.longest_stall_s(until_s=lasted_s), MAX_STALL_S, unit="s", anchor=""
        ),
        at_least("samples of the books", ledger.num_statuses, lasted_s / 10 * 0.6, anchor="one in ten seconds"),
        at_most("samples with books that do not balance", len(ledger.unbalanced), 0, anchor="none"),
        at_most("versions that differed between trainers", ledger.num_diverged, 0, anchor="none"),
        at_most("daemons that ended by themselves", len(ledger.ended), 0, anchor="none"),
        at_most("processes that outlived their daemon", len(ledger.orphans), 0, anchor="none after 10 s"),
    ]
    least = 1.0 if lasted_s >= JUDGED_S else 0.0
    for kind in KINDS:
        killed, stopped = (float(ledger.kills[f"{kind} {word}"]) for word in ("killed", "stopped"))
        made.append(at_least(f"{kind}, killed", killed, least, anchor=f"and stopped for a while {stopped:.0f} times"))
    for kind in PROCESS_KINDS:
        samples = [sample for sample in ledger.processes if sample.kind == kind]
        memory = growth(samples, lambda sample: sample.rss_mb, lasted_s=lasted_s)
        files = growth(samples, lambda sample: float(sample.num_files), lasted_s=lasted_s)
        made.append(_judge(f"memory growth, {kind}", memory, room=RSS_ROOM_MB, unit="MB", lasted_s=lasted_s))
        made.append(_judge(f"descriptor growth, {kind}", files, room=FILES_ROOM, unit="", lasted_s=lasted_s))
    for home in sorted({sample.home for sample in ledger.disks}):
        of_home = [sample for sample in ledger.disks if sample.home == home]
        made.append(_disk_figure(home, of_home, lasted_s))
    return made


def growth(
    samples: Sequence[ProcessSample], value: Callable[[ProcessSample], float], *, lasted_s: float
) -> tuple[float, float] | None:
    """(growth, level that it started from) of the worst comparison; None if there is nothing to compare."""
    warm = [sample for sample in samples if sample.age_s >= WARM_AGE_S]
    found = []
    young = [value(sample) for sample in warm if sample.at_s <= lasted_s / 4]
    late = [value(sample) for sample in warm if sample.at_s >= lasted_s * 3 / 4]
    if young and late:
        found.append((statistics.median(late) - statistics.median(young), statistics.median(young)))
    for life in {sample.life for sample in warm}:
        ages = sorted((sample.age_s, value(sample)) for sample in warm if sample.life == life)
        if ages[-1][0] - ages[0][0] >= LONG_LIFE_S:
            quarter = max(1, len(ages) // 4)
            before = statistics.median(v for _, v in ages[:quarter])
            found.append((statistics.median(v for _, v in ages[-quarter:]) - before, before))
    return max(found, key=lambda pair: pair[0] / max(pair[1], 1.0), default=None)


def _disk_figure(home: str, samples: Iterable[DiskSample], lasted_s: float) -> Figure:
    """Growth between the third and the last quarter of the soak."""
    third, last = list[float](), list[float]()
    for sample in samples:
        if sample.at_s >= lasted_s / 2:
            (last if sample.at_s >= lasted_s * 3 / 4 else third).append(sample.size_mb)
    pair = (statistics.median(last) - statistics.median(third), statistics.median(third)) if third and last else None
    return _judge(f"disk growth, {home}", pair, room=DISK_ROOM_MB, unit="MB", lasted_s=lasted_s)


def _judge(name: str, pair: tuple[float, float] | None, *, room: float, unit: str, lasted_s: float) -> Figure:
    if pair is None:
        missing = reported(name, float("nan"), unit=unit, anchor="too few samples")
        return missing if lasted_s < JUDGED_S else Figure(name, float("nan"), unit, "some samples", False, "no samples")
    grown, before = pair
    most, anchor = round(max(room, GROWTH_SHARE * before), 1), f"{before:.1f} {unit} before".replace("  ", " ")
    return at_most(name, grown, most, unit=unit, anchor=anchor)
