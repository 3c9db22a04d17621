"""One lease on a rollout node: prompts, generation, signing, handing in. Impure: the child and the
coordinator.

Invariants: a slot is generated only from a prompt whose digest is the lease's; its seed is the one of the
version under which the slot was opened; whatever ends the work early, the lease is given back unless it is
known to be over.
"""

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from node.compute.messages import Done, Generate, MakePrompts, Prompts, SlotFilled, SlotOrder
from node.context import Node
from node.orders import Lease, SlotWork
from protocol.child import ChildProcess
from protocol.errors import HexcombError, UnreachableError, WorkRefusedError
from protocol.ids import SlotKey, TaskKey, Version
from protocol.rollout import FinishReason, Piece, Rollout, sign_piece
from protocol.seeds import slot_seed
from protocol.tasks import prompt_digest

PROMPTS_DEADLINE_S = 60.0
GATHER_S = 0.3
MAX_BATCH = 32
EVENTS_DEADLINE_S = 10.0
MAX_QUEUED = 4096

log = structlog.get_logger("leases")


@dataclass(slots=True)
class LeaseWork:
    """The work on one lease; `run` does it once. `filled` takes the child's events for this lease."""

    node: Node
    child: ChildProcess
    lease: Lease
    filled: asyncio.Queue[SlotFilled] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    is_over: bool = False
    num_taken: int = 0
    _slots: dict[str, SlotKey] = field(default_factory=dict)
    _ends_s: float = 0.0

    async def run(self) -> None:
        """Fills what can be filled. Raises `EngineError` when the child is lost."""
        self._ends_s = time.monotonic() + self.lease.remaining_s
        reason = "some slots could not be filled"
        try:
            orders = await self._orders()
            if orders:
                await self._fill(orders)
        except UnreachableError as error:
            reason = error.sentence()
            log.warning("lease not finished", lease=self.lease.lease_id, why=reason)
        except WorkRefusedError as error:
            self.is_over = error.code == "LEASE_UNKNOWN"
            reason = error.sentence()
            log.warning("lease refused", lease=self.lease.lease_id, code=error.code, why=error.why)
        except (HexcombError, asyncio.CancelledError) as error:
            await self._give_back(str(error) or "the node stops this work")
            raise
        if self.num_taken < len(self.lease.slots):
            await self._give_back(reason)

    async def _fill(self, orders: tuple[SlotOrder, ...]) -> None:
        request = Generate(self.lease.lease_id, orders)
        remaining_s = max(self._ends_s - time.monotonic(), 1.0)
        generating = asyncio.create_task(self.child.request(request, Done, deadline_s=remaining_s))
        try:
            await self._hand_in_all(len(orders), generating)
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _hand_in_all(self, num_orders: int, generating: "asyncio.Task[Done]") -> None:
        """Takes finished slots as they come, and hands them in by batches, until all have come or no more
        can."""
        num_come = 0
        while num_come < num_orders:
            batch = await self._gather(generating)
            if not batch:
                return
            num_come += len(batch)
            rollouts = [rollout for event in batch if (rollout := self._rollout(event)) is not None]
            if rollouts:
                await self._submit(rollouts)

    async def _gather(self, generating: "asyncio.Task[Done]") -> list[SlotFilled]:
        """What finished within a moment after the first; empty when generation has ended and nothing comes
        any more."""
        taking = asyncio.create_task(self.filled.get())
        await asyncio.wait({taking, generating}, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():  # its last events may still be on their way from the pipe
            await asyncio.wait({taking}, timeout=0 if _failed(generating) else EVENTS_DEADLINE_S)
        if not taking.done():
            taking.cancel()
            return []
        batch = [taking.result()]
        gathered_s = time.monotonic() + GATHER_S
        while len(batch) < MAX_BATCH and (wait_s := gathered_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(wait_s):  # wait_for may swallow a cancellation
                    batch.append(await self.filled.get())
            except TimeoutError:
                break
        return batch

    async def _submit(self, rollouts: list[Rollout]) -> None:
        """Hands in until the coordinator answers or the lease has ended."""
        while True:
            try:
                receipts = await self.node.control.submit(self.lease.lease_id, rollouts)
                break
            except UnreachableError:
                if time.monotonic() >= self._ends_s:
                    raise
        for receipt in receipts:
            self.node.state.counts[f"receipt/{receipt.outcome}"] += 1
            self.num_taken += receipt.is_taken
            if not receipt.is_taken:
                log.warning("rollout refused", slot=str(receipt.slot), outcome=receipt.outcome, why=receipt.detail)

    def _rollout(self, event: SlotFilled) -> Rollout | None:
        """The signed rollout, or None for a sample that was cut off."""
        slot, reason = self._slots.get(event.slot), _finish_reason(event.finish_reason)
        if slot is None or reason is None or not event.token_ids:
            self.node.state.counts["slots/aborted"] += 1
            return None
        pieces: list[Piece] = []
        start = 0
        for version, num_tokens in event.segments:
            stop = start + num_tokens
            piece = Piece(
                self.node.peer_id,
                Version(version),
                start,
                event.token_ids[start:stop],
                event.logprobs[start:stop],
            )
            pieces.append(sign_piece(self.node.home.identity, run_id=self.node.run_id, slot=slot, piece=piece))
            start = stop
        self.node.state.rate.add(start, now_s=time.monotonic())
        self.node.state.counts["slots/filled"] += 1
        return Rollout(slot, tuple(pieces), reason)

    async def _orders(self) -> tuple[SlotOrder, ...]:
        """What the engine is to do: each slot whose prompt holds and whose version's secret is known."""
        prompts = await self._prompts()
        orders: list[SlotOrder] = []
        for work in self.lease.slots:
            prompt_ids, secret = prompts.get(work.slot.task), await self._secret(work.slot.version)
            if prompt_ids is None or secret is None:
                log.warning("slot left out", slot=str(work.slot), has_prompt=prompt_ids is not None)
                continue
            self._slots[str(work.slot)] = work.slot
            orders.append(SlotOrder(str(work.slot), prompt_ids, slot_seed(secret, work.slot)))
        return tuple(orders)

    async def _prompts(self) -> dict[TaskKey, tuple[int, ...]]:
        """Prompts whose digest holds: regenerated here, or else as the lease gives them."""
        works = {work.slot.task: work for work in self.lease.slots}
        made = await self._regenerate(list(works))
        chosen = {task: _checked(work, made.get(task)) for task, work in works.items()}
        return {task: prompt_ids for task, prompt_ids in chosen.items() if prompt_ids is not None}

    async def _regenerate(self, tasks: list[TaskKey]) -> dict[TaskKey, tuple[int, ...]]:
        request = MakePrompts(tuple((task.environment, task.seed, task.index) for task in tasks))
        try:
            reply = await self.child.request(request, Prompts, deadline_s=PROMPTS_DEADLINE_S)
        except HexcombError as error:
            if self.child.is_closed:
                raise
            log.info("prompts not regenerated", why=error.sentence())
            return {}
        return dict(zip(tasks, reply.prompt_ids, strict=True))

    async def _secret(self, version: Version) -> bytes | None:
        manifest = self.node.versions.manifest(version)
        if manifest is None:
            try:
                manifest = self.node.versions.learn((await self.node.control.get_manifest(version)).manifest)
            except HexcombError as error:
                log.warning("no seed for a slot", version=version, why=error.sentence())
                return None
        return manifest.seal.secret

    async def _give_back(self, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        try:
            await self.node.control.return_lease(self.lease.lease_id, reason=reason[:200])
        except HexcombError as error:
            log.info("lease not given back; it will expire", lease=self.lease.lease_id, why=error.sentence())


def _checked(work: SlotWork, made: tuple[int, ...] | None) -> tuple[int, ...] | None:
    for prompt_ids in (made, work.prompt_ids):
        if prompt_ids and prompt_digest(prompt_ids) == work.prompt_digest:
            return prompt_ids
    return None


def _finish_reason(text: str) -> FinishReason | None:
    match text:
        case "stop" | "length":
            return text
        case _:
            return None


def _failed(task: "asyncio.Task[Done]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
