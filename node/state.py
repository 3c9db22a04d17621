"""What the daemon knows of itself and its run, shared by its tasks. One event loop; no locks, no I/O.

Writers change a field and call `changed`; readers that wait use `wait_changed`. Invariant: nothing here is
secret, so that all of it may stand in a status.
"""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from node.compute.messages import EngineRate
from protocol.ids import Digest, Version
from protocol.run import Role, RunSpec
from protocol.v1 import common_pb2

RATE_WINDOW_S = 20.0


@dataclass(frozen=True, slots=True)
class Capability:
    """What the node measured; rates in tokens per second."""

    decode_tokens_per_s: float
    train_tokens_per_s: float
    memory_bytes: int
    device: str

    def message(self, *, rtt_ms: float, reachable: bool) -> common_pb2.Capability:
        """The same for the wire, with what the network adds."""
        return common_pb2.Capability(
            decode_tokens_per_s=self.decode_tokens_per_s,
            train_tokens_per_s=self.train_tokens_per_s,
            memory_bytes=self.memory_bytes,
            device=self.device,
            rtt_ms=rtt_ms,
            reachable=reachable,
        )


class Rate:
    """Tokens per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, num_tokens: int, *, now_s: float) -> None:
        """So many tokens were finished now."""
        self.total += num_tokens
        self._samples.append((now_s, num_tokens))
        self._forget(now_s)

    def per_s(self, *, now_s: float) -> float:
        """The rate now."""
        self._forget(now_s)
        return sum(num_tokens for _, num_tokens in self._samples) / RATE_WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._samples and self._samples[0][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()


@dataclass(slots=True)
class NodeState:
    """The fields that several tasks read. `loaded` is what engine or trainer has in force, with its root; `starting` is
    what one that is not up yet starts from, which may be long out of date when it is. `num_seats` are the samples that
    the engine runs at a time; `restraint` says by how many steps it takes less than it could, after crashes. `k3` and
    `canary_difference` say how far the engine's log-probabilities are from the trainers', at its start and after the
    last load; None = not compared. `engine_choice` says why the engine is this one, `engine_rates` what was measured,
    `engine_start_s` how long it took to start.

    `paused` is the owner's word of the moment, `limited` what the standing limits say, `not_available` which of them
    cannot be looked after, `memory_trouble` that a job must end for the memory that it takes. `finishing` ends in the
    daemon's end, at `finish_by_s` (monotonic) at the latest. `resting` = no job runs because of all this."""

    spec: RunSpec | None = None
    role: Role = "idle"
    role_reason: str = "no role assigned yet"
    head: Version | None = None
    loaded: tuple[Version, Digest] | None = None
    starting: Version | None = None
    engine: str = ""
    engine_choice: str = ""
    engine_rates: tuple[EngineRate, ...] = ()
    engine_start_s: float | None = None
    num_seats: int = 0
    restraint: int = 0
    k3: float | None = None
    canary_difference: float | None = None
    endpoint: str = ""
    trainer_endpoint: str = ""
    activity: str = "starting"
    trouble: str = ""
    paused: str = ""
    limited: str = ""
    not_available: tuple[str, ...] = ()
    memory_trouble: str = ""
    finishing: bool = False
    finish_by_s: float | None = None
    resting: bool = False
    epoch: int = 0
    clock_offset_ms: int = 0
    capability: Capability | None = None
    rate: Rate = field(default_factory=Rate)
    counts: Counter[str] = field(default_factory=Counter)
    started_s: float = field(default_factory=time.monotonic)
    _ticks: int = 0
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def changed(self) -> None:
        """Wakes everyone who waits for a change."""
        self._ticks += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def ticks(self) -> int:
        """Counts the changes; hand it to `wait_changed` to miss none."""
        return self._ticks

    async def wait_changed(self, since: int, *, timeout_s: float | None = None) -> None:
        """Returns once there was a change after `since`, or after `timeout_s`."""
        if self._ticks != since:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait({waiter}, timeout=timeout_s)
        waiter.cancel()

    @property
    def unwilling(self) -> str:
        """Why the node takes no new work, by its owner's word; empty = it does."""
        if self.finishing:
            return "finishing, as its owner asked"
        reason = self.paused or self.limited
        return f"paused: {reason}" if reason else ""

    @property
    def acting_role(self) -> Role:
        """The role that the node follows now."""
        return "idle" if self.resting else self.role

    def drop_job(self) -> None:
        """The engine or trainer is gone."""
        self.loaded, self.starting, self.engine, self.trainer_endpoint, self.num_seats = None, None, "", "", 0
        self.k3, self.canary_difference = None, None
        self.changed()

    def now_ms(self) -> int:
        """The coordinator's clock, Unix milliseconds, as far as this node knows it."""
        return int(time.time() * 1000) + self.clock_offset_ms
