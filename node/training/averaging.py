"""A member's part in a round: parts to owners, averages back, one optimizer step, one set of bits. Impure:
asyncio.

Invariants: every wait ends at a deadline from the plan, and what raises then names who was waited for; the
average is the bytes that its owner sent, for the owner too, and each part is rounded to the plan's wire before it is
added, whoever owns the shard; where a member's own new state differs in a bit
from that of a shard's owner, the owner's bytes win; nothing that is in force changes here.

Shape letters: P parameters, S elements of one shard.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from node.training.links import Links, RoundLinks
from node.training.open_round import OpenRound, blame, settled
from node.training.optimizer import (
    OptimizerState,
    Vector,
    adamw_step,
    clip_coefficient,
    learning_rate,
)
from node.training.shards import (
    Average,
    ShardState,
    check_average,
    check_state,
    reduce_parts,
    shard_state,
)
from node.training.wire import landing, round_in_place, unpack_landed
from protocol.errors import HexcombError, PartRefusedError, RolloutMalformedError, RoundStaleError
from protocol.ids import PeerId
from protocol.run import OptimizerSpec, Wire
from protocol.v1 import peer_pb2

MARGIN_SHARE, MAX_MARGIN_S = 0.1, 2.0
DIGEST_BYTES = 32

T = TypeVar("T")


class Heavy(Protocol):
    """Runs a function that computes for long in a thread of its own."""

    def __call__(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Awaitable[T]:
        """The function's result."""
        ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times of the loop's clock: parts are with their owners, averages with all, the state is settled."""

    parts: float
    averages: float
    state: float


@dataclass(slots=True)
class Stepped:
    """The state that the round leads to, and how it came about; `num_replaced` are shards that the owner's
    word changed.
    """

    state: OptimizerState
    norm: float
    clip: float
    rate: float
    num_replaced: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def deadlines_of(opened: OpenRound) -> Deadlines:
    """An owner gives up before those who wait for it, so that they hear from it who is to blame."""
    margin_s = min(MAX_MARGIN_S, MARGIN_SHARE * opened.remaining_s)
    return Deadlines(opened.deadline - 2 * margin_s, opened.deadline - margin_s, opened.deadline)


class RoundWork:
    """One member's work in one round, from its gradient to the settled state."""

    def __init__(self, opened: OpenRound, links: Links, *, heavy: Heavy, spec: OptimizerSpec) -> None:
        self._round, self._heavy, self._spec = opened, heavy, spec
        self._links = RoundLinks(opened, links)
        self._deadlines = deadlines_of(opened)
        self._step = opened.plan.base_version + 1

    async def run(self, state: OptimizerState, gradient: Callable[[], Awaitable[Vector]]) -> Stepped:
        """Does it. `gradient` computes the sum over this member's share while the others are dialled.

        Raises `RoundStaleError` with suspects when members did not do their part, and what `gradient`
        raises. The round is then over for those who ask this member, too.
        """
        others = [peer_id for peer_id in self._round.members if peer_id != self._round.me]
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._links.watch(peer_id)) for peer_id in others]
                stepped = await self._work(state, gradient)
                for watcher in watchers:
                    watcher.cancel()
        except BaseExceptionGroup as group:
            error = one_error(group)
            self._round.fail(error if isinstance(error, RoundStaleError) else self._own_failure(error))
            raise error from None
        except asyncio.CancelledError:
            self._round.fail(blame(self._round.plan.round_id, (), "it was dropped"))
            raise
        return stepped

    async def _work(self, state: OptimizerState, gradient: Callable[[], Awaitable[Vector]]) -> Stepped:
        clock = asyncio.get_running_loop().time
        times = [clock()]
        gradient_P = await self._own_gradient(gradient)
        times.append(clock())
        average_P, norm = await self._average(gradient_P)
        del gradient_P
        times.append(clock())
        clip = clip_coefficient(norm, max_norm=self._spec.max_grad_norm)
        new = await self._heavy(adamw_step, state, average_P, step=self._step, spec=self._spec, clip=clip)
        times.append(clock())
        stepped = Stepped(new, norm, clip, learning_rate(self._spec, step=self._step))
        await self._settle(stepped)
        times.append(clock())
        names = ("time/gradient_s", "time/average_s", "time/step_s", "time/settle_s")
        stepped.seconds = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
        return stepped

    async def _own_gradient(self, gradient: Callable[[], Awaitable[Vector]]) -> Vector:
        me = self._round.me
        try:
            async with asyncio.timeout_at(self._deadlines.parts):
                gradient_P = await gradient()
        except TimeoutError:
            raise self._links.blame(me, "its own gradient was not ready in time") from None
        if not await self._heavy(_rounded_to_finite, gradient_P, self._round.plan.wire):
            raise self._links.blame(me, "its own gradient is not finite")
        return gradient_P

    async def _average(self, gradient_P: Vector) -> tuple[Vector, float]:
        """The averaged gradient of all parameters, and its norm."""
        average_P = np.empty_like(gradient_P)
        async with asyncio.TaskGroup() as tasks:
            fetches = []
            for index, shard in enumerate(self._round.plan.shards):
                where = slice(shard.start, shard.stop)
                if shard.owner == self._round.me:
                    self._round.deliver(index, self._round.me, gradient_P[where])
                    tasks.create_task(self._reduce(index))
                else:
                    push = self._links.push(index, gradient_P[where], until=self._deadlines.parts)
                    tasks.create_task(push)
                fetches.append(tasks.create_task(self._take_average(index, average_P[where])))
        return average_P, math.sqrt(math.fsum(fetch.result() for fetch in fetches))

    async def _reduce(self, index: int) -> None:
        """The owner's work on one shard."""
        parts = await self._round.collect(index, until=self._deadlines.parts)
        plan = self._round.plan
        average = await self._heavy(reduce_parts, parts, divisor=plan.divisor, wire=plan.wire)
        if self._round.failure is None:
            self._round.averages[index].set_result(average)

    async def _take_average(self, index: int, into_S: Vector) -> float:
        """Writes the owner's average of one shard to its place; returns its squared norm."""
        owner = self._round.plan.shards[index].owner
        until = self._deadlines.averages
        if owner == self._round.me:
            try:
                average = await settled(self._round.averages[index], until=until)
            except TimeoutError:
                raise self._links.blame(owner, "its own shard was not averaged in time") from None
            into_S[:] = average.gradient_S
            return average.squared_norm
        content, wire = peer_pb2.SHARD_CONTENT_AVERAGE, self._round.plan.wire
        squared_norm = await self._links.fetch(index, content, landing(into_S, wire), until=until)
        await self._heavy(unpack_landed, into_S, wire)
        await self._accept(owner, check_average, Average(into_S, squared_norm))
        return squared_norm

    async def _settle(self, stepped: Stepped) -> None:
        """Publishes the state of this member's shards and takes that of the others', as far as it differs."""
        shards = self._round.plan.shards
        mine = [await self._heavy(shard_state, stepped.state, slice(shard.start, shard.stop)) for shard in shards]
        for index in self._round.owned:
            if self._round.failure is None:
                self._round.states[index].set_result(mine[index])
        async with asyncio.TaskGroup() as tasks:
            settlings = [
                tasks.create_task(self._settle_shard(index, mine[index], rate=stepped.rate))
                for index in range(len(shards))
                if index not in self._round.owned
            ]
        stepped.num_replaced = sum(settling.result() for settling in settlings)

    async def _settle_shard(self, index: int, mine: ShardState, *, rate: float) -> bool:
        """Whether the owner's state had to replace this member's, which is then overwritten in place."""
        owner, until = self._round.plan.shards[index].owner, self._deadlines.state
        digest = bytearray(DIGEST_BYTES)
        await self._links.fetch(index, peer_pb2.SHARD_CONTENT_STATE_DIGEST, memoryview(digest), until=until)
        if digest.hex() == mine.digest:
            return False
        size = mine.state.num_elements
        theirs = np.empty(3 * size, np.float32)
        await self._links.fetch(index, peer_pb2.SHARD_CONTENT_STATE, landing(theirs, "f32"), until=until)
        state = OptimizerState(theirs[:size], theirs[size : 2 * size], theirs[2 * size :])
        sent = ShardState(state, type(mine.digest)(digest.hex()))
        await self._accept(owner, check_state, sent, mine.state, rate=rate)
        mine.state.weights_P[:] = state.weights_P
        mine.state.first_P[:] = state.first_P
        mine.state.second_P[:] = state.second_P
        return True

    async def _accept(self, owner: PeerId, check: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Runs a check of what an owner sent; the owner is blamed if it does not hold."""
        try:
            await self._heavy(check, *args, **kwargs)
        except PartRefusedError as error:
            raise self._links.blame(owner, error.sentence()) from error

    def _own_failure(self, error: BaseException) -> RoundStaleError:
        """What the others hear; a sample that nobody could train on is not this trainer's fault."""
        suspects = [] if isinstance(error, RolloutMalformedError) else [self._round.me]
        return blame(self._round.plan.round_id, suspects, f"{self._round.me} failed: {error}")


def one_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a group stands for: a fault that is not of the round first, else all suspects
    together.
    """
    leaves = list(_leaves(group))
    stale = [leaf for leaf in leaves if isinstance(leaf, RoundStaleError)]
    faults = [leaf for leaf in leaves if not isinstance(leaf, RoundStaleError)]
    if faults:
        return next((fault for fault in faults if not isinstance(fault, HexcombError)), faults[0])
    first = max(stale, key=lambda error: len(error.why))
    suspects = {name for error in stale for name in error.why.split(",") if name}
    return RoundStaleError(first.what, why=",".join(sorted(suspects)))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _rounded_to_finite(gradient_P: Vector, wire: Wire) -> bool:
    """Makes a member's gradient what the wire carries, in place; whether it is finite then."""
    round_in_place(gradient_P, wire)
    return bool(np.isfinite(gradient_P).all())
