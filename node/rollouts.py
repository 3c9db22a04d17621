"""The rollout role: an engine in the compute child, kept supplied with weights and leases. Impure.

The planner decides, this carries out: each action runs as a task of its own, so that generating, fetching
the next version and asking for the next lease overlap. Invariant: `state.loaded` names exactly what the
engine has in force.
"""

import asyncio
import random
import time

import structlog

from node.backoff import backoff_s
from node.compute.messages import Load, Loaded, SlotAdvanced, SlotFilled, Started, StartRollout
from node.context import Node
from node.engine_rates import rates_key, recall, remember
from node.leases import LeaseWork
from node.orders import Lease
from node.pieces import PieceSender
from node.planner import (
    MAX_OUTSTANDING,
    NUM_SEATS,
    AskForWork,
    FetchVersion,
    LoadVersion,
    RolloutView,
    Wait,
    next_action,
    next_lease_slots,
)
from protocol.child import ChildProcess
from protocol.errors import (
    EngineError,
    EngineUntrustedError,
    HexcombError,
    NoWorkError,
    RootMismatchError,
    WeightsUnfitError,
)
from protocol.ids import Digest, LeaseId, SlotKey, Version

START_DEADLINE_S = 600.0
LOAD_DEADLINE_S = 300.0
HANG_S = 300.0
FIRST_LEASE_SLOTS = 32
MAX_NO_WORK_S = 2.0

log = structlog.get_logger("rollouts")


class RolloutWork:
    """One life of a rollout engine; `run` ends by cancellation or with the error that ended the child."""

    def __init__(self, node: Node, child: ChildProcess) -> None:
        self._node, self._child = node, child
        self._leases: dict[LeaseId, LeaseWork] = {}
        self._tasks: dict[LeaseId, asyncio.Task[None]] = {}
        self._sender = PieceSender(
            node.control.submit_pieces,
            node.spec.piece_s,
            node.state.counts,
            on_unwanted=self._stop_slot,
            on_time=self._prolong,
        )
        self._num_asking = 0
        self._fetching: Version | None = None
        self._loading: Version | None = None
        self._failed_until_s = self._no_work_until_s = 0.0
        self._num_fetch_failures = self._num_no_work = 0
        self._lease_slots = FIRST_LEASE_SLOTS
        self._ask_s = 0.0
        self._service_s: float | None = None
        self._busy_since_s = 0.0
        self._last_word_s = time.monotonic()

    async def run(self) -> None:
        """Starts the engine on the newest version and works until cancelled."""
        await self._start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._watch_progress())
            tasks.create_task(self._route_events())
            tasks.create_task(self._sender.run())
            tasks.create_task(self._carry_out(tasks))

    def on_version(self) -> None:
        """A version was announced: fetch at once, and there may be work again."""
        self._failed_until_s = self._no_work_until_s = 0.0
        self._num_no_work = 0

    def cancel(self, lease_ids: tuple[LeaseId, ...], slots: tuple[SlotKey, ...] = ()) -> None:
        """The coordinator no longer wants these leases filled, nor these slots of other leases."""
        for work in self._leases.values():
            work.stop(slots)
        for lease_id in lease_ids:
            if lease_id in self._tasks:
                self._leases[lease_id].is_over = True
                self._tasks[lease_id].cancel()

    @property
    def num_leases(self) -> int:
        """Leases outstanding."""
        return len(self._leases)

    @property
    def has_work(self) -> bool:
        """Whether leases are outstanding or being asked for."""
        return bool(self._leases) or self._num_asking > 0

    async def _start(self) -> None:
        node = self._node
        head = node.versions.head
        if head is None:
            raise EngineError("a rollout engine was to start before any version exists")
        node.state.activity = f"fetching the weights of version {head}"
        node.state.starting = head
        weights = await node.versions.make_ready(head)
        node.state.activity = f"starting the engine on version {head}"
        threads = node.settings.num_threads
        key = rates_key(node.versions.model_dir, num_seats=NUM_SEATS, num_threads=threads)
        known = recall(node.home.path, key)
        order = StartRollout(
            engine=node.settings.engine,
            model_dir=str(node.versions.model_dir),
            version=head,
            weights=str(weights),
            environment=node.spec.environment,
            contract=node.spec.sampling,
            piece_tokens=node.spec.piece_tokens,
            piece_s=node.spec.piece_s,
            gpu_memory_share=node.settings.limits.gpu_memory_share,
            canary=node.versions.canary(head),
            restraint=node.state.restraint,
            trust_remote_code=node.settings.trust_remote_code,
            rates=known or (),
            is_first=known is None,
        )
        begun_s = time.monotonic()
        started = await self._child.request(order, Started, deadline_s=START_DEADLINE_S)
        node.state.engine_start_s = round(time.monotonic() - begun_s, 2)
        node.state.engine, node.state.num_seats = started.engine, started.num_seats
        node.state.k3, node.state.engine_choice, node.state.engine_rates = started.k3, started.choice, started.rates
        if order.engine == "auto":
            remember(node.home.path, key, started.rates)
        self._note_loaded(head)
        log.info("engine up", engine=started.engine, version=head, took_s=node.state.engine_start_s)

    async def _watch(self) -> None:
        raise await self._child.wait_closed()

    async def _watch_progress(self) -> None:
        """Raises `EngineError` when the engine says nothing for `HANG_S` of samples that it has; a lease may last far
        longer. Without pieces silence is no sign."""
        looked_s = time.monotonic()
        while self._node.spec.piece_tokens:
            await asyncio.sleep(HANG_S / 10)
            now_s = time.monotonic()
            is_thawed, looked_s = now_s - looked_s > HANG_S / 3, now_s
            is_busy = any(work.num_running for work in self._leases.values()) and self._loading is None
            if is_thawed or not is_busy:  # this process itself may have stood still
                self._last_word_s = now_s
            elif now_s - self._last_word_s > HANG_S:
                for work in self._leases.values():
                    work.is_engine_lost = True
                raise EngineError(
                    "the engine hangs", why=f"no token came for {HANG_S:.0f} s", remedy="It is started again with less."
                )

    async def _route_events(self) -> None:
        while True:
            event = await self._child.next_event()
            self._last_word_s = time.monotonic()
            work = self._leases.get(LeaseId(event.lease_id))
            match event:
                case SlotAdvanced() if work is not None:
                    work.advance(event)
                case SlotFilled() if work is not None:
                    work.num_ended += 1
                    work.filled.put_nowait(event)

    def _stop_slot(self, lease_id: LeaseId, slot: SlotKey) -> None:
        if lease_id in self._leases:
            self._leases[lease_id].stop([slot])

    def _prolong(self, lease_id: LeaseId, remaining_s: float) -> None:
        if lease_id in self._leases:
            self._leases[lease_id].prolong(remaining_s)

    async def _carry_out(self, tasks: asyncio.TaskGroup) -> None:
        state = self._node.state
        while True:
            ticks = state.ticks
            match next_action(self._view()):
                case FetchVersion(version):
                    self._fetching = version
                    tasks.create_task(self._fetch(version))
                case LoadVersion(version):
                    self._loading = version
                    tasks.create_task(self._load(version))
                case AskForWork(num_slots):
                    self._num_asking += 1
                    tasks.create_task(self._ask(num_slots, tasks))
                case Wait(why, until_s):
                    state.activity = why
                    timeout_s = None if until_s is None else max(until_s - time.monotonic(), 0.01)
                    await state.wait_changed(ticks, timeout_s=timeout_s)

    def _view(self) -> RolloutView:
        node = self._node
        loaded = node.state.loaded
        num_generating = sum(work.is_generating for work in self._leases.values())
        return RolloutView(
            now_s=time.monotonic(),
            head=node.versions.head,
            version_ready=node.versions.ready,
            version_loaded=loaded[0] if loaded else None,
            # Leases that are only to be handed in cost the engine nothing, unless nobody takes them.
            num_outstanding=max(num_generating, len(self._leases) - MAX_OUTSTANDING),
            num_slots=self._lease_slots,
            num_running=sum(work.num_running for work in self._leases.values()),
            num_seats=node.state.num_seats or NUM_SEATS,
            num_asking=self._num_asking,
            fetching=self._fetching,
            loading=self._loading,
            rtt_s=self._ask_s,
            service_s=self._service_s,
            failed_until_s=self._failed_until_s,
            no_work_until_s=self._no_work_until_s,
            paused=self._reason_to_rest(),
            interrupt=node.spec.interrupt,
        )

    def _reason_to_rest(self) -> str:
        reason = self._node.state.unwilling
        return f"{reason}; {self._open_words()} end first" if reason and self.has_work else reason

    def _open_words(self) -> str:
        num_open = len(self._leases) + self._num_asking
        return f"{num_open} {'lease' if num_open == 1 else 'leases'}"

    async def _fetch(self, version: Version) -> None:
        try:
            await self._node.versions.make_ready(version)
            self._num_fetch_failures = 0
        except HexcombError as error:
            wait_s = backoff_s(self._num_fetch_failures, chance=random.random(), base_s=0.5)
            self._failed_until_s = time.monotonic() + wait_s
            self._num_fetch_failures += 1
            log.warning("version not fetched", version=version, why=error.sentence(), next_in_s=round(wait_s, 1))
        finally:
            self._fetching = None
            self._node.state.changed()

    async def _load(self, version: Version) -> None:
        started_s = time.monotonic()
        try:
            await self._swap(version)
        except WeightsUnfitError as error:  # the version before is served on
            log.warning("weight file does not fit, made anew", version=version, why=error.why)
            self._node.versions.forget_weights(version)
            await self._node.versions.make_ready(version)
            await self._swap(version)
        except EngineUntrustedError:  # the child has tried twice: the next one begins from checked chunks
            self._node.versions.forget_weights(version)
            raise
        self._loading = None
        self._note_loaded(version)
        log.info("version loaded", version=version, took_s=round(time.monotonic() - started_s, 3))

    async def _swap(self, version: Version) -> None:
        versions = self._node.versions
        order = Load(version, str(versions.weights_path(version)), versions.canary(version))
        loaded = await self._child.request(order, Loaded, deadline_s=LOAD_DEADLINE_S)
        self._node.state.canary_difference = loaded.difference

    def _note_loaded(self, version: Version) -> None:
        state = self._node.state
        state.loaded, state.trouble = (version, self._node.versions.root(version)), ""
        state.starting = None
        state.changed()
        self._node.session.beat_now()

    async def _ask(self, num_slots: int, tasks: asyncio.TaskGroup) -> None:
        version, root = self._node.state.loaded or (Version(-1), Digest(""))
        started_s = time.monotonic()
        try:
            lease = await self._node.control.lease_work(version=version, root=root, num_slots=num_slots)
            if not lease.slots:
                raise NoWorkError("the lease is empty")
            self._num_no_work, self._no_work_until_s = 0, 0.0
            self._ask_s = _smoothed(self._ask_s or None, time.monotonic() - started_s)
            self._begin(lease, tasks)
            log.info("lease granted", lease=lease.lease_id, num_slots=len(lease.slots), version=version)
        except RootMismatchError as error:
            raise EngineUntrustedError("the loaded weights are not the committed ones", why=error.why) from error
        except HexcombError as error:
            await self._note_no_work(error)
        finally:
            self._num_asking -= 1
            self._node.state.changed()

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        started_s = time.monotonic()
        if not any(work.is_generating for work in self._leases.values()):
            self._busy_since_s = started_s

        def note_generated() -> None:
            """Leases share the engine: what one costs it is the time since it was done with the one before."""
            now_s = time.monotonic()
            self._service_s = _smoothed(self._service_s, now_s - self._busy_since_s)
            self._busy_since_s = now_s
            self._lease_slots = next_lease_slots(len(lease.slots), took_s=now_s - started_s, asked=self._lease_slots)
            self._node.state.changed()

        work = LeaseWork(self._node, self._child, lease, self._sender, note_generated)
        self._leases[lease.lease_id] = work
        self._tasks[lease.lease_id] = tasks.create_task(self._fill(work))

    async def _note_no_work(self, error: HexcombError) -> None:
        """Waits a little longer each time; a node that is behind asks for the newest manifest itself."""
        wait_s = backoff_s(self._num_no_work, chance=random.random(), cap_s=MAX_NO_WORK_S)
        self._no_work_until_s = time.monotonic() + wait_s
        self._num_no_work += 1
        self._node.state.counts[f"no lease/{error.code}"] += 1
        if error.code not in ("NO_WORK", "VERSION_TOO_OLD"):
            log.warning("no lease", code=error.code, why=error.sentence())
        if error.code == "VERSION_TOO_OLD":
            try:
                announced = await self._node.control.get_manifest(None)
                self._node.versions.learn(announced.manifest)
            except HexcombError as trouble:
                log.warning("newest manifest not learnt", why=trouble.sentence())

    async def _fill(self, work: LeaseWork) -> None:
        started_s = time.monotonic()
        try:
            await work.run()
            took_s = round(time.monotonic() - started_s, 2)
            log.info("lease done", lease=work.lease.lease_id, num_taken=work.num_taken, took_s=took_s)
        finally:
            self._leases.pop(work.lease.lease_id, None)
            self._tasks.pop(work.lease.lease_id, None)
            self._node.state.changed()


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else 0.7 * known + 0.3 * measured
