"""What the soak saw: samples of every process, of the disk, of the books. Impure in `look` alone.

Times are seconds since the swarm made its first version.
"""

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.soak.victims import Victim

MEGABYTE = 1 << 20
SLOT_PARTS = ("running", "queued", "in_round", "trained", "dropped", "filtered", "failed")
LEASE_PARTS = ("open", "filled", "expired", "returned")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one time; `life` names it, `kind` is `daemon`-like words such as `rollout compute`."""

    at_s: float
    kind: str
    life: tuple[int, float]
    age_s: float
    rss_mb: float
    num_files: int


@dataclass(frozen=True, slots=True)
class DiskSample:
    """Bytes in all files of one home, logs included."""

    at_s: float
    home: str
    size_mb: float
    num_files: int


@dataclass(slots=True)
class Ledger:
    """Everything that the verdict is made from."""

    processes: list[ProcessSample] = field(default_factory=list)
    disks: list[DiskSample] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    version_times: list[tuple[float, int]] = field(default_factory=list)
    num_statuses: int = 0
    num_absences: int = 0
    unbalanced: list[str] = field(default_factory=list)
    num_diverged: int = 0
    ended: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    def note_status(self, status: dict[str, Any] | None, *, at_s: float) -> None:
        """One answer of the status endpoint; None while the coordinator is away."""
        if status is None:
            self.num_absences += 1
            return
        self.num_statuses += 1
        self.unbalanced += [f"{at_s:.0f} s: {what}" for what in imbalances(status)]
        self.num_diverged = max(self.num_diverged, status["num_diverged"])
        if not self.version_times or status["version"] != self.version_times[-1][1]:
            self.version_times.append((at_s, status["version"]))

    def longest_stall_s(self, *, until_s: float) -> float:
        """The longest time between two versions, the one that goes on at `until_s` included."""
        times = [at_s for at_s, _ in self.version_times] + [until_s]
        return max((after - before for before, after in itertools.pairwise(times)), default=until_s)

    def look(self, victims: Sequence[Victim], homes: Sequence[Path], *, at_s: float, now_s: float) -> None:
        """A sample of each process and of each home; `now_s` is the time since 1970."""
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(victim.pid)
                kind = victim.kind if victim.is_member else f"{victim.owner} {victim.kind}"
                rss_mb, num_files = process.memory_info().rss / MEGABYTE, process.num_fds()
                life = (victim.pid, victim.created_s)
                self.processes.append(ProcessSample(at_s, kind, life, now_s - victim.created_s, rss_mb, num_files))
        for home in homes:
            size, num_files = size_of(home)
            self.disks.append(DiskSample(at_s, home.name, size / MEGABYTE, num_files))

    def write(self, path: Path) -> None:
        """Every sample, one JSON line each, for whoever wants to know more than the table says."""
        with path.open("w") as file:
            for sample in (*self.processes, *self.disks):
                file.write(json.dumps({"sample": type(sample).__name__, **asdict(sample)}) + "\n")


def imbalances(status: dict[str, Any]) -> list[str]:
    """Which of the two books do not add up."""
    books, leases = status["books"], status["leases"]
    found = []
    if books["issued"] != sum(books[part] for part in SLOT_PARTS):
        found.append(f"slots {books}")
    if leases["granted"] != sum(leases[part] for part in LEASE_PARTS):
        found.append(f"leases {leases}")
    return found


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder; one that vanishes meanwhile counts nothing."""
    size = count = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(parent, name)).st_size
                count += 1
    return size, count
