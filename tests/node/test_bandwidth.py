"""The token bucket, on a clock of its own; `tests/weights/test_limited.py` measures it on loopback."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.bandwidth import BURST_S, Throttle, TokenBucket

RATE = 1000.0


class Clock:
    """Time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 5)), min_size=1, max_size=50))
def test_never_more_than_rate_and_burst(steps: list[tuple[int, float]]) -> None:
    bucket, now_s, passed, begun_s = TokenBucket(RATE), 0.0, 0, 0.0
    for num_bytes, pause_s in steps:
        now_s += pause_s
        now_s += bucket.take(num_bytes, now_s=now_s)
        passed += num_bytes
        assert passed <= RATE * (now_s - begun_s) + RATE * BURST_S + 1e-6


async def test_throttle_takes_the_time_that_the_rate_asks_for() -> None:
    clock = Clock()
    throttle = Throttle(8.0, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        await throttle.pass_on(100_000)
    assert clock.now_s == pytest.approx(10.0, rel=0.02)


async def test_without_a_limit_nothing_waits() -> None:
    """The negative control of the test above: a throttle that is ignored takes no time."""
    clock = Clock()
    throttle = Throttle(0.0, clock=clock, sleep=clock.sleep)
    await throttle.pass_on(10**9)
    assert clock.now_s == 0.0
    assert not throttle.is_limited


async def test_those_who_share_a_throttle_share_its_rate() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    throttle = Throttle(8.0, clock=lambda: 0.0, sleep=sleep)
    await asyncio.gather(*(throttle.pass_on(500_000) for _ in range(4)))
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0])


async def test_a_pause_earns_a_short_burst_and_no_more() -> None:
    bucket = TokenBucket(RATE)
    bucket.take(1, now_s=0.0)
    assert bucket.take(100, now_s=3600.0) == 0.0
    assert bucket.take(1000, now_s=3600.0) == pytest.approx(1.0)
