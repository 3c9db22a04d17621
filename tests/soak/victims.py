"""Which processes a swarm on this machine consists of, and which one is to suffer next. Impure: looks at processes.

Victims are drawn from a shuffled deck of kinds, so that every kind has its turn soon, whatever the luck.
"""

import contextlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from coordinator.demo import Swarm

CHILDREN = {
    "node.compute.worker": "compute",
    "node.directory.worker": "directory",
    "coordinator.grader_worker": "grader",
    "p2pd": "p2pd",
}
"""The word of a command line by which each is known."""
KINDS = ("rollout daemon", "trainer daemon", "coordinator", "compute", "directory", "p2pd", "grader")
STOP_SHARE = 0.2
STOP_S = (5.0, 20.0)


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the swarm. `member` is the daemon or coordinator that it is or belongs to; `pid` and `created_s`
    together name it once and for all."""

    kind: str
    member: str
    pid: int
    created_s: float

    @property
    def is_member(self) -> bool:
        """Whether it is the daemon or the coordinator itself, which nobody but the soak starts again."""
        return self.kind in KINDS[:3]

    @property
    def owner(self) -> str:
        """`coordinator`, `trainer` or `rollout`."""
        return self.member.partition("-")[0]


@dataclass(slots=True)
class Deck:
    """Draws kinds and victims from `chance`."""

    chance: random.Random
    _kinds: list[str] = field(default_factory=list)

    def draw(self, victims: Sequence[Victim]) -> Victim | None:
        """The next to suffer; None if no process of the kind whose turn it is lives now."""
        if not self._kinds:
            self._kinds = self.chance.sample(KINDS, len(KINDS))
        kind = self._kinds.pop()
        found = sorted((victim for victim in victims if victim.kind == kind), key=lambda v: (v.member, v.pid))
        return self.chance.choice(found) if found else None

    def stop_s(self) -> float:
        """Seconds that the victim stands still, 0 for one that is killed."""
        return self.chance.uniform(*STOP_S) if self.chance.random() < STOP_SHARE else 0.0


def processes_of(swarm: Swarm) -> list[Victim]:
    """Every daemon, coordinator and child of theirs that lives now."""
    found: list[Victim] = []
    for name, member in swarm.members.items():
        with contextlib.suppress(psutil.Error):
            daemon = psutil.Process(member.process.pid)
            kind = name if name == "coordinator" else f"{name.partition('-')[0]} daemon"
            if daemon.status() != psutil.STATUS_ZOMBIE:
                found.append(Victim(kind, name, daemon.pid, daemon.create_time()))
            found += _children_of(name, daemon.children(recursive=True))
    return found


def _children_of(name: str, children: Iterable[psutil.Process]) -> list[Victim]:
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            words = [word.rpartition("/")[2] for word in child.cmdline()]
            kind = next((CHILDREN[word] for word in words if word in CHILDREN), None)
            if kind is not None:
                found.append(Victim(kind, name, child.pid, child.create_time()))
    return found


def family_of(pid: int) -> list[psutil.Process]:
    """The process and all that it started, guards included."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
