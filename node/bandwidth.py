"""How fast weights may leave and come: a token bucket, and the waiting that it asks for. The bucket is pure.

Invariant: over any time t no more than `rate * t + burst` bytes pass. What is taken may run the bucket into debt, which
the next callers wait for, so that a message larger than the burst passes too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BURST_S = 0.1
"""So much of a second's bytes may pass at once after a pause."""
BITS_A_BYTE = 8


@dataclass(slots=True)
class TokenBucket:
    """Bytes that may pass now; negative while more have passed than were allowed."""

    bytes_per_s: float
    level: float = 0.0
    filled_s: float | None = None

    def take(self, num_bytes: int, *, now_s: float) -> float:
        """Takes the bytes and returns the seconds to wait before they may pass."""
        passed_s = 0.0 if self.filled_s is None else max(0.0, now_s - self.filled_s)
        self.level = min(self.level + passed_s * self.bytes_per_s, self.bytes_per_s * BURST_S) - num_bytes
        self.filled_s = now_s
        return max(0.0, -self.level / self.bytes_per_s)


class Throttle:
    """Waits as a bucket says; all who share one share its rate, in the order in which they come. 0 = no limit."""

    def __init__(
        self,
        mbit_per_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.bytes_per_s = mbit_per_s * 1e6 / BITS_A_BYTE
        self._bucket = TokenBucket(self.bytes_per_s) if mbit_per_s > 0 else None
        self._clock, self._sleep = clock, sleep

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._bucket is not None

    async def pass_on(self, num_bytes: int) -> None:
        """Returns once the bytes may pass."""
        if self._bucket is None:
            return
        wait_s = self._bucket.take(num_bytes, now_s=self._clock())
        if wait_s > 0:
            await self._sleep(wait_s)
