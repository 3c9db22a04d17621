"""The nodes of a simulated swarm: engines that decode in virtual time, and trainers.

Cost model: one token of each of `n` running samples takes `base_s + n * per_sequence_s`; training takes tokens / rate;
a new version stops an engine, and a trainer, for `pause_s`, in which the prefixes of running samples are computed anew.
A node keeps its seats taken and asks ahead by the product's own rule (`node.planner.wanted_outstanding`).
"""

import contextlib
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coordinator.core import events as e
from coordinator.core.replies import Grant, Receipt, Reply
from node.backoff import backoff_s
from node.rollouts import MAX_NO_WORK_S
from protocol.errors import HexcombError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version

if TYPE_CHECKING:
    from tests.bench.simulator import Swarm

Segments = tuple[tuple[Version, int], ...]

EPSILON = 1e-6
"""Tokens by which a sample counts as finished early, since progress is a sum of floats."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How one rollout node decodes, and how far it is from the coordinator. It asks for `lease_slots` or more at a
    time. `loss` is the share of samples that vanish on it, somewhere in their length; it says so at once (a fault)
    if `is_honest`, else never. What others sampled of a slot is computed anew, `prefill` tokens in the time of one."""

    seats: int = 64
    base_s: float = 0.012
    per_sequence_s: float = 0.00012
    pause_s: float = 3.0
    rtt_s: float = 0.1
    lease_slots: int = 8
    loss: float = 0.0
    is_honest: bool = False
    updates: bool = True
    prefill: float = 20.0

    def step_s(self, num_running: int) -> float:
        """Seconds for one token of each running sample."""
        return self.base_s + num_running * self.per_sequence_s

    @property
    def tokens_per_s(self) -> float:
        """With every seat taken."""
        return self.seats / self.step_s(self.seats)


@dataclass(slots=True)
class Job:
    """A slot on a node: `length` tokens in all, of which `prefix` was sampled elsewhere. `start` and `end` are in the
    node's progress; it vanishes at `end` if `is_lost`."""

    lease_id: LeaseId
    slot: SlotKey
    length: int
    prefix: Segments = ()
    edge: Digest | None = None
    start: float = 0.0
    end: float = 0.0
    is_lost: bool = False


class Trainer:
    """A node that trains."""

    def __init__(self, swarm: "Swarm", peer_id: PeerId, tokens_per_s: float, pause_s: float) -> None:
        self._swarm, self._peer_id, self._pause_s, self.tokens_per_s = swarm, peer_id, pause_s, tokens_per_s
        self._loaded = Version(-1)

    @property
    def capability(self) -> e.Capability:
        """What it says of itself."""
        return e.Capability(0.0, self.tokens_per_s, 1, "simulated")

    def on_version(self) -> None:
        """Loads the head; the base is there from the start."""
        self._swarm.clock.after(self._pause_s if self._loaded >= 0 else 0.0, self._load)

    def beat(self) -> None:
        """A sign of life."""
        self._swarm.see(self._peer_id, self._loaded, trainer_endpoint=f"{self._peer_id}:1")

    def _load(self) -> None:
        self._loaded = self._swarm.head
        self.beat()


class RolloutNode:
    """A node that generates. `_progress` counts the tokens that each sample running since the start would have; with
    `_marks`, the progress at which each version was loaded, it tells the versions of any sample's tokens."""

    def __init__(self, swarm: "Swarm", peer_id: PeerId, engine: Engine) -> None:
        self._swarm, self._peer_id, self.engine = swarm, peer_id, engine
        self._queue: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        self._marks: list[tuple[float, Version]] = []
        self._progress = self._at_s = 0.0
        self._loaded, self._is_paused = Version(-1), False
        self._num_asked = self._num_no_work = self._wake_id = 0
        self._no_work_until_s = 0.0
        self.busy_s = self.seat_s = self.num_sampled = 0.0
        self.num_tokens = self.num_filled = self.num_finished = self.num_lost = self.num_granted = 0

    @property
    def capability(self) -> e.Capability:
        """What it says of itself."""
        return e.Capability(self.engine.tokens_per_s, 0.0, 1, "simulated", rtt_ms=self.engine.rtt_s * 1000)

    @property
    def num_outstanding(self) -> int:
        """Slots that it holds."""
        return len(self._queue) + len(self._running)

    def beat(self) -> None:
        """A sign of life."""
        self._swarm.see(self._peer_id, self._loaded)

    def on_version(self) -> None:
        """The head changed: loads it at once, or once all that was begun is finished."""
        if self._loaded < 0:
            self._load()
            return
        self._no_work_until_s, self._num_no_work = 0.0, 0
        self._swarm.clock.after(self.engine.rtt_s / 2, self._wake)

    def cancel(self, is_over: Callable[[Job], bool]) -> None:
        """The coordinator no longer wants some slots."""
        self._advance()
        self._queue = deque(job for job in self._queue if not is_over(job))
        self._running = [one for one in self._running if not is_over(one[2])]
        heapq.heapify(self._running)
        self._swarm.clock.after(0.0, self._wake)

    def pieces(self, *, of_all: bool) -> list[e.SlotProgress]:
        """How far the running slots have come; of one slot of each lease, or of all."""
        self._advance()
        found: dict[object, e.SlotProgress] = {}
        for _, _, job in self._running:
            key = job.slot if of_all else job.lease_id
            if key not in found and (segments := self._segments(job, min(self._progress, job.end))):
                edge = Digest(f"{job.slot.task.index}/{job.slot.sample} at {self._progress}")
                found[key] = e.SlotProgress(self._peer_id, job.lease_id, job.slot, segments, edge)
        return list(found.values())

    def _advance(self) -> None:
        elapsed_s, num_running = self._swarm.clock.now_s - self._at_s, len(self._running)
        self._at_s = self._swarm.clock.now_s
        if num_running and not self._is_paused:
            self._progress += elapsed_s / self.engine.step_s(num_running)
            self.busy_s += elapsed_s
            self.seat_s += elapsed_s * num_running

    def _wake(self) -> None:
        """Does all that can be done now, and is called again when the next sample ends."""
        self._advance()
        while self._running and self._running[0][0] <= self._progress + EPSILON:
            self._finish(heapq.heappop(self._running)[2])
        self._follow_head()
        self._take_seats()
        self._ask()
        self._wake_id += 1
        if self._running and not self._is_paused:
            left_s = (self._running[0][0] - self._progress) * self.engine.step_s(len(self._running))
            self._swarm.clock.after(max(0.0, left_s), partial(self._wake_if, self._wake_id))

    def _wake_if(self, wake_id: int) -> None:
        if wake_id == self._wake_id:
            self._wake()

    def _follow_head(self) -> None:
        is_held = not self._swarm.rules.spec.interrupt and self.num_outstanding > 0
        if self._is_paused or self._loaded == self._swarm.head or is_held or not self.engine.updates:
            return
        self._is_paused = True
        self._swarm.clock.after(self.engine.pause_s, self._load)

    def _load(self) -> None:
        self._advance()
        self._is_paused, self._loaded = False, self._swarm.head
        self._marks.append((self._progress, self._loaded))
        self.beat()
        self._wake()

    def _take_seats(self) -> None:
        while self._queue and len(self._running) < self.engine.seats and not self._is_paused:
            job = self._queue.popleft()
            num_given = sum(length for _, length in job.prefix)
            job.start = self._progress + num_given / self.engine.prefill
            job.end = job.start + max(1, job.length - num_given)
            if self._swarm.random.random() < self.engine.loss:
                job.is_lost, job.end = True, job.start + self._swarm.random.random() * (job.end - job.start)
            heapq.heappush(self._running, (job.end, next(self._swarm.ties), job))

    def _segments(self, job: Job, progress: float) -> Segments:
        """All tokens of a job up to some progress, by version."""
        segments, num_own = list(job.prefix), 0
        first = bisect_right(self._marks, job.start, key=lambda mark: mark[0]) - 1
        for index in range(first, len(self._marks)):
            at, version = self._marks[index]
            if at >= progress and index > first:
                break
            end = self._marks[index + 1][0] if index + 1 < len(self._marks) else progress
            num_tokens = max(0, int(min(end, progress) - job.start + EPSILON)) - num_own
            num_own += num_tokens
            if segments and segments[-1][0] == version:
                segments[-1] = (version, segments[-1][1] + num_tokens)
            elif num_tokens:
                segments.append((version, num_tokens))
        return tuple(segments)

    def _finish(self, job: Job) -> None:
        half_s = self.engine.rtt_s / 2
        self.num_finished += 1
        self.num_sampled += job.end - job.start
        if not job.is_lost:
            segments = self._segments(job, job.end)
            self._swarm.clock.after(half_s, lambda: self._hand_in(job, segments))
            return
        self.num_lost += 1
        if self.engine.is_honest:
            self._swarm.clock.after(half_s, lambda: self._give_back(job.lease_id))

    def _hand_in(self, job: Job, segments: Segments) -> None:
        edges = (job.edge,) if job.edge else ()
        digest = Digest(f"{job.slot} by {self._peer_id} under {job.lease_id}")
        try:
            event = e.RolloutSubmitted(self._peer_id, job.lease_id, job.slot, digest, segments, edges)
            receipt = self._swarm.tell(event)
        except HexcombError:
            return
        if isinstance(receipt, Receipt) and receipt.outcome == "ACCEPTED":
            self._swarm.note_accepted(job.slot, segments)
            self.num_filled += 1
            self.num_tokens += sum(length for _, length in segments)

    def _give_back(self, lease_id: LeaseId) -> None:
        self.cancel(lambda job: job.lease_id == lease_id)
        with contextlib.suppress(HexcombError):
            self._swarm.tell(e.LeaseReturned(self._peer_id, lease_id, "it failed", is_fault=True))

    def _ask(self) -> None:
        """Keeps every seat taken, and so many leases more that none falls empty while a request is on its way."""
        is_held = not self._swarm.rules.spec.interrupt and self._loaded != self._swarm.head
        if self._swarm.clock.now_s < self._no_work_until_s or is_held:
            return
        engine = self.engine
        service_s = self.busy_s / self.num_finished * engine.lease_slots if self.num_finished else None
        num_ahead = self._swarm.num_leases(rtt_s=engine.rtt_s, service_s=service_s) - 1
        num_slots = engine.seats + num_ahead * engine.lease_slots - self.num_outstanding - self._num_asked
        if num_slots >= engine.lease_slots:
            self._num_asked += num_slots
            version = self._loaded
            self._swarm.clock.after(engine.rtt_s / 2, lambda: self._request(version, num_slots))

    def _request(self, version: Version, num_slots: int) -> None:
        swarm, grant = self._swarm, None
        root = swarm.core.state.roots.get(version, Digest(""))
        with contextlib.suppress(HexcombError):
            grant = swarm.tell(e.WorkRequested(self._peer_id, version, root, num_slots, swarm.new_lease_id()))
        swarm.clock.after(self.engine.rtt_s / 2, lambda: self._receive(grant, num_slots))

    def _receive(self, grant: Reply, num_slots: int) -> None:
        swarm = self._swarm
        self._num_asked -= num_slots
        if isinstance(grant, Grant):
            self._num_no_work = 0
            self.num_granted += len(grant.slots)
            self._queue += swarm.take(grant)
        else:
            wait_s = backoff_s(self._num_no_work, chance=swarm.random.random(), cap_s=MAX_NO_WORK_S)
            self._num_no_work += 1
            self._no_work_until_s = swarm.clock.now_s + wait_s
            swarm.clock.after(wait_s, self._wake)
        self._wake()
