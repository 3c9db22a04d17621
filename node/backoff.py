"""How long to wait before the next attempt, and when to stop trying. Pure: chance is an argument."""

from dataclasses import dataclass


def backoff_s(attempt: int, *, chance: float, base_s: float = 0.25, cap_s: float = 15.0) -> float:
    """Seconds before attempt number `attempt + 1` (0 = after the first failure): doubled each time up to `cap_s`, of
    which `chance` in [0, 1) takes up to one half away, so that nodes do not come back together."""
    full_s = min(cap_s, base_s * 2.0 ** min(attempt, 32))
    return full_s * (1.0 - chance / 2.0)


@dataclass(frozen=True, slots=True)
class Breaker:
    """Counts failures in a row; one that follows `healthy_s` of good running counts as the first."""

    num_failures: int = 0
    healthy_s: float = 60.0
    max_failures: int = 5

    def after_failure(self, *, ran_s: float) -> "Breaker":
        """The breaker after something died that had run for `ran_s`."""
        num_failures = 1 if ran_s >= self.healthy_s else self.num_failures + 1
        return Breaker(num_failures, self.healthy_s, self.max_failures)

    @property
    def is_open(self) -> bool:
        """Whether it died too often: the next attempts come at the longest interval alone."""
        return self.num_failures >= self.max_failures
