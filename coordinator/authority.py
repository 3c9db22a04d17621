"""The single writer: events go in through a queue, are decided by the core, and are answered once durable. Not pure.

Invariants: one task alone calls the core and the journal; nobody hears of a decision before its COMMIT; a failed
COMMIT (or a bug in the core) ends `run`, and with it the process, since memory and disk may differ. Refusals are
counted and never journaled.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from coordinator.core import events as e
from coordinator.core.effects import Effect
from coordinator.core.facts import RolloutAccepted, VersionCommitted
from coordinator.core.handle import Core, Decision
from coordinator.core.replies import Enrolment, Grant, Receipt, Reply
from coordinator.failpoints import failpoint
from coordinator.journal import Entry, Journal
from protocol.errors import HexcombError, JournalError
from protocol.ids import Digest, SlotKey, Version
from protocol.manifest import SignedManifest

MAX_BATCH = 512
BUSY_BATCH = 4
LINGER_S = 0.01
"""After a batch of so many events the next waits so long for company: a COMMIT costs about as much as ten events."""

REQUESTS_A_TURN = 16
"""After so many of a batch others have their turn. In each turn of the event loop gRPC learns of as little as one thing
that came over a connection, so long turns would make busy nodes seem silent."""

MAX_QUEUED = 1024
MAX_FRESH_BYTES = 32 << 20

Sealer = Callable[[VersionCommitted, Digest | None, int], SignedManifest]
"""(what was committed, digest of the manifest before, now in ms) -> the manifest, signed."""

Attachments = tuple[tuple[SlotKey, bytes], ...]
"""Bodies of the rollouts that an event hands in; kept if their slots are accepted."""


Wish = tuple[e.Event, Attachments]
Answer = Reply | HexcombError


@dataclass(frozen=True, slots=True)
class _Request:
    wishes: Sequence[Wish]
    answer: asyncio.Future[list[Answer]]


@dataclass(frozen=True, slots=True)
class _Outcome:
    request: _Request
    results: list[Decision | HexcombError]


class Authority:
    """`effects` holds what the shell must do, in order; its one reader must keep up. It has no limit: a start
    may ask for as much as the state holds before anybody reads. `refusals` counts by code."""

    def __init__(self, core: Core, journal: Journal, *, clock: Callable[[], int], sealer: Sealer) -> None:
        self.core = core
        self.effects: asyncio.Queue[Effect] = asyncio.Queue()
        self.refusals: Counter[str] = Counter()
        self._journal, self._clock, self._sealer = journal, clock, sealer
        self._requests: asyncio.Queue[_Request] = asyncio.Queue(MAX_QUEUED)
        self._under_way: list[_Request] = []
        self._end: JournalError | None = None
        self._fresh: dict[SlotKey, bytes] = {}
        self._num_fresh_bytes = 0
        newest = journal.reader.newest_manifest()
        self._previous: Digest | None = newest.digest if newest else None

    @overload
    async def submit(self, event: e.InviteRedeemed, attachments: Attachments = ()) -> Enrolment: ...
    @overload
    async def submit(self, event: e.WorkRequested, attachments: Attachments = ()) -> Grant: ...
    @overload
    async def submit(self, event: e.RolloutSubmitted, attachments: Attachments = ()) -> Receipt: ...
    @overload
    async def submit(self, event: e.Event, attachments: Attachments = ()) -> Reply: ...
    async def submit(self, event: e.Event, attachments: Attachments = ()) -> Reply:
        """The core's answer, once what it decided is durable. Raises the refusal, or `JournalError` if the authority
        has ended. A caller that gives up waiting does not undo the event."""
        (answer,) = await self.submit_all([(event, attachments)])
        if isinstance(answer, HexcombError):
            raise answer
        return answer

    async def submit_all(self, wishes: Sequence[Wish]) -> list[Answer]:
        """The core's answers to several events, in order; a refusal is one of them. They are decided one after the
        other and are durable together. Raises `JournalError` if the authority has ended."""
        if self._end is not None:
            raise self._end
        if not wishes:
            return []
        answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        await self._requests.put(_Request(wishes, answer))
        if self._end is not None:  # it ended while this waited for room, and nobody empties the queue any more
            raise self._end
        return await answer

    async def run(self) -> None:
        """Serves the queue until cancelled; raises when a decision could not be made durable."""
        try:
            num_before = 0
            while True:
                self._under_way = [await self._requests.get()]
                if num_before >= BUSY_BATCH and self._requests.qsize() < MAX_BATCH:
                    await asyncio.sleep(LINGER_S)
                num_before = len(self._under_way[0].wishes)
                while num_before < MAX_BATCH and not self._requests.empty():
                    self._under_way.append(self._requests.get_nowait())
                    num_before += len(self._under_way[-1].wishes)
                await self._serve()
        finally:
            self._fail_waiting()

    async def manifest(self, version: Version) -> SignedManifest | None:
        """A committed version's manifest, as signed."""
        return await asyncio.to_thread(self._journal.reader.manifest, version)

    async def rollout_bodies(self, slots: Sequence[SlotKey]) -> list[bytes]:
        """What was handed in for accepted slots, in order: ask for a few at a time. Raises `JournalError` if one is no
        longer kept. What is not at hand is read here and not in a thread, which would wait for the interpreter's lock
        after every row, and that for long beside a busy loop."""
        known = {slot: body for slot in slots if (body := self._fresh.pop(slot, None)) is not None}
        self._num_fresh_bytes -= sum(map(len, known.values()))
        others = [slot for slot in slots if slot not in known]
        if others:
            await asyncio.sleep(0)
            known.update(zip(others, self._journal.reader.rollout_bodies(others), strict=True))
        return [known[slot] for slot in slots]

    async def _serve(self) -> None:
        outcomes: list[_Outcome] = []
        entries: list[Entry] = []
        for number, request in enumerate(self._under_way, start=1):
            results = [self._decide(event, attachments, entries) for event, attachments in request.wishes]
            outcomes.append(_Outcome(request, results))
            if number % REQUESTS_A_TURN == 0:
                await asyncio.sleep(0)
        if entries:
            failpoint("authority.before_append")
            self._journal.stage(entries, state=self.core.state)
            await asyncio.to_thread(self._journal.commit, entries, state=self.core.state)
            failpoint("authority.before_reply")
            self._remember(entries)
        self._under_way = []
        for outcome in outcomes:
            self._publish(outcome)

    def _decide(self, event: e.Event, attachments: Attachments, entries: list[Entry]) -> Decision | HexcombError:
        now_ms = self._clock()
        failpoint("authority.before_decide")
        try:
            decision = self.core.handle(event, now_ms)
        except HexcombError as refusal:
            self.refusals[refusal.code] += 1
            return refusal
        if decision.facts:
            entries.append(self._entry(decision, attachments, now_ms))
        return decision

    def _remember(self, entries: Sequence[Entry]) -> None:
        """Keeps new bodies for their first reader, the grader, which asks soon."""
        for entry in entries:
            for slot, body in entry.bodies:
                self._fresh[slot] = body
                self._num_fresh_bytes += len(body)
        while self._num_fresh_bytes > MAX_FRESH_BYTES:
            self._num_fresh_bytes -= len(self._fresh.pop(next(iter(self._fresh))))

    def _entry(self, decision: Decision, attachments: Attachments, now_ms: int) -> Entry:
        bodies: Attachments = ()
        if attachments:
            accepted = [fact.slot for fact in decision.facts if isinstance(fact, RolloutAccepted)]
            bodies = tuple((slot, body) for slot, body in attachments if slot in accepted)
        manifests: list[tuple[Version, SignedManifest]] = []
        for fact in decision.facts:
            if isinstance(fact, VersionCommitted):
                signed = self._sealer(fact, self._previous, now_ms)
                self._previous = signed.digest
                manifests.append((fact.version, signed))
        return Entry(now_ms, decision.facts, bodies, tuple(manifests))

    def _publish(self, outcome: _Outcome) -> None:
        answers: list[Answer] = []
        for result in outcome.results:
            if isinstance(result, Decision):
                for effect in result.effects:
                    self.effects.put_nowait(effect)
                answers.append(result.reply)
            else:
                answers.append(result)
        if not outcome.request.answer.done():
            outcome.request.answer.set_result(answers)

    def _fail_waiting(self) -> None:
        self._end = JournalError(
            "the coordinator takes no more events",
            why="it is stopping, or its journal could not be written",
            remedy="Try again when it is back.",
        )
        waiting = [*self._under_way, *(self._requests.get_nowait() for _ in range(self._requests.qsize()))]
        for request in waiting:
            if not request.answer.done():
                request.answer.set_exception(self._end)
