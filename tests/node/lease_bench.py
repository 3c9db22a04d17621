"""A lease on a bench: a child that generates at once or slowly, and a coordinator that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from node.compute.messages import Done, Generate, MakePrompts, Prompts, SlotFilled, StopSlots
from node.home import Home
from node.leases import LeaseWork
from node.orders import Lease, PiecesReceived, Receipt, SlotWork
from node.pieces import PieceSender, SlotProgress
from node.settings import NodeSettings
from node.state import NodeState
from protocol.errors import HexcombError
from protocol.ids import LeaseId, SlotKey, TaskKey, Version
from protocol.keys import Identity, peer_id_of
from protocol.rollout import Piece, Rollout, sign_piece
from protocol.tasks import prompt_digest
from tests.node.fakes import RUN_ID, SPEC

SECRET = bytes(32)
PROMPTS = {7: (3, 4, 5), 8: (6,)}


def slot(index: int, sample: int = 0) -> SlotKey:
    return SlotKey(Version(2), TaskKey("chain_sum", 1, index), sample)


def work(index: int, sample: int = 0, *, given: tuple[int, ...] = (), digest: str | None = None) -> SlotWork:
    right = prompt_digest(PROMPTS[index])
    return SlotWork(slot(index, sample), cast(Any, digest or right), given)


def with_pieces(work: SlotWork, *pieces: tuple[int, int, tuple[int, ...]]) -> SlotWork:
    """With what another node sampled of it, as (version, start, ids)."""
    other = Identity.from_seed(b"o" * 32)
    name = peer_id_of(other.public_bytes)
    made = (Piece(name, Version(version), start, ids, (-0.1,) * len(ids)) for version, start, ids in pieces)
    signed = tuple(sign_piece(other, run_id=RUN_ID, slot=work.slot, piece=piece) for piece in made)
    return replace(work, pieces=signed)


class Child:
    """Generates at once: token 2 and then the stop id, the first under v1, the second under v2."""

    def __init__(self, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        self.made, self.is_closed, self.generated = made, False, list[Generate]()
        self.finish_reason, self.failure = "stop", cast("HexcombError | None", None)
        self.deliver: Callable[[SlotFilled], None] = lambda _: None
        self.stopped: list[StopSlots] = []

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        if isinstance(body, MakePrompts):
            if isinstance(self.made, HexcombError):
                raise self.made
            return Prompts(tuple(self.made[index] for _, _, index in body.tasks))
        if isinstance(body, StopSlots):
            self.stopped.append(body)
            for name in body.slots:
                self.deliver(SlotFilled(body.lease_id, name, (), (), (), "abort"))
            return Done()
        self.generated.append(body)
        await self.sample(body)
        return Done()

    async def sample(self, body: Generate) -> None:
        for order in body.orders:
            if self.failure is not None:
                raise self.failure
            self.finish(body.lease_id, order.slot)

    def finish(self, lease_id: str, name: str) -> None:
        segments = ((1, 1), (2, 1))
        self.deliver(SlotFilled(lease_id, name, (2, 1), (-0.5, -0.25), segments, self.finish_reason))


class SlowChild(Child):
    """Generates until it is told to `finish` the last slot."""

    def __init__(self, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        super().__init__(made)
        self.begun, self.running = asyncio.Event(), set[str]()
        self.news = asyncio.Event()

    async def sample(self, body: Generate) -> None:
        self.running = {order.slot for order in body.orders}
        self.begun.set()
        while self.running:
            await self.news.wait()
            self.news.clear()

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        done = await super().request(body, reply, deadline_s=deadline_s)
        if isinstance(body, StopSlots):
            self.running -= {*body.slots}
            self.news.set()
        return done

    def finish(self, lease_id: str, name: str) -> None:
        super().finish(lease_id, name)
        self.running.discard(name)
        self.news.set()


class Coordinator:
    """Takes rollouts; `troubles` are raised first, one a call."""

    def __init__(self) -> None:
        self.troubles: list[HexcombError] = []
        self.taken: list[Rollout] = []
        self.calls: list[list[SlotKey]] = []
        self.returned: list[tuple[str, bool]] = []
        self.reasons: list[str] = []
        self.outcome = "ACCEPTED"

    async def submit(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        if self.troubles:
            raise self.troubles.pop(0)
        self.taken += rollouts
        self.calls.append([rollout.slot for rollout in rollouts])
        return [Receipt(rollout.slot, self.outcome, "") for rollout in rollouts]

    async def return_lease(self, lease_id: LeaseId, *, reason: str, is_fault: bool = False) -> None:
        self.returned.append((lease_id, is_fault))
        self.reasons.append(reason)


class Bench:
    """A lease with what is around it."""

    def __init__(
        self,
        home: Home,
        *works: SlotWork,
        made: dict[int, tuple[int, ...]] | HexcombError = PROMPTS,
        child: Child | None = None,
        remaining_s: float = 30.0,
    ) -> None:
        self.child, self.coordinator = child or Child(made), Coordinator()
        self.progress: list[SlotProgress] = []
        self.num_generated = 0
        manifest = SimpleNamespace(seal=SimpleNamespace(secret=SECRET))
        self.node = SimpleNamespace(
            home=home,
            peer_id=home.peer_id,
            run_id=RUN_ID,
            control=self.coordinator,
            state=NodeState(),
            spec=SPEC,
            versions=SimpleNamespace(manifest=lambda _: manifest),
            settings=NodeSettings(),
        )
        lease = Lease(LeaseId("ff"), works, remaining_s)
        counts = self.node.state.counts
        self.sender = PieceSender(self.receive, 0.01, counts, lambda *_: None, lambda *_: None)
        self.lease = LeaseWork(cast(Any, self.node), cast(Any, self.child), lease, self.sender, self.note_generated)
        self.child.deliver = self.lease.filled.put_nowait

    async def receive(self, progress: Sequence[SlotProgress]) -> PiecesReceived:
        self.progress += progress
        return PiecesReceived()

    def note_generated(self) -> None:
        self.num_generated += 1

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.lease.run()

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[SlowChild]:
        """While the child generates; the lease must be done soon after."""
        child = cast(SlowChild, self.child)
        task = asyncio.create_task(self.run())
        async with asyncio.timeout(20):
            await child.begun.wait()
            yield child
            await task
