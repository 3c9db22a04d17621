"""Two runs on one DHT, each the other's way in, with a node whose key has a place in both: nothing passes from one to
the other, be it a record, a leaf, a lease, a signed token, a manifest or a chunk.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from coordinator.grader import Grader
from coordinator.home import CoordinatorHome
from coordinator.server import Coordinator
from coordinator.settings import parse_run_file
from node.control import ControlClient
from node.home import Home
from node.join import join
from node.joined import Joined, read_joined, read_leaf
from node.weights.blobs import BlobStore
from node.weights.fetch import Holder, fetch_manifest, fetch_version
from node.weights.service import WeightService
from protocol.certificates import Leaf
from protocol.directory.client import Directory
from protocol.directory.messages import Start
from protocol.errors import HexcombError, ManifestRefusedError, RecordRefusedError, UnreachableError
from protocol.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from protocol.ids import Version
from protocol.invite import encode_invite
from protocol.keys import Identity
from protocol.manifest import SignedManifest, open_manifest
from protocol.record import Record, sign_record
from protocol.tls import ServedLeaf, channel_credentials, channel_options, server_credentials
from protocol.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server
from tests.coordinator.office import SUMS, Clock, Member, Office, run_content, write_base

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 20.0
CONTENT = b"the bytes of a chunk"


@dataclass
class Party:
    """One run: its coordinator, a trainer with a place in the DHT, and a rollout node whose key is the same in both
    runs."""

    office: Office
    trainer: Member
    double: Member
    directory: Directory
    raw_record: bytes

    @property
    def key(self) -> bytes:
        return self.office.home.identity.public_bytes

    async def manifest(self) -> SignedManifest:
        signed = await self.office.coordinator.authority.manifest(Version(0))
        assert signed is not None
        return signed

    def dial_as(self, leaf: Leaf) -> ControlClient:
        """The coordinator's control service, for whoever shows this leaf."""
        return ControlClient(
            addresses=[self.office.coordinator.addresses["control"]], coordinator_key=self.key, leaf=leaf
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parties() -> AsyncIterator[tuple[Party, Party]]:
    folder = Path(tempfile.mkdtemp(prefix="hx-"))  # short, since sockets live below it
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        base = write_base(folder / "base")
        grader = Grader(SUMS, model_dir=base, run_dir=folder / "run", log_path=folder / "grader.log")
        await stack.enter_async_context(grader)
        first, second = await asyncio.gather(
            stack.enter_async_context(serving(grader, base, folder / "a")),
            stack.enter_async_context(serving(grader, base, folder / "b")),
        )
        entrances = [await office.until(office.coordinator._bootstraps) for office in (first, second)]
        await first.coordinator._directory.set_bootstraps(entrances[1])
        other_home = folder / "double"
        double = await first.join(role="rollout")
        other_home.mkdir(mode=0o700)
        shutil.copy(double.home.path / "identity.key", other_home)
        again = await join_with(second, Home.open(other_home))
        both = await asyncio.gather(
            stack.enter_async_context(party(first, double, entrances[1])),
            stack.enter_async_context(party(second, again, entrances[0])),
        )
        yield both[0], both[1]


@contextlib.asynccontextmanager
async def serving(grader: Grader, base: Path, folder: Path) -> AsyncIterator[Office]:
    """A coordinator with its directory."""
    home, stop, clock = CoordinatorHome.ensure(folder), asyncio.Event(), Clock()
    coordinator: Any = Coordinator(home, parse_run_file(run_content(base)), clock=clock)
    office = Office(coordinator, home, clock, lambda: Path(tempfile.mkdtemp(dir=folder)))
    running = asyncio.create_task(coordinator.run(grader, stop))
    try:
        await office.until(lambda: running.done() or not coordinator.ready)
        yield office
    finally:
        for member in office.members:
            await member.close()
        stop.set()
        async with asyncio.timeout(WAIT_S):
            await running


async def join_with(office: Office, home: Home) -> Member:
    """A node that has a key already joins."""
    joined = await join(home, encode_invite(await office.invite(role="rollout")))
    control = ControlClient(
        addresses=joined.control_addresses, coordinator_key=joined.coordinator_key, leaf=read_leaf(home)
    )
    office.members.append(Member(office, home, control))
    return office.members[-1]


@contextlib.asynccontextmanager
async def party(office: Office, double: Member, entrance: list[str]) -> AsyncIterator[Party]:
    """The nodes of a run in their roles; the trainer enters the DHT by the other run's coordinator."""
    trainer = await office.join(role="trainer")
    for member in (trainer, double):
        await member.hello()
        member.load(*office.head)
    await office.until(lambda: office.core.state.roles.get(double.identity.peer_id) == "rollout")
    joined, identity, run_dir = read_joined(trainer.home), trainer.identity, trainer.home.runtime_folder()
    identity_path = run_dir / "libp2p.key"
    identity_path.write_bytes(identity.libp2p_bytes())
    identity_path.chmod(0o400)
    start = Start(
        run_id=joined.run_id,
        coordinator_key=joined.coordinator_key,
        identity_path=str(identity_path),
        run_dir=str(run_dir),
        bootstraps=tuple(entrance),
    )
    directory = await Directory.start(start, log_path=trainer.home.path / "directory.log")
    try:
        yield Party(
            office, trainer, double, directory, sign_record(identity, record_of(joined, identity), run_id=joined.run_id)
        )
    finally:
        await directory.terminate()


def record_of(joined: Joined, identity: Identity) -> Record:
    """What a trainer that holds version 0 says of itself."""
    now_ms = int(time.time() * 1000)
    return Record(
        peer_id=identity.peer_id,
        role="trainer",
        device="CPU",
        decode_tokens_per_s=1.0,
        train_tokens_per_s=1.0,
        memory_bytes=1,
        link_mbit_per_s=1.0,
        rtt_ms=1.0,
        endpoint="192.0.2.7:7001",
        trainer_endpoint="",
        versions=(Version(0),),
        issued_ms=now_ms,
        expires_ms=now_ms + 60_000,
        stamp=joined.stamp,
    )


async def test_each_run_sees_its_own_nodes_in_a_dht_that_both_use(parties: tuple[Party, Party]) -> None:
    for one in parties:
        await one.directory.publish(one.raw_record)
    for one, other in (parties, parties[::-1]):
        mine, theirs = one.trainer.identity.peer_id, other.trainer.identity.peer_id
        mine_alone = {mine}
        coordinators = one.office.coordinator._directory
        assert coordinators is not None
        async with asyncio.timeout(WAIT_S):
            while {r.record.peer_id for r in await coordinators.list_records()} != mine_alone:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await one.directory.status()).num_neighbours >= 2, "they are not in one DHT"
        assert {r.record.peer_id for r in await one.directory.list_records()} == mine_alone
        assert {r.record.peer_id for r in await one.directory.find_holders(Version(0))} == mine_alone
        assert theirs not in one.office.core.state.nodes
        assert theirs not in one.office.core.soft.capabilities
        with pytest.raises(RecordRefusedError):
            await one.directory.publish(other.raw_record)


async def test_leaf_of_the_other_run_opens_nothing(parties: tuple[Party, Party]) -> None:
    """Though its key has a place in both."""
    for one, other in (parties, parties[::-1]):
        assert one.double.identity.peer_id == other.double.identity.peer_id
        before, version = one.office.state(), one.office.head
        stranger, member = one.dial_as(read_leaf(other.double.home)), one.dial_as(read_leaf(one.double.home))
        try:
            with pytest.raises(UnreachableError):
                await stranger.lease_work(version=version[0], root=version[1], num_slots=1)
            with pytest.raises(UnreachableError):
                await stranger.get_manifest(None)
            assert one.office.state() == before
            assert (await member.get_manifest(None)).manifest == await one.manifest()
        finally:
            await stranger.close()
            await member.close()


async def test_lease_and_signed_tokens_of_the_other_run_count_for_nothing(parties: tuple[Party, Party]) -> None:
    """The slots of both have the same names, and the same node leases them."""
    leases = [await one.double.lease(2) for one in parties]
    assert [work.slot for work in leases[0].slots] == [work.slot for work in leases[1].slots]
    for (one, mine), (other, theirs) in (
        ((parties[0], leases[0]), (parties[1], leases[1])),
        ((parties[1], leases[1]), (parties[0], leases[0])),
    ):
        slot = mine.slots[0].slot
        good, foreign = one.double.rollout(slot), other.double.rollout(slot)
        before = one.office.state()
        assert good != foreign
        assert await one.double.outcome(mine, foreign) == "UNAUTHENTICATED"
        assert await one.double.outcome(theirs, good) == "LEASE_UNKNOWN"
        assert one.office.state() == before
        assert await one.double.outcome(mine, good) == "ACCEPTED"


async def test_weights_of_the_other_run_are_neither_served_nor_believed(
    parties: tuple[Party, Party], tmp_path: Path
) -> None:
    first, second = parties
    mine, theirs = await first.manifest(), await second.manifest()
    for key in (first.key, second.key):
        with pytest.raises(ManifestRefusedError):
            open_manifest(theirs, coordinator_key=key, run_id=first.office.home.run_id)
    blobs = BlobStore(tmp_path / "served")
    body = replace(open_manifest(mine, coordinator_key=first.key, run_id=first.office.home.run_id).body, files=())
    body = replace(body, chunks=(blobs.put(CONTENT.ljust(sum(t.num_bytes for t in body.tensors))),))
    async with holding(first, WeightService(blobs, lambda version: mine)) as holder:
        for leaf, is_member in ((first.double, True), (second.double, False)):
            store = BlobStore(tmp_path / str(is_member))
            opening = channel_of(first.key, read_leaf(leaf.home))
            if is_member:
                assert await fetch_manifest(holder, Version(0), channel_factory=opening, deadline_s=5) == mine
                await fetch_version(body, holders=[holder], blobs=store, channel_factory=opening, deadline_s=5)
            else:
                with pytest.raises(HexcombError):
                    await fetch_manifest(holder, Version(0), channel_factory=opening, deadline_s=5)
                with pytest.raises(UnreachableError):
                    await fetch_version(body, holders=[holder], blobs=store, channel_factory=opening, deadline_s=5)
            assert list(store.digests()) == list(body.chunks if is_member else ())


@contextlib.asynccontextmanager
async def holding(party: Party, service: WeightService) -> AsyncIterator[Holder]:
    """The trainer's weight service."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_PeerServiceServicer_to_server(service, server)
    credentials = server_credentials(ServedLeaf(read_leaf(party.trainer.home)), coordinator_key=party.key)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield Holder(party.trainer.identity.peer_id, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


def channel_of(coordinator_key: bytes, leaf: Leaf) -> Callable[[Holder], grpc.aio.Channel]:
    """How a node with this leaf dials a holder."""

    def opening(holder: Holder) -> grpc.aio.Channel:
        credentials = channel_credentials(leaf, coordinator_key=coordinator_key)
        options = [*CLIENT_OPTIONS, *channel_options(holder.peer_id)]
        return grpc.aio.secure_channel(holder.endpoint, credentials, options=options)

    return opening
