"""The round that a trainer takes part in, as its own service and its own tasks see it. Impure: asyncio's
futures.

Invariants: only members of the plan bring parts or fetch results; a part counts once; a round that failed
answers everybody who asks with the same error, suspects included, so that nobody blames the messenger; one
round is open at a time, and a later plan closes the one before.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from node.training.optimizer import Vector
from node.training.shards import Average, PartIntake, ShardState, round_order
from protocol.errors import NotEnrolledError, NoWorkError, PartRefusedError, RoundStaleError
from protocol.ids import PeerId, RoundId
from protocol.round import RoundPlan

PLAN_WAIT_S = 60.0
MAX_WAITING = 64

T = TypeVar("T")


def blame(round_id: RoundId, suspects: Iterable[PeerId], what: str) -> RoundStaleError:
    """The error of a round that cannot be finished; `why` carries the suspects for machines."""
    return RoundStaleError(f"round {round_id} failed: {what}", why=",".join(sorted(set(suspects))))


def suspects_of(error: RoundStaleError, plan: RoundPlan) -> tuple[PeerId, ...]:
    """The members that the error names; what is not a member of the plan is dropped."""
    members = {member.peer_id for member in plan.members}
    return tuple(PeerId(name) for name in error.why.split(",") if name in members)


class OpenRound:
    """One round here: parts that came for this trainer's shards, and what became of them."""

    def __init__(self, plan: RoundPlan, *, me: PeerId, deadline: float) -> None:
        """`deadline` is a time of the running event loop's clock."""
        loop = asyncio.get_running_loop()
        self.plan, self.me, self.deadline = plan, me, deadline
        self.members = {member.peer_id: member for member in plan.members}
        self.owned = [index for index, shard in enumerate(plan.shards) if shard.owner == me]
        self.averages: dict[int, asyncio.Future[Average]] = {i: loop.create_future() for i in self.owned}
        self.states: dict[int, asyncio.Future[ShardState]] = {i: loop.create_future() for i in self.owned}
        self._parts: dict[int, dict[PeerId, asyncio.Future[Vector]]] = {
            i: {member: loop.create_future() for member in self.members} for i in self.owned
        }
        self._intakes: dict[tuple[int, PeerId], PartIntake] = {}
        self.failure: RoundStaleError | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds until the round's deadline."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    def fail(self, error: RoundStaleError) -> None:
        """Ends the round here: whoever waits for it, or asks later, gets this error. The first one stays."""
        if self.failure is not None:
            return
        self.failure = error
        parts = [future for of_shard in self._parts.values() for future in of_shard.values()]
        waited_for: list[asyncio.Future[Any]] = [*self.averages.values(), *self.states.values(), *parts]
        for future in waited_for:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits
        self._parts.clear()
        self._intakes.clear()

    def check_member(self, peer_id: PeerId) -> None:
        """Raises `NotEnrolledError` unless the peer is a member of the plan, and the round's error if it
        failed.
        """
        if peer_id not in self.members:
            raise NotEnrolledError(f"{peer_id} is no member of round {self.plan.round_id}")
        if self.failure is not None:
            raise self.failure

    def claim(self, shard: int, sender: PeerId) -> PartIntake:
        """An empty part to fill, in place of one of the same sender that is still on its way.

        Raises `PartConflictError` if the part is here already.
        """
        self.check_member(sender)
        if shard not in self.averages:
            raise PartRefusedError(f"a part of {sender} was refused", why=f"shard {shard} is not owned here")
        key = (shard, sender)
        if key in self._intakes:
            self._intakes[key].supersede()
        bounds = self.plan.shards[shard]
        self._intakes[key] = PartIntake(bounds.stop - bounds.start, self.plan.wire, sender=sender)
        return self._intakes[key]

    def deliver(self, shard: int, sender: PeerId, part_S: Vector) -> None:
        """The whole part of a member, which has claimed its place."""
        self.check_member(sender)
        self._parts[shard][sender].set_result(part_S)

    async def collect(self, shard: int, *, until: float) -> list[Vector]:
        """The parts of all members in the plan's order, handed over: nothing of them stays here.

        Raises the round's error if it fails meanwhile, and one that names who is missing at `until`.
        """
        futures = self._parts[shard]
        try:
            async with asyncio.timeout_at(until):
                await asyncio.wait(futures.values(), return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            missing = [peer_id for peer_id, future in futures.items() if not future.done()]
            raise blame(self.plan.round_id, missing, "a part did not come in time") from None
        parts = [future.result() for future in futures.values()]
        self._parts.pop(shard, None)
        return parts


async def settled(future: asyncio.Future[T], *, until: float) -> T:
    """The future's value, whoever else waits for it. Raises `TimeoutError` at `until`."""
    async with asyncio.timeout_at(until):
        return await asyncio.shield(future)


class RoundBook:
    """Which round is open, for calls that may come before or after the plan."""

    def __init__(self) -> None:
        self.current: OpenRound | None = None
        self._changed = asyncio.Condition()
        self._num_waiting = 0

    async def open(self, opened: OpenRound) -> None:
        """Makes a round the current one and ends the one before; calls that came early go on."""
        self.close(f"round {opened.plan.round_id} has taken its place")
        self.current = opened
        async with self._changed:
            self._changed.notify_all()

    def close(self, what: str) -> None:
        """Ends the current round, nobody to blame."""
        if self.current is not None:
            self.current.fail(blame(self.current.plan.round_id, (), what))

    async def find(self, round_id: RoundId, *, wait_s: float) -> OpenRound:
        """The round of that name. A later one than the current is waited for, `wait_s` or `PLAN_WAIT_S`
        seconds.

        Raises `RoundStaleError` for an older one or after the wait, `NoWorkError` when too many calls wait.
        """
        wanted = round_order(round_id)

        def is_due() -> bool:
            return self.current is not None and round_order(self.current.plan.round_id) >= wanted

        if not is_due():
            if self._num_waiting >= MAX_WAITING:
                raise NoWorkError(f"round {round_id} is not open here", why="too many calls wait for it")
            self._num_waiting += 1
            try:
                async with asyncio.timeout(min(wait_s, PLAN_WAIT_S)), self._changed:
                    await self._changed.wait_for(is_due)
            except TimeoutError:
                raise RoundStaleError(f"round {round_id} did not open here in time") from None
            finally:
                self._num_waiting -= 1
        if self.current is None or self.current.plan.round_id != round_id:
            raise RoundStaleError(f"round {round_id} is over", why="")
        return self.current
