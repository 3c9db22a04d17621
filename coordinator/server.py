"""The coordinator's process: puts the parts together, listens, and stops in order. Impure.

One task group holds everything; a part that fails ends the process, and a restart on the same home goes on where the
journal ends. Ports that were free at the first start are kept, so that nodes find the coordinator again.
"""

import asyncio
import contextlib
import gc
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from coordinator import canary
from coordinator.announcements import Announcer
from coordinator.authority import Authority
from coordinator.base import read_base, read_base_canary, read_square_cost
from coordinator.control_service import ControlService
from coordinator.core.events import BaseRegistered, CapabilityLearned, CoordinatorStarted, InviteCreated, TimerFired
from coordinator.core.facts import VersionCommitted
from coordinator.core.handle import Core
from coordinator.evaluations import Evaluations
from coordinator.grader import Grader
from coordinator.hearsay import capability_in
from coordinator.home import CoordinatorHome
from coordinator.http import make_app, serve_http
from coordinator.join_service import JoinService, Registrar
from coordinator.journal import Journal
from coordinator.journal_schema import environment_digest
from coordinator.office import Office
from coordinator.pieces import PieceStore
from coordinator.reporting import Reporter
from coordinator.scoring import Scoring
from coordinator.sessions import Sessions
from coordinator.settings import RunFile
from coordinator.work_service import WorkService
from protocol.certificates import self_issued_leaf
from protocol.directory.client import Directory
from protocol.directory.messages import Start
from protocol.errors import HexcombError, NotEnrolledError, PortInUseError, UsageError
from protocol.grpc_options import JOIN_SERVER_OPTIONS, SERVER_OPTIONS
from protocol.ids import Digest, InviteId
from protocol.invite import Invite, encode_invite, stored_secret
from protocol.local_socket import answering
from protocol.manifest import Manifest, Seal, SignedManifest, sign_manifest
from protocol.private_files import write_private
from protocol.tls import ServedLeaf, join_server_credentials, server_credentials
from protocol.tokens import load_tokenizer
from protocol.v1 import control_pb2_grpc, join_pb2_grpc

TIMER_S, LARGE_TIMER_S = 0.1, 1.0
LARGE = 2_000
"""With more nodes and leases than this a look at all of them takes milliseconds, and comes less often."""

DIRECTORY_POLL_S = 3.0
LEAF_RENEWAL_S = 6 * 3600.0
NUM_INVITE_SECRET_BYTES = 16

log = structlog.get_logger()


def clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Coordinator:
    """One running coordinator. `addresses` says where it listens, `ready` in a sentence what it still waits for."""

    def __init__(self, home: CoordinatorHome, run: RunFile, *, clock: Callable[[], int] = clock_ms) -> None:
        self._home, self._run, self._clock = home, run, clock
        self._body = read_base(run.base, home)
        square_cost = read_square_cost(run.base, self._body)
        self._rules = run.rules(home.run_id, load_tokenizer(run.base), square_cost=square_cost)
        pin = environment_digest(self._rules.spec)
        self._journal = Journal(home.journal, run_id=home.run_id, environment=pin)
        core = Core(self._rules, self._journal.reader.recover())
        self.authority = Authority(core, self._journal, clock=clock, sealer=self._seal)
        self.pieces = PieceStore(home.pieces, self.authority, self._rules.spec)
        self.sessions = Sessions()
        self._directory: Directory | None = None
        self.ready = "the coordinator is starting\n"
        self.addresses = home.read_addresses()  # of the last start, until each is bound anew

    async def serve(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises the error of the tree that ended it before."""
        raise_file_limit()
        tune_interpreter()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        grader = Grader(
            self._run.environment,
            model_dir=self._run.base,
            run_dir=self._home.runtime_folder,
            log_path=self._home.path / "grader.log",
            plan=self._run.rewards(hidden=[self._home.path]),
        )
        async with grader:
            await canary.check(grader, is_allowed=self._run.task.allow_fooled_grader)
            await self.run(grader, stop)

    async def run(self, grader: Grader, stop: asyncio.Event) -> None:
        """Serves until `stop` is set; the journal is closed then. Raises the error of the tree that ended it before."""
        try:
            self._journal.pin_prompts(grader.digest)
            async with asyncio.TaskGroup() as tasks:
                deciding = tasks.create_task(self.authority.run())
                await self.authority.submit(CoordinatorStarted())
                await self.authority.submit(BaseRegistered(self._body, read_base_canary(self._run.base)))
                parts = await self._listen(tasks, grader)
                async with answering(self._home.socket, {"invite": self._create_invite}):
                    self.ready = ""
                    log.info("coordinator ready", run=self._run.name, page=self.addresses["status"])
                    await stop.wait()
                for part in parts:
                    part.cancel()
                await asyncio.wait(parts)  # whoever is being answered still needs decisions
                deciding.cancel()
        except* HexcombError as group:
            ended_by: HexcombError | None = first_of(group)
        else:
            ended_by = None
        finally:
            self._journal.close()
            self.pieces.close()
        if ended_by is not None:
            raise ended_by

    async def _listen(self, tasks: asyncio.TaskGroup, grader: Grader) -> list[asyncio.Task[None]]:
        """Opens every port and starts what serves them."""
        scoring = Scoring(self.authority, grader)
        evaluations = Evaluations(self.authority, grader, num_tasks=self._run.evaluation.tasks)
        if self._run.evaluation.every:
            if grader.is_multi_turn:
                raise UsageError(
                    "`evaluation.every` cannot be used with this environment",
                    why="held-out tasks are completed by trainers, whom no environment replies to",
                    remedy="Set it to 0, or leave `reply` out of the environment.",
                )
            await evaluations.prompts()  # an environment without held-out tasks ends the start, not the run
        registrar = Registrar(self._home, self.authority, self._clock)
        announcer = Announcer(
            self._home, self._rules.spec, self.authority, self.sessions, scoring, evaluations, self._clock
        )
        announcer.bootstraps = self._bootstraps
        office = Office(
            home=self._home,
            spec=self._rules.spec,
            authority=self.authority,
            registrar=registrar,
            sessions=self.sessions,
            announcer=announcer,
            grader=grader,
            evaluations=evaluations,
            pieces=self.pieces,
            clock=self._clock,
        )
        work = WorkService(office)
        leaf = ServedLeaf(self_issued_leaf(self._home.identity, now_ms=self._clock()))
        control = grpc.aio.server(options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(office, work), control)
        key = self._home.identity.public_bytes
        join = grpc.aio.server(options=JOIN_SERVER_OPTIONS, maximum_concurrent_rpcs=64)
        service = JoinService(
            self._home,
            self.authority,
            registrar,
            control_addresses=self._control_addresses,
            bootstraps=self._bootstraps,
        )
        join_pb2_grpc.add_JoinServiceServicer_to_server(service, join)
        status = self._bind(self._run.listen.status_host, "status", self._run.listen.status_port)
        self._open(control, "control", self._run.listen.control_port, server_credentials(leaf, coordinator_key=key))
        self._open(join, "join", self._run.listen.join_port, join_server_credentials(leaf))
        host, port = status.getsockname()[:2]
        self.addresses["status"] = f"http://{host}:{port}/"
        reporter = Reporter(self.authority, self._run, refused=work.refused, clock=self._clock)
        app = make_app(report=reporter.report, ready=lambda: self.ready)
        await control.start()
        await join.start()
        parts = [
            self._carry_out(announcer), scoring.run(), self.pieces.run(), self._tick(), self._renew(leaf),
            self._follow_directory(announcer), serve_http(app, status), canary.watch(grader),
            _until_cancelled(control, join),
        ]  # fmt: skip
        started = [tasks.create_task(part) for part in parts]
        self._home.write_addresses(self.addresses)
        return started

    def _open(self, server: grpc.aio.Server, name: str, wish: int, credentials: grpc.ServerCredentials) -> None:
        host = self._run.listen.host
        port = wish or self._earlier_port(name)
        try:
            bound = server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise _port_in_use(name, host, port) from error
        self.addresses[name] = f"{host}:{bound}"

    def _bind(self, host: str, name: str, wish: int) -> socket.socket:
        port = wish or self._earlier_port(name)
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise _port_in_use(name, host, port) from error

    def _earlier_port(self, name: str) -> int:
        """The port of the last start, or 0 for any."""
        known = self.addresses.get(name, "").rstrip("/").rpartition(":")[2]
        return int(known) if known.isdecimal() else 0

    def _control_addresses(self) -> list[str]:
        port = self.addresses["control"].rpartition(":")[2]
        return [f"{host}:{port}" for host in self._run.listen.advertise] or [self.addresses["control"]]

    def _join_addresses(self) -> tuple[str, ...]:
        port = self.addresses["join"].rpartition(":")[2]
        return tuple(f"{host}:{port}" for host in self._run.listen.advertise) or (self.addresses["join"],)

    def _bootstraps(self) -> list[str]:
        return list(self._directory.multiaddrs) if self._directory is not None else []

    async def _carry_out(self, announcer: Announcer) -> None:
        while True:
            effect = await self.authority.effects.get()
            try:
                await announcer.carry_out(effect)
            except HexcombError as error:
                log.error("an effect failed", effect=type(effect).__name__, error=error.sentence())

    async def _tick(self) -> None:
        while True:
            await self.authority.submit(TimerFired())
            core = self.authority.core
            is_large = len(core.state.leases) + len(core.soft.live) > LARGE
            await asyncio.sleep(LARGE_TIMER_S if is_large else TIMER_S)

    async def _renew(self, leaf: ServedLeaf) -> None:
        while True:
            await asyncio.sleep(LEAF_RENEWAL_S)
            leaf.replace(self_issued_leaf(self._home.identity, now_ms=self._clock()))

    async def _follow_directory(self, announcer: Announcer) -> None:
        """Keeps a bootstrap in the DHT, and learns from it what nodes can do; without the library it says so once."""
        while True:
            try:
                self._directory = await self._start_directory()
                self.sessions.broadcast(announcer.welcome())  # whoever came before it was up learns where it is
                await self._read_directory(self._directory)
            except (HexcombError, TimeoutError) as error:
                log.warning("no directory", why=str(error))
            finally:
                if self._directory is not None:
                    await self._directory.terminate()
                self._directory = None
            await asyncio.sleep(10 * DIRECTORY_POLL_S)

    async def _start_directory(self) -> Directory:
        identity = self._home.runtime_folder / "p2p.key"
        write_private(identity, self._home.identity.libp2p_bytes(), mode=0o400)
        port = self._run.listen.dht_port or self._earlier_port("dht")
        start = Start(
            run_id=self._home.run_id,
            coordinator_key=self._home.identity.public_bytes,
            identity_path=str(identity),
            run_dir=str(self._home.runtime_folder),
            listen=(f"/ip4/{self._run.listen.host}/tcp/{port}",),
        )
        directory = await Directory.start(start, log_path=self._home.path / "directory.log")
        known = next((address for address in directory.multiaddrs if "/tcp/" in address), "")
        self.addresses["dht"] = f"{self._run.listen.host}:{known.split('/tcp/')[1].split('/')[0]}" if known else ""
        self._home.write_addresses(self.addresses)
        return directory

    async def _read_directory(self, directory: Directory) -> None:
        while True:
            for opened in await directory.list_records():
                capability = capability_in(opened.record)
                if capability is None:
                    continue
                with contextlib.suppress(NotEnrolledError):  # stamped before this journal was begun
                    await self.authority.submit(CapabilityLearned(opened.record.peer_id, capability))
            await asyncio.sleep(DIRECTORY_POLL_S)

    async def _create_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        """The verb behind `invite create`."""
        secret, invite_id = secrets.token_bytes(NUM_INVITE_SECRET_BYTES), InviteId(secrets.token_hex(8))
        expires_ms = self._clock() + int(request["expires_s"] * 1000)
        invite = Invite(
            run_id=self._home.run_id,
            coordinator_key=self._home.identity.public_bytes,
            invite_id=invite_id,
            secret=secret,
            expires_s=expires_ms // 1000,
            role=request["role"],
            addresses=self._join_addresses(),
            bootstraps=tuple(self._bootstraps()),
        )
        try:
            text = encode_invite(invite)
        except ValueError as error:
            raise UsageError("the invite was not made", why=str(error)) from error
        event = InviteCreated(invite_id, stored_secret(secret).hex(), request["uses"], expires_ms, request["role"])
        await self.authority.submit(event)
        return {"invite": text}

    def _seal(self, fact: VersionCommitted, previous: Digest | None, now_ms: int) -> SignedManifest:
        seal = Seal(self._home.seed_secret(fact.version), previous, now_ms, fact.canary)
        return sign_manifest(self._home.identity, Manifest(fact.body, seal))


def _port_in_use(name: str, host: str, port: int) -> PortInUseError:
    return PortInUseError(
        f"the {name} port {host}:{port} cannot be had",
        why="another program holds it, or the address is not this machine's",
        remedy=f"Stop that program, or set `listen.{name}_port` in the run file.",
    )


def raise_file_limit() -> None:
    """Each node holds a connection: as many files as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_interpreter() -> None:
    """The state is large and has no cycles: looking through it for some costs a tenth of a busy coordinator's time, and
    lists of all leases, made and gone at once, must not be taken for growth."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def first_of(group: BaseExceptionGroup[HexcombError]) -> HexcombError:
    """The first error in a group of groups."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _until_cancelled(*servers: grpc.aio.Server) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            await server.stop(grace=1.0)
