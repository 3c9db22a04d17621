"""What the node does for the run: measures itself, then follows its role, with a compute child for each.
Impure.

Invariants: one job runs at a time, in a child of its own; a child that dies is replaced, by `node.restarts`, and a role
that changes ends the job first, as does its owner's word, once leases or round have ended or their time is over;
versions that nobody within the bound needs are removed.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable

import structlog

from node.backoff import backoff_s
from node.context import Node
from node.machine import measure
from node.orders import EvaluationRequested, RoundAborted, RoundSealed
from node.restarts import NO_FAILURES, Attempt, Restarts
from node.rollouts import RolloutWork
from node.state import NodeState
from node.trainer_orders import TrainerOrders
from node.training_session import TrainingSession
from protocol.errors import HexcombError, MachineUnfitError
from protocol.ids import LeaseId, SlotKey, Version
from protocol.round import open_plan
from protocol.run import Role

LEASES_END_S = 20.0
"""A node that must pause works on so long on the leases that it has; what is then unfilled goes on elsewhere."""
ROUND_GRACE_S = 15.0
LOOK_AGAIN_S = 1.0

log = structlog.get_logger("work")


class Work:
    """The node's present job, and the orders that it follows."""

    def __init__(self, node: Node, restarts: Restarts = NO_FAILURES) -> None:
        self._node, self._restarts = node, restarts
        self._orders = TrainerOrders()
        self._rollouts: RolloutWork | None = None
        self._training: TrainingSession | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_roles())
            tasks.create_task(self._retire_versions())

    def on_version(self) -> None:
        """A version was announced."""
        if self._rollouts is not None:
            self._rollouts.on_version()

    def on_plan(self, order: RoundSealed) -> None:
        """A round was sealed with this node in it. Raises `UnauthenticatedError` or `RoundStaleError`."""
        key = self._node.joined.coordinator_key
        plan = open_plan(order.plan, coordinator_key=key, run_id=self._node.run_id)
        self._orders.note_plan(plan, order.plan.payload)
        log.info("round sealed", round=plan.round_id, num_members=len(plan.members))

    def on_abort(self, order: RoundAborted) -> None:
        """A round is over without a version."""
        self._orders.note_abort(order.round_id)
        log.info("round aborted", round=order.round_id, reason=order.reason)

    def on_evaluation(self, order: EvaluationRequested) -> None:
        """Held-out tasks are to be completed."""
        self._orders.evaluation = order

    def cancel(self, lease_ids: tuple[LeaseId, ...], slots: tuple[SlotKey, ...]) -> None:
        """Leases are over, and single slots of others."""
        if self._rollouts is not None:
            self._rollouts.cancel(lease_ids, slots)

    @property
    def num_leases(self) -> int:
        """Leases that the node works on."""
        return self._rollouts.num_leases if self._rollouts is not None else 0

    @property
    def has_work(self) -> bool:
        """Whether others count on this node: for leases that it holds or a round that it is in."""
        jobs = (self._rollouts, self._training)
        return any(job.has_work for job in jobs if job is not None)

    async def wait_until_idle(self, ends_s: Callable[[], float | None]) -> None:
        """Until nobody counts on this node, or until `ends_s()` (monotonic; None = without end), which may change."""
        state = self._node.state
        while self.has_work:
            end_s = ends_s()
            left_s = LOOK_AGAIN_S if end_s is None else end_s - time.monotonic()
            if left_s <= 0:
                return
            await state.wait_changed(state.ticks, timeout_s=min(left_s, LOOK_AGAIN_S))

    async def _follow_roles(self) -> None:
        node, restarts = self._node, self._restarts
        await self._measure()
        while True:
            if node.state.unwilling:
                await self._rest()
                continue
            role, started_s = node.state.role, time.monotonic()
            try:
                await self._until_role_changes(role)
                continue
            except* HexcombError as group:
                error = first_of(group)
            now_s = time.monotonic()
            restarts, attempt = restarts.after_failure(
                error.code, ran_s=now_s - started_s, now_s=now_s, chance=random.random()
            )
            self._note_failure(role, error, attempt)
            await self._stay_out(role, attempt.wait_s)

    def _note_failure(self, role: Role, error: HexcombError, attempt: Attempt) -> None:
        """Says in the status, to the coordinator and in the log what failed and what follows."""
        state, wait_s = self._node.state, attempt.wait_s
        state.drop_job()
        state.restraint = attempt.restraint
        state.trouble = error.sentence()
        state.counts["jobs failed"] += 1
        state.activity = f"restarting the {role} job in {wait_s:.0f} s"
        if attempt.pause:
            state.activity = f"stopped trying: {attempt.pause}, again in {wait_s / 60:.0f} min"
        self._node.session.beat_now()
        notes = "\n".join(getattr(error, "__notes__", []))
        facts = {"role": role, "why": error.sentence(), "restraint": attempt.restraint, "pause": attempt.pause}
        log.error("job ended", **facts, notes=notes, next_in_s=round(wait_s, 1))

    async def _stay_out(self, role: Role, wait_s: float) -> None:
        """Waits before the next attempt, for as long as the role is the same and the owner lets the node work."""
        changing = asyncio.create_task(self._wait_for_other_wish(role))
        try:
            await asyncio.wait({changing}, timeout=wait_s)
        finally:
            changing.cancel()

    async def _until_role_changes(self, role: Role) -> None:
        """Does the role's job; returns once the role is another one, or the owner wants none."""
        job = asyncio.create_task(self._do(role))
        changing = asyncio.create_task(self._wait_until_over(role))
        try:
            await asyncio.wait({job, changing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()
            job.cancel()
            await asyncio.gather(job, changing, return_exceptions=True)
        for task in (job, changing):
            if not task.cancelled():
                task.result()
        self._node.state.drop_job()

    async def _wait_for_other_wish(self, role: Role) -> None:
        state = self._node.state
        while state.role == role and not state.unwilling:
            await state.wait_changed(state.ticks)

    async def _wait_until_over(self, role: Role) -> None:
        """Until the job is to end: for another role, or by the owner's word. Raises `MachineUnfitError` when it takes
        more memory than the owner allows."""
        state = self._node.state
        while state.role == role:
            if state.memory_trouble and role != "idle":
                why, state.memory_trouble = state.memory_trouble, ""
                raise MachineUnfitError("the job was ended", why=why)
            if state.unwilling and await self._wind_down(role):
                return
            await state.wait_changed(state.ticks)

    async def _wind_down(self, role: Role) -> bool:
        """Lets leases or round end, for a bounded time; False if the node is to go on after all."""
        state = self._node.state
        longest_s = LEASES_END_S if role != "trainer" else self._node.spec.round_s + ROUND_GRACE_S
        ends_s = time.monotonic() + longest_s
        log.info("work is to end", why=state.unwilling, has_work=self.has_work)
        waiting = asyncio.create_task(self.wait_until_idle(lambda: state.finish_by_s if state.finishing else ends_s))
        try:
            while state.unwilling and state.role == role and not waiting.done():
                changing = asyncio.create_task(state.wait_changed(state.ticks))
                await asyncio.wait({waiting, changing}, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
        finally:
            waiting.cancel()
        return bool(state.unwilling)

    async def _rest(self) -> None:
        """Without a job, until the owner wants one: the node passes weights on meanwhile."""
        node, state = self._node, self._node.state
        state.resting = True
        state.changed()
        node.session.beat_now()
        log.info("node rests", why=state.unwilling)
        relaying = asyncio.create_task(self._relay())
        try:
            while state.unwilling and not relaying.done():
                await state.wait_changed(state.ticks)
        finally:
            state.resting = False
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)
        log.info("node works again")

    async def _do(self, role: Role) -> None:
        if role == "idle":
            await self._relay()
            return
        await self._wait_for_version()
        child = await self._node.start_compute()
        try:
            if role == "trainer":
                self._training = TrainingSession(self._node, child, self._orders)
                await self._training.run()
            else:
                self._rollouts = RolloutWork(self._node, child)
                await self._rollouts.run()
        finally:
            self._rollouts = self._training = None
            await child.terminate()

    async def _relay(self) -> None:
        """Without a job a node still holds the newest version for others."""
        state, versions = self._node.state, self._node.versions
        while True:
            ticks, head = state.ticks, versions.head
            state.activity = state.unwilling or (f"idle: {state.role_reason}" if state.role_reason else "idle")
            if head is not None and head not in versions.held:
                state.activity = f"fetching version {head} for others"
                await self._fetch_somehow(head)
                continue
            await state.wait_changed(ticks)

    async def _fetch_somehow(self, version: Version) -> None:
        """Fetches a version, again and again until it is here or a newer one is out: holders may be slow to appear."""
        for attempt in itertools.count():
            if self._node.versions.head != version:
                return
            try:
                await self._node.versions.fetch(version)
                self._node.state.trouble = ""
                return
            except HexcombError as error:
                self._node.state.trouble = error.sentence()
                await asyncio.sleep(backoff_s(attempt, chance=random.random(), base_s=0.5, cap_s=5.0))

    async def _wait_for_version(self) -> None:
        state = self._node.state
        while self._node.versions.head is None or state.spec is None:
            waiting = "waiting for the coordinator" if state.spec is None else "WAITING_FOR_BASE"
            state.activity = state.unwilling or waiting
            await state.wait_changed(state.ticks)

    async def _measure(self) -> None:
        """The node's rates, before any job disturbs them; without them it takes part all the same."""
        node = self._node
        await self._wait_for_version()
        while (head := node.versions.head) is not None and head not in node.versions.held:
            node.state.activity = f"fetching version {head}"
            await self._fetch_somehow(head)
        assert head is not None
        for attempt in range(3):
            while node.state.unwilling:
                await self._rest()
            try:
                node.state.activity = "measuring this machine"
                model_dir = await node.versions.make_model_dir(head)
                node.state.capability = await measure(node, model_dir)
                node.state.trouble = ""
                node.session.introduce_again()
                node.state.changed()
                return
            except HexcombError as error:
                node.state.trouble = error.sentence()
                log.warning("machine not measured", why=error.sentence())
                await asyncio.sleep(backoff_s(attempt, chance=random.random(), base_s=1.0))

    async def _retire_versions(self) -> None:
        node = self._node
        kept_from = Version(0)
        while True:
            ticks, head, spec = node.state.ticks, node.versions.head, node.state.spec
            if head is not None and spec is not None:
                keep_from = oldest_needed(head, max_lag=spec.max_lag, state=node.state)
                if keep_from > kept_from:
                    await node.versions.retire(keep_from=keep_from, now_s=time.time())
                    kept_from = keep_from
            await node.state.wait_changed(ticks)


def first_of(group: BaseExceptionGroup[HexcombError]) -> HexcombError:
    """The first error in a group of groups."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def oldest_needed(head: Version, *, max_lag: int, state: NodeState) -> Version:
    """The oldest version whose bytes must stay: slots within the bound, and what a job has in force or starts from."""
    loaded = state.loaded[0] if state.loaded else head
    starting = head if state.starting is None else state.starting
    return Version(min(head - max_lag - 1, loaded, starting))
