"""When a job that failed is started again, and how much less it may take then. Pure: time and chance are arguments.

After each crash of an engine the next one runs fewer samples, then with less memory; after too many failures in a
while the node stops trying for long, and says why. Invariant: a node in a crash loop makes at most `max_failures`
attempts in `window_s`, and one after each pause until one of them holds.
"""

from dataclasses import dataclass, replace
from typing import Self

from node.backoff import backoff_s

CRASHES = frozenset({"ENGINE", "INTERNAL", "MACHINE_UNFIT"})
"""Codes of failures that smaller limits may cure: an engine that died, hung, or found no memory."""
HOPELESS = frozenset({"MODEL_REFUSED"})
"""Codes of failures that another attempt will not cure."""
MAX_RESTRAINT = 4


@dataclass(frozen=True, slots=True)
class Attempt:
    """The next one: after `wait_s`, with `restraint` (0 = all that the machine gives); `pause` says why the node
    stopped trying, in a few words, and is empty where it did not."""

    wait_s: float
    restraint: int
    pause: str = ""


@dataclass(frozen=True, slots=True)
class Restarts:
    """What went wrong so far: (when, code), oldest first. `is_trial`: the attempt that runs is the one after a
    pause."""

    failures: tuple[tuple[float, str], ...] = ()
    is_trial: bool = False
    max_failures: int = 5
    window_s: float = 600.0
    healthy_s: float = 60.0
    pause_s: float = 900.0
    relax_s: float = 3600.0
    max_wait_s: float = 60.0

    def after_failure(self, code: str, *, ran_s: float, now_s: float, chance: float) -> tuple[Self, Attempt]:
        """The book with one more failure, of a job that had run for `ran_s`, and what to do."""
        kept = tuple(failure for failure in self.failures if failure[0] > now_s - self.relax_s)
        failures = (*kept, (now_s, code))[-100:]
        recent = [at_s for at_s, _ in failures if at_s > now_s - self.window_s]
        restraint = min(MAX_RESTRAINT, sum(code in CRASHES for _, code in failures))
        is_relapse = self.is_trial and ran_s < self.healthy_s
        if code in HOPELESS or is_relapse or len(recent) >= self.max_failures:
            why = f"{code} {len(recent)} times in {self.window_s / 60:.0f} min" if len(recent) > 1 else code
            return replace(self, failures=failures, is_trial=True), Attempt(self.pause_s, restraint, why)
        wait_s = backoff_s(len(recent), chance=chance, base_s=0.5, cap_s=self.max_wait_s)
        return replace(self, failures=failures, is_trial=False), Attempt(wait_s, restraint)


NO_FAILURES = Restarts()
