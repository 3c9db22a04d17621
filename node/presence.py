"""How the node shows itself: hello and heartbeats to the coordinator, and its record in the directory.
Impure.

The record says the same as hello and heartbeat, signed by the node, for everyone; it expires by itself.
Invariant: a directory that is down costs the node nothing but its visibility there: the child is started
again, and meanwhile searches find nobody.
"""

import asyncio
import ipaddress
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from node import program
from node.backoff import Breaker, backoff_s
from node.control import ControlClient
from node.holders import recorded_holders
from node.home import Home
from node.joined import Joined
from node.settings import NodeSettings
from node.state import NodeState
from node.versions import Versions
from node.weights.fetch import Holder
from protocol.directory.client import Directory
from protocol.directory.messages import Start
from protocol.errors import HexcombError
from protocol.ids import Version
from protocol.record import DEFAULT_LIFETIME_MS, MAX_VERSIONS, OpenedRecord, Record, sign_record
from protocol.v1 import common_pb2, control_pb2

CLOCK_STEP_MS = 1_000
PUBLISH_EVERY_S = 20.0

log = structlog.get_logger("presence")


class Presence:
    """Builds what the node says of itself, and keeps its place in the directory."""

    def __init__(
        self,
        *,
        home: Home,
        joined: Callable[[], Joined],
        settings: NodeSettings,
        state: NodeState,
        versions: Versions,
        control: ControlClient,
    ) -> None:
        self._home, self._joined, self._settings = home, joined, settings
        self._state, self._versions, self._control = state, versions, control
        self._directory: Directory | None = None
        self._boot_id = secrets.token_hex(8)
        self.num_neighbours = 0

    def hello(self) -> control_pb2.Hello:
        """The first message of a session."""
        return control_pb2.Hello(
            program=f"hexcomb {program.version()}",
            name=public_name(self._settings.name),
            endpoint=self._state.endpoint,
            trainer_endpoint=self._state.trainer_endpoint,
            dht_addresses=self._directory.multiaddrs if self._directory else (),
            capability=self._capability(),
            boot_id=self._boot_id,
            unwilling=self._state.unwilling[:200],
            allowed_roles=() if self._settings.role == "auto" else (self._settings.role,),
        )

    def heartbeat(self) -> control_pb2.Heartbeat:
        """A sign of life, with what is true now."""
        version, root = self._state.loaded or (-1, "")
        return control_pb2.Heartbeat(
            version=version,
            root=root,
            versions_held=self._versions.held,
            activity=self._state.activity[:200],
            tokens_per_s=self._state.rate.per_s(now_s=time.monotonic()),
            trainer_endpoint=self._state.trainer_endpoint,
            engine=self._state.engine,
            unwilling=self._state.unwilling[:200],
        )

    @property
    def is_up(self) -> bool:
        """Whether the node is in the directory."""
        return self._directory is not None

    async def run(self) -> None:
        """Keeps the directory child running and the record fresh; until cancelled."""
        breaker = Breaker()
        while self._settings.directory:
            started_s = time.monotonic()
            try:
                await self._stay_in_directory()
            except HexcombError as error:
                log.warning("directory down", why=error.sentence())
            breaker = breaker.after_failure(ran_s=time.monotonic() - started_s)
            await asyncio.sleep(backoff_s(breaker.num_failures, chance=random.random(), base_s=1.0, cap_s=60.0))

    async def find_holders(self, version: Version) -> Sequence[Holder]:
        """Other nodes that say they serve the version; none while the directory is down."""
        records = await self._ask(lambda directory: directory.find_holders(version))
        return recorded_holders(records, but=self._home.peer_id)

    async def list_records(self) -> Sequence[OpenedRecord]:
        """All live records of the run, this node's own included."""
        return await self._ask(lambda directory: directory.list_records())

    async def _ask(self, question: Callable[[Directory], Awaitable[Sequence[OpenedRecord]]]) -> Sequence[OpenedRecord]:
        if self._directory is None:
            return ()
        try:
            return await question(self._directory)
        except HexcombError as error:
            log.warning("directory gave no answer", why=error.sentence())
            return ()

    async def _stay_in_directory(self) -> None:
        """One life of the child. Raises why it ended."""
        run_dir = self._home.runtime_folder()
        identity_path = run_dir / "libp2p.key"
        self._home.write_libp2p_identity(identity_path)
        start = Start(
            run_id=self._joined().run_id,
            coordinator_key=self._joined().coordinator_key,
            identity_path=str(identity_path),
            run_dir=str(run_dir),
            listen=(f"{multiaddr_host(self._settings.listen_host)}/tcp/0",),
            bootstraps=self._joined().bootstraps,
        )
        directory = await Directory.start(start, log_path=self._home.path / "logs" / "directory.log")
        self._directory = directory
        log.info("directory up", addresses=list(directory.multiaddrs))
        dying = asyncio.create_task(directory.wait_closed())
        publishing = asyncio.create_task(self._publish(directory, dialled=start.bootstraps))
        try:
            await asyncio.wait({dying, publishing}, return_when=asyncio.FIRST_COMPLETED)
            if publishing.done():
                publishing.result()
            raise dying.result()
        finally:
            self._directory, self.num_neighbours = None, 0
            dying.cancel()
            publishing.cancel()
            await directory.terminate(deadline_s=3.0)

    async def _publish(self, directory: Directory, *, dialled: tuple[str, ...]) -> None:
        """A fresh record every `PUBLISH_EVERY_S`, and at once when role, versions or endpoints change. `dialled` are
        the bootstraps that the child was started with; others may have been named while it started."""
        told: Record | None = None
        told_s, clock_ms = 0.0, 0
        while True:
            ticks = self._state.ticks
            dialled = await self._dial_new(directory, dialled)
            clock_ms = await self._tell_clock(directory, clock_ms)
            record = self._record()
            if told is None or _meaning(record) != _meaning(told) or time.monotonic() - told_s >= PUBLISH_EVERY_S:
                try:
                    signed = sign_record(self._home.identity, record, run_id=self._joined().run_id)
                    self.num_neighbours = await directory.publish(signed)
                except HexcombError as error:
                    log.warning("record not published", why=error.sentence())
                told, told_s = record, time.monotonic()
            await self._state.wait_changed(ticks, timeout_s=PUBLISH_EVERY_S / 4)
            await asyncio.sleep(0.5)  # what changes together is told once

    async def _tell_clock(self, directory: Directory, told_ms: int) -> int:
        """Tells the child the coordinator's clock once it is known, and when it has moved by a second; returns what the
        child goes by."""
        wanted_ms = self._state.clock_offset_ms
        if abs(wanted_ms - told_ms) < CLOCK_STEP_MS:
            return told_ms
        try:
            await directory.set_clock_offset(wanted_ms)
        except HexcombError as error:
            log.warning("clock not told", why=error.sentence())
            return told_ms
        return wanted_ms

    async def _dial_new(self, directory: Directory, dialled: tuple[str, ...]) -> tuple[str, ...]:
        """Enters the directory by bootstraps that the coordinator has named since; returns those dialled."""
        wanted = self._joined().bootstraps
        if wanted == dialled:
            return dialled
        try:
            await directory.set_bootstraps(wanted)
        except HexcombError as error:
            log.warning("bootstraps not dialled", why=error.sentence())
        return wanted

    def _record(self) -> Record:
        capability, now_ms = self._state.capability, self._state.now_ms()
        return Record(
            peer_id=self._home.peer_id,
            role=self._state.acting_role,
            device=capability.device[:48] if capability else "unmeasured",
            decode_tokens_per_s=capability.decode_tokens_per_s if capability else 0.0,
            train_tokens_per_s=capability.train_tokens_per_s if capability else 0.0,
            memory_bytes=capability.memory_bytes if capability else 0,
            link_mbit_per_s=0.0,
            rtt_ms=self._control.rtt_s * 1000,
            endpoint=self._state.endpoint,
            trainer_endpoint=self._state.trainer_endpoint,
            versions=tuple(self._versions.held[-MAX_VERSIONS:]),
            issued_ms=now_ms,
            expires_ms=now_ms + DEFAULT_LIFETIME_MS,
            stamp=self._joined().stamp,
        )

    def _capability(self) -> common_pb2.Capability | None:
        if self._state.capability is None or not self._settings.capability_in_hello:
            return None
        return self._state.capability.message(rtt_ms=self._control.rtt_s * 1000, reachable=bool(self._state.endpoint))


def public_name(name: str) -> str:
    """The owner's name for the node in the alphabet that the status page takes: a-z, 0-9 and "-", 32 at
    most."""
    plain = "".join(character if character.isascii() and character.isalnum() else "-" for character in name.lower())
    return plain.strip("-")[:32]


def multiaddr_host(host: str) -> str:
    """The host part of a multiaddress to listen on; a name listens on all IPv4 interfaces."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "/ip4/0.0.0.0"
    return f"/ip{address.version}/{address}"


def _meaning(record: Record) -> tuple[object, ...]:
    return (record.role, record.endpoint, record.trainer_endpoint, record.versions, record.device, record.stamp)
