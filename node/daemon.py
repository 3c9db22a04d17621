"""The daemon: puts the parts of a node together and keeps them going until it is told to stop. Impure.

One task group holds session, presence, peer service, socket and work. Invariants: nothing that a
coordinator, a peer or a child does ends the daemon, which answers `status` all the while; at its end leases
are given back and no child is left.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import assert_never

import grpc
import structlog

from node.bandwidth import Throttle
from node.context import Node
from node.control import ControlClient
from node.holders import announced_holders
from node.home import Home
from node.join import join
from node.joined import Joined, read_joined, read_leaf
from node.optimizer_state import moments_file
from node.orders import (
    EvaluationRequested,
    LeasesCancelled,
    Order,
    RoleAssigned,
    RoundAborted,
    RoundSealed,
    VersionAnnounced,
    Welcome,
)
from node.owner import OwnerWatch
from node.presence import Presence
from node.renewal import Renewal, is_expired
from node.session import Session
from node.settings import NodeSettings
from node.socket import verbs_of
from node.state import NodeState
from node.surroundings import Surroundings
from node.versions import Versions
from node.weights.fetch import Holder
from node.weights.service import WeightService
from node.work import Work
from protocol.child_serve import leave
from protocol.errors import HexcombError, PortInUseError
from protocol.grpc_options import SERVER_OPTIONS
from protocol.ids import Version
from protocol.local_socket import answering
from protocol.tls import ServedLeaf, server_credentials
from protocol.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server

STOP_DEADLINE_S = 10.0
"""After it the process leaves at once; the kernel ends its children, and leases expire."""
SAME_SIGNAL_S = 1.0
"""A wrapper and its group may both pass the same signal on; only a later one means impatience."""

log = structlog.get_logger("daemon")


class Daemon:
    """One running node."""

    def __init__(self, home: Home, joined: Joined, settings: NodeSettings) -> None:
        state, served = NodeState(), ServedLeaf(read_leaf(home))
        control = ControlClient(
            addresses=joined.control_addresses, coordinator_key=joined.coordinator_key, leaf=served.leaf
        )
        versions = Versions(
            home,
            run_id=joined.run_id,
            coordinator_key=joined.coordinator_key,
            leaf=lambda: served.leaf,
            find=self._find_holders,
            throttle=Throttle(settings.limits.download_mbit_per_s),
        )
        presence = Presence(
            home=home,
            joined=lambda: self.node.joined,
            settings=settings,
            state=state,
            versions=versions,
            control=control,
        )
        session = Session(control, hello=presence.hello, heartbeat=presence.heartbeat, deliver=self._deliver)
        self.node = Node(home, joined, settings, served, state, control, versions, presence, session)
        self.work = Work(self.node)
        limits = settings.limits
        self._owner = OwnerWatch(
            state,
            Surroundings(limits.standing(), limits.idle_cpu_share),
            memory_bytes=limits.memory_bytes,
            on_change=session.beat_now,
        )
        self._stop = asyncio.Event()
        self.answers = asyncio.Event()
        self.was_interrupted, self._told_s = False, 0.0

    def stop(self) -> None:
        """Asks the daemon to end; it takes up to `STOP_DEADLINE_S` seconds."""
        self._stop.set()

    def finish(self, *, deadline_s: float | None) -> None:
        """Asks the daemon to take no new work, to complete what it has, for `deadline_s` seconds at the most, and to
        end then."""
        state = self.node.state
        state.finishing = True
        state.finish_by_s = None if deadline_s is None else time.monotonic() + deadline_s
        log.info("node is to finish", deadline_s=deadline_s, num_leases=self.work.num_leases)
        state.changed()
        self.node.session.beat_now()

    async def run(self) -> None:
        """Until `stop`, SIGTERM or SIGINT; a second signal, later, ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        async with AsyncExitStack() as stack:
            server = await self._serve_peers()
            stack.push_async_callback(server.stop, 1.0)
            stack.push_async_callback(self.node.control.close)
            await stack.enter_async_context(answering(self.node.home.socket, verbs_of(self)))
            self.answers.set()
            await self._keep_going()
        log.info("node stopped")

    async def _find_holders(self, version: Version) -> Sequence[Holder]:
        """Who holds a version now: as the coordinator says, if it does, and as the directory says."""
        named: tuple[Holder, ...] = ()
        try:
            announced = await self.node.control.get_manifest(version)
            named = announced_holders(announced.holders, but=self.node.peer_id)
        except HexcombError as error:
            log.info("coordinator names no holders", version=version, why=error.sentence())
        return (*named, *await self.node.presence.find_holders(version))

    async def _keep_going(self) -> None:
        node = self.node
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(part)
                for part in (
                    node.session.run(),
                    node.presence.run(),
                    self.work.run(),
                    Renewal(node).run(),
                    self._owner.run(),
                    self._finish_when_told(),
                )
            ]
            await self._stop.wait()
            node.state.activity = "stopping"
            log.info("node stopping")
            for task in running:
                task.cancel()
            asyncio.get_running_loop().call_later(STOP_DEADLINE_S, self._give_up)

    async def _finish_when_told(self) -> None:
        state = self.node.state
        while not state.finishing:
            await state.wait_changed(state.ticks)
        await self.work.wait_until_idle(lambda: state.finish_by_s)
        log.info("node has finished", num_leases_given_back=self.work.num_leases)
        self.stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self.was_interrupted, self._told_s = number == signal.SIGINT, time.monotonic()
            self._stop.set()
        elif time.monotonic() - self._told_s > SAME_SIGNAL_S:
            leave(128 + number)

    def _give_up(self) -> None:
        log.error("node did not stop in time, leaving", deadline_s=STOP_DEADLINE_S)
        leave(1)

    async def _serve_peers(self) -> grpc.aio.Server:
        """Serves chunks and manifests on any free port of the listening address."""
        node = self.node
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=256)
        throttle = Throttle(node.settings.limits.upload_mbit_per_s)
        service = WeightService(
            node.versions.blobs,
            node.versions.signed,
            moments_of=lambda version: moments_file(node.home, version),
            throttle=throttle,
        )
        add_PeerServiceServicer_to_server(service, server)
        credentials = server_credentials(node.served, coordinator_key=node.joined.coordinator_key)
        try:
            port = server.add_secure_port(f"{node.settings.listen_host}:0", credentials)
        except RuntimeError as error:
            raise PortInUseError(
                f"the node cannot listen on {node.settings.listen_host}",
                why=str(error),
                remedy="Choose an address of this machine with --listen.",
            ) from error
        await server.start()
        node.state.endpoint = f"{node.settings.listen_host}:{port}"
        return server

    async def _deliver(self, order: Order) -> None:
        """Writes down what the coordinator said; whoever acts on it wakes by the change."""
        try:
            self._note(order)
        except HexcombError as error:
            log.warning("order refused", order=type(order).__name__, code=error.code, why=error.sentence())
        self.node.state.changed()

    def _note(self, order: Order) -> None:
        node, state = self.node, self.node.state
        match order:
            case Welcome(spec, now_ms, epoch, bootstraps):
                state.spec, state.epoch = spec, epoch
                node.note_bootstraps(bootstraps)
                state.clock_offset_ms = now_ms - int(time.time() * 1000)
            case RoleAssigned():
                self._note_role(order)
            case VersionAnnounced(signed, holders):
                others = announced_holders(holders, but=node.peer_id)
                manifest = node.versions.learn(signed, others)
                self._note_head(manifest.body.version)
                self.work.on_version()
            case RoundSealed():
                self.work.on_plan(order)
            case RoundAborted():
                self.work.on_abort(order)
            case EvaluationRequested():
                self.work.on_evaluation(order)
            case LeasesCancelled(lease_ids, slots):
                self.work.cancel(lease_ids, slots)
            case _:
                assert_never(order)

    def _note_role(self, order: RoleAssigned) -> None:
        """Takes the role, unless the owner allows another one alone, which a coordinator that is older does not know:
        then the node passes weights on."""
        role, reason, wish = order.role, order.reason, self.node.settings.role
        if wish not in ("auto", role) and role != "idle":
            role, reason = "idle", f"its owner allows only {wish}, and the coordinator wants a {order.role}"
        if role != self.node.state.role:
            log.info("role", role=role, reason=reason)
        self.node.state.role, self.node.state.role_reason = role, reason

    def _note_head(self, version: Version) -> None:
        if self.node.state.head is None or version > self.node.state.head:
            self.node.state.head = version
            log.info("version announced", version=version)


async def run_daemon(home: Home, settings: NodeSettings) -> bool:
    """Runs the node of a joined home until it is told to stop; whether that was by an interrupt from the
    terminal.

    Raises `NotJoinedError`, `HomeInUseError`, `PortInUseError`.
    """
    with home.hold():
        joined = read_joined(home)
        if is_expired(read_leaf(home), coordinator_key=joined.coordinator_key, now_ms=int(time.time() * 1000)):
            log.info("TLS leaf has expired, redeeming the invite again")
            joined = await join(home, joined.invite)
        daemon = Daemon(home, joined, settings)
        await daemon.run()
        return daemon.was_interrupted
