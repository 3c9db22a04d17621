"""The trainer role: rounds, commits and evaluations in the compute child, by the coordinator's word. Impure.

Level-triggered: orders are written down as what is wanted now (the latest plan, the head, an evaluation),
and one loop brings the child there, so that an order which comes early or twice does no harm. Invariants: a
round is run only from a plan that the coordinator signed, on the version that the plan names; weights enter
force only by a commit of the committed root, and a trainer that did not make them begins anew from fetched
bytes.
"""

import asyncio
import random
import time

import structlog

from node.backoff import backoff_s
from node.compute.messages import (
    AbortRound,
    Commit,
    Done,
    Evaluate,
    Evaluated,
    RoundDone,
    RunRound,
    Started,
    StartTrainer,
)
from node.context import Node
from node.optimizer_state import bring_optimizer_state, forget_other_moments, moments_path
from node.orders import EvaluationRequested
from node.trainer_orders import TrainerOrders, suspects_in
from protocol.certificates import anchor_pem
from protocol.child import ChildProcess
from protocol.errors import HexcombError, RootMismatchError, VersionFromFutureError, WorkRefusedError
from protocol.ids import Digest, Version
from protocol.manifest import Body
from protocol.round import RoundPlan

START_DEADLINE_S = 600.0
COMMIT_DEADLINE_S = 120.0
ABORT_DEADLINE_S = 60.0
EVALUATE_DEADLINE_S = 300.0
ROUND_GRACE_S = 15.0
MAX_STARTS = 8

log = structlog.get_logger("training")


class TrainingSession:
    """One life of a trainer; `run` ends by cancellation or with the error that makes a new child necessary."""

    def __init__(self, node: Node, child: ChildProcess, orders: TrainerOrders) -> None:
        self._node, self._child, self._orders = node, child, orders
        self._staged_root: Digest | None = None
        self._leaf = node.leaf
        self._begun: RoundPlan | None = None
        self._is_evaluating = False

    @property
    def has_work(self) -> bool:
        """Whether a round that this trainer has begun is open, or an evaluation: it has its part in a round until that
        is committed or given up, since others may still want what it made."""
        plan, head = self._begun, self._node.versions.head
        if plan is None or plan.round_id == self._orders.aborted or (head is not None and head > plan.base_version):
            return self._is_evaluating
        return self._is_evaluating or self._node.state.now_ms() < plan.deadline_ms

    async def run(self) -> None:
        """Starts the trainer on the newest version and follows orders until cancelled, or until the child
        ends."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._follow())

    async def _watch(self) -> None:
        raise await self._child.wait_closed()

    async def _follow(self) -> None:
        state = self._node.state
        await self._start_somehow()
        while True:
            ticks = state.ticks
            if not await self._step():
                state.activity = state.unwilling or "waiting for a round"
                await state.wait_changed(ticks)

    async def _start_somehow(self) -> None:
        """Starts on the newest version, again and again while the child lives: holders may be slow to
        appear."""
        for attempt in range(MAX_STARTS):
            try:
                await self._start()
                self._node.state.trouble = ""
                return
            except HexcombError as error:
                if self._child.is_closed or attempt == MAX_STARTS - 1:
                    raise
                wait_s = backoff_s(attempt, chance=random.random())
                self._node.state.trouble = error.sentence()
                log.warning("trainer not started", why=error.sentence(), next_in_s=round(wait_s, 1))
                await asyncio.sleep(wait_s)

    async def _start(self) -> None:
        node = self._node
        head = node.versions.head
        if head is None:
            raise VersionFromFutureError("a trainer was to start before any version exists")
        node.state.activity = f"fetching the weights of version {head}"
        node.state.starting = head
        weights = await node.versions.make_ready(head)
        body = node.versions.body(head)
        node.state.activity = f"fetching the optimizer's state after version {head}"
        optimizer_state = await bring_optimizer_state(node, self._child, body, members=self._orders.members)
        node.state.activity = f"starting the trainer on version {head}"
        self._leaf = node.leaf
        order = StartTrainer(
            model_dir=str(node.versions.model_dir),
            version=head,
            body=body.to_bytes(),
            weights=str(weights),
            optimizer_state=optimizer_state,
            optimizer=node.spec.optimizer,
            loss=node.spec.loss,
            temperature=node.spec.sampling.temperature,
            blob_dir=str(node.home.blobs),
            run_id=node.run_id,
            peer_id=node.peer_id,
            coordinator_key=node.joined.coordinator_key,
            listen_host=node.settings.listen_host,
            ca_certificate=anchor_pem(node.joined.coordinator_key),
            leaf_certificate=self._leaf.certificate_pem,
            leaf_key=self._leaf.key_pem,
            gpu_memory_share=node.settings.limits.gpu_memory_share,
        )
        started = await self._child.request(order, Started, deadline_s=START_DEADLINE_S)
        node.state.engine, node.state.trainer_endpoint = "trainer", started.endpoint
        self._note_loaded(head)
        log.info("trainer up", endpoint=started.endpoint, version=head)

    async def _step(self) -> bool:
        """Does one thing that is wanted; False if there is none."""
        orders, head = self._orders, self._node.versions.head
        if head is not None and head > self._version:
            await self._commit(head)
        elif self._leaf is not self._node.leaf:  # renewed: the trainer's own server and channels must show it
            await self._start_somehow()
        elif self._node.state.unwilling:
            return await self._decline()
        elif orders.evaluation is not None and orders.evaluation.version <= self._version:
            await self._evaluate()
        elif orders.plan is not None and orders.is_wanted(orders.plan[0], version=self._version):
            await self._work(*orders.plan)
        else:
            return False
        return True

    async def _decline(self) -> bool:
        """A round that was sealed before the coordinator heard that this node takes no work: the others need not wait
        for it."""
        plan = self._orders.plan[0] if self._orders.plan is not None else None
        if plan is None or plan is self._begun or not self._orders.is_wanted(plan, version=self._version):
            return False
        self._orders.over.add(plan.round_id)
        await self._fail(plan, WorkRefusedError("this node does not train now", why=self._node.state.unwilling))
        return True

    @property
    def _version(self) -> Version:
        return self._node.state.loaded[0] if self._node.state.loaded else Version(-1)

    async def _commit(self, head: Version) -> None:
        """Puts the committed version in force if it is the one made here; else begins anew from its bytes."""
        root = self._node.versions.root(head)
        if head != self._version + 1 or root != self._staged_root:
            log.info("version was made without this trainer", version=head)
            await self._start_somehow()
            return
        self._node.state.activity = f"putting version {head} in force"
        try:
            await self._child.request(Commit(head, root), Done, deadline_s=COMMIT_DEADLINE_S)
        except RootMismatchError as error:
            log.warning("version cannot be put in force", version=head, why=error.why)
            await self._start_somehow()
            return
        self._staged_root = None
        await asyncio.to_thread(self._node.versions.check_held, head)
        self._note_loaded(head)
        log.info("version in force", version=head, root=root[:12])
        await asyncio.to_thread(forget_other_moments, self._node, head)

    async def _work(self, plan: RoundPlan, payload: bytes) -> None:
        """One round, until it is done, over, replaced, or its deadline has passed."""
        self._node.state.activity, self._begun = f"round {plan.round_id}", plan
        working = asyncio.create_task(self._run_round(plan, payload))
        try:
            while not working.done() and self._is_open(plan):
                changing = asyncio.create_task(self._node.state.wait_changed(self._node.state.ticks))
                await asyncio.wait({working, changing}, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
        finally:
            is_dropped = not working.done()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            self._orders.over.add(plan.round_id)
        if is_dropped and not self._has_made(Version(plan.base_version + 1)):
            log.info("round dropped", round=plan.round_id)
            await self._child.request(AbortRound(plan.round_id), Done, deadline_s=ABORT_DEADLINE_S)
        elif not is_dropped:
            working.result()

    def _has_made(self, version: Version) -> bool:
        """Whether the committed version is the one that stands ready here, though no answer to the attestation came."""
        head = self._node.versions.head
        return head == version and self._staged_root == self._node.versions.root(version)

    def _is_open(self, plan: RoundPlan) -> bool:
        head = self._node.versions.head
        is_current = head is None or head <= plan.base_version
        return is_current and self._orders.is_wanted(plan, version=self._version)

    async def _run_round(self, plan: RoundPlan, payload: bytes) -> None:
        """Batch, round, attestation; a failure is told to the coordinator, which decides what follows."""
        node = self._node
        started_s = time.monotonic()
        try:
            samples = await node.control.fetch_batch(plan.round_id)
            path = moments_path(node, Version(plan.base_version + 1))
            remaining_s = (plan.deadline_ms - node.state.now_ms()) / 1000
            request = RunRound(payload, samples, remaining_s, str(path))
            self._staged_root = None
            done = await self._child.request(request, RoundDone, deadline_s=max(remaining_s, 0.0) + ROUND_GRACE_S)
            body = Body.from_bytes(done.body)
            num_tokens = sum(sum(sample.mask) for sample in samples)
            node.state.rate.add(num_tokens, now_s=time.monotonic())
            self._staged_root = body.root  # before the word leaves: its answer may be lost, and the version committed
            await node.control.attest(plan.round_id, body=done.body, metrics=done.metrics, canary=done.canary)
        except HexcombError as error:
            await self._fail(plan, error)
            if self._child.is_closed:
                raise
            return
        node.state.counts["rounds/attested"] += 1
        took_s = round(time.monotonic() - started_s, 3)
        log.info("round attested", round=plan.round_id, root=body.root[:12], num_samples=len(samples), took_s=took_s)

    async def _fail(self, plan: RoundPlan, error: HexcombError) -> None:
        suspects = suspects_in(error, members=[member.peer_id for member in plan.members])
        if self._child.is_closed:
            suspects = (self._node.peer_id,)
        self._node.state.counts["rounds/failed"] += 1
        log.warning("round failed", round=plan.round_id, why=error.sentence(), suspects=list(suspects))
        try:
            await self._node.control.fail_round(plan.round_id, suspects=suspects, reason=error.sentence())
        except HexcombError as trouble:
            log.warning("failure not told; the round's deadline ends it", why=trouble.sentence())

    async def _evaluate(self) -> None:
        order, self._orders.evaluation = self._orders.evaluation, None
        assert order is not None
        self._node.state.activity, self._is_evaluating = f"evaluating version {order.version}", True
        try:
            request = await self._evaluation_of(order)
            reply = await self._child.request(request, Evaluated, deadline_s=EVALUATE_DEADLINE_S)
            version, completions = Version(reply.version), reply.completions
            await self._node.control.submit_evaluation(version, tasks=order.tasks, completions=completions)
        except HexcombError as error:
            if self._child.is_closed:
                raise
            log.warning("evaluation failed", version=order.version, why=error.sentence())
        finally:
            self._is_evaluating = False
            self._node.state.changed()

    async def _evaluation_of(self, order: EvaluationRequested) -> Evaluate:
        """The child's order: under the version in force, or from the file of one that was in force before."""
        contract = self._node.spec.sampling
        if order.version == self._version:
            return Evaluate(order.prompt_ids, contract)
        weights = await self._node.versions.make_ready(order.version)
        body = self._node.versions.body(order.version)
        return Evaluate(order.prompt_ids, contract, body.to_bytes(), str(weights))

    def _note_loaded(self, version: Version) -> None:
        state = self._node.state
        state.loaded, state.starting = (version, self._node.versions.root(version)), None
        state.changed()
        self._node.session.beat_now()
