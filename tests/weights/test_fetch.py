"""Fetching from several holders over real TLS, honest and otherwise."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from node.weights import fetch as fetching
from node.weights.blobs import BlobStore
from node.weights.content import body_of, content
from node.weights.fetch import Holder, fetch_manifest, fetch_version
from node.weights.service import MESSAGE_BYTES, UnservedPeer, WeightService
from protocol.errors import ChunkMissingError, NoWorkError, UnreachableError, VersionFromFutureError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from protocol.ids import Digest, Version
from protocol.manifest import Body, SignedManifest
from protocol.tls import ServedLeaf, channel_credentials, channel_options, server_credentials
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub, add_PeerServiceServicer_to_server
from tests.training.trainers import COORDINATOR, person

ME = person(0)
TENSORS = {"w": np.random.default_rng(0).normal(size=40_000).astype(np.float32)}
CHUNK_BYTES = 16_384


def open_channel(holder: Holder) -> grpc.aio.Channel:
    credentials = channel_credentials(ME.leaf, coordinator_key=COORDINATOR.public_bytes)
    options = [*CLIENT_OPTIONS, *channel_options(holder.peer_id)]
    return grpc.aio.secure_channel(holder.endpoint, credentials, options=options)


@asynccontextmanager
async def serving(number: int, service: UnservedPeer) -> AsyncIterator[Holder]:
    who = person(number)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_PeerServiceServicer_to_server(service, server)
    credentials = server_credentials(ServedLeaf(who.leaf), coordinator_key=COORDINATOR.public_bytes)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield Holder(who.peer_id, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


def nothing(_: Version) -> SignedManifest | None:
    return None


class Version0:
    """A version in a store of its own, and an empty store to fetch it into."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = BlobStore(folder / "source"), BlobStore(folder / "target")
        (folder / "config.json").write_text("{}")
        self.body: Body = body_of(TENSORS, self.source, model_dir=folder, chunk_bytes=CHUNK_BYTES)

    async def fetch(self, holders: list[Holder], deadline_s: float = 10.0) -> fetching.FetchReport:
        return await fetch_version(
            self.body, holders=holders, blobs=self.target, channel_factory=open_channel, deadline_s=deadline_s
        )

    def is_complete(self) -> bool:
        flat = b"".join(content(self.body, self.target))
        return flat == TENSORS["w"].tobytes() and self.target.get(self.body.files[0].digest) == b"{}"


@pytest.fixture
def version(tmp_path: Path) -> Version0:
    return Version0(tmp_path)


async def test_two_holders_share_the_work_and_a_second_fetch_needs_nobody(version: Version0) -> None:
    services = [WeightService(version.source, nothing) for _ in range(2)]
    async with serving(1, services[0]) as first, serving(2, services[1]) as second:
        report = await version.fetch([first, second])
        assert version.is_complete()
        assert all(holder.num_chunks > 0 for holder in report.holders.values())
        assert sum(service.num_bytes_served for service in services) >= TENSORS["w"].nbytes
    report = await version.fetch([])
    assert report.num_present == len(version.body.chunks) + 1


async def test_holders_of_halves_make_a_whole(version: Version0, tmp_path: Path) -> None:
    halves = [BlobStore(tmp_path / f"half{index}") for index in (0, 1)]
    digests = [*version.body.chunks, version.body.files[0].digest]
    for index, digest in enumerate(digests):
        halves[index % 2].put(version.source.get(digest))
    async with (
        serving(1, WeightService(halves[0], nothing)) as first,
        serving(2, WeightService(halves[1], nothing)) as second,
    ):
        report = await version.fetch([first, second])
        assert version.is_complete()
        assert sum(holder.num_missing for holder in report.holders.values()) > 0
        with pytest.raises(ChunkMissingError, match="missing"):
            await fetch_version(
                version.body,
                holders=[first],
                blobs=BlobStore(tmp_path / "third"),
                channel_factory=open_channel,
                deadline_s=5.0,
            )


class Liar(UnservedPeer):
    """Serves what its `lie` makes of a chunk."""

    def __init__(self, lie: Callable[[bytes], AsyncIterator[bytes]], blobs: BlobStore) -> None:
        self._lie, self._blobs = lie, blobs
        self.num_messages = 0

    async def FetchChunk(self, request: peer_pb2.FetchChunkRequest, context: Any) -> AsyncIterator[Any]:
        async for data in self._lie(self._blobs.get(Digest(request.digest))):
            self.num_messages += 1
            yield peer_pb2.FetchChunkResponse(data=data)


async def flipped(chunk: bytes) -> AsyncIterator[bytes]:
    yield bytes([chunk[0] ^ 1]) + chunk[1:]


async def shorter(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk[:-1]


async def longer(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk + b"x"


async def endless(chunk: bytes) -> AsyncIterator[bytes]:
    while True:
        yield chunk


async def empty_for_ever(chunk: bytes) -> AsyncIterator[bytes]:
    while True:
        yield b""


@pytest.mark.parametrize("lie", [flipped, shorter, longer, endless, empty_for_ever])
async def test_a_liar_is_dropped_and_the_others_serve(
    version: Version0, lie: Callable[[bytes], AsyncIterator[bytes]]
) -> None:
    liar = Liar(lie, version.source)
    async with serving(1, liar) as bad:
        with pytest.raises(ChunkMissingError, match="bad"):
            await version.fetch([bad])
        assert not list(version.target.digests())
        async with serving(2, WeightService(version.source, nothing)) as good:
            report = await version.fetch([bad, good])
        assert version.is_complete()
        assert report.holders[bad.peer_id].num_chunks == 0
        assert 0 < report.holders[bad.peer_id].num_bad <= fetching.MAX_BAD + fetching.NUM_STREAMS_PER_HOLDER


async def hanging(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk[:1]
    await asyncio.Event().wait()


async def test_a_holder_that_hangs_does_not_hold_up_the_end(version: Version0) -> None:
    async with (
        serving(1, Liar(hanging, version.source)) as bad,
        serving(2, WeightService(version.source, nothing)) as good,
    ):
        async with asyncio.timeout(fetching.STALL_S / 2):
            await version.fetch([bad, good])
        assert version.is_complete()


class WatchedCall:
    """A call that notes reads which are cancelled before it is."""

    def __init__(self, call: Any, given_up: list[str]) -> None:
        self._call, self._given_up, self._is_over = call, given_up, False

    async def read(self) -> Any:
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            self._given_up.append("after its call" if self._is_over else "before its call")
            raise

    def cancel(self) -> None:
        self._is_over = True
        self._call.cancel()


async def test_what_is_not_wanted_any_more_is_ended_by_its_call(
    version: Version0, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = list[str]()

    class WatchedStub:
        def __init__(self, channel: grpc.aio.Channel) -> None:
            self._stub = PeerServiceStub(channel)

        def FetchChunk(self, request: peer_pb2.FetchChunkRequest, *, timeout: float) -> WatchedCall:
            return WatchedCall(self._stub.FetchChunk(request, timeout=timeout), given_up)

    monkeypatch.setattr(fetching, "PeerServiceStub", WatchedStub)
    async with serving(1, Liar(hanging, version.source)) as bad:
        with pytest.raises(UnreachableError):
            await version.fetch([bad], deadline_s=0.3)
        async with serving(2, WeightService(version.source, nothing)) as good:
            await version.fetch([bad, good])
    assert set(given_up) == {"after its call"}


async def test_nobody_answers(version: Version0, tmp_path: Path) -> None:
    async with serving(1, UnservedPeer()) as gone:
        pass
    with pytest.raises(UnreachableError):
        await version.fetch([gone])
    with pytest.raises(UnreachableError):
        await version.fetch([])
    async with serving(1, Liar(hanging, version.source)) as bad:
        with pytest.raises(UnreachableError, match=r"not within 0\.3 s"):
            await version.fetch([bad], deadline_s=0.3)
    async with serving(2, WeightService(version.source, nothing)) as good:
        assert (await version.fetch([gone, good])).holders[gone.peer_id].num_unreachable > 0
        impostor = Holder(person(3).peer_id, good.endpoint)
        with pytest.raises(UnreachableError):
            await fetch_version(
                version.body,
                holders=[impostor],
                blobs=BlobStore(tmp_path / "other"),
                channel_factory=open_channel,
                deadline_s=5.0,
            )


async def test_manifests_and_refusals(version: Version0) -> None:
    manifests = {7: SignedManifest(b"payload", b"signature"), -1: SignedManifest(b"newest", b"s")}
    service = WeightService(version.source, lambda wanted: manifests.get(wanted))
    async with serving(1, service) as holder, open_channel(holder) as channel:
        for number, expected in manifests.items():
            found = await fetch_manifest(holder, Version(number), channel_factory=open_channel, deadline_s=5)
            assert found == expected
        with pytest.raises(VersionFromFutureError):
            await fetch_manifest(holder, Version(8), channel_factory=open_channel, deadline_s=5)
        stub = PeerServiceStub(channel)
        for name in ("../config.json", "/etc/passwd", "x\0y", "0" * 64, ""):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.FetchChunk(peer_pb2.FetchChunkRequest(digest=name), timeout=5).read()
            assert isinstance(from_rpc_error(caught.value), ChunkMissingError)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FetchShard(peer_pb2.FetchShardRequest(), timeout=5).read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_crowd_of_slow_readers_is_turned_away(version: Version0, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.weights.service.MAX_WAITING", 1)
    large = version.source.put(bytes(40 * MESSAGE_BYTES))
    service = WeightService(version.source, nothing, max_concurrent=1)
    async with serving(1, service) as holder, open_channel(holder) as channel:
        stub = PeerServiceStub(channel)
        async with AsyncExitStack() as stack:
            reading = stub.FetchChunk(peer_pb2.FetchChunkRequest(digest=large), timeout=20)
            stack.callback(reading.cancel)
            await reading.read()  # it holds the only turn, and reads no further
            outcomes: set[type] = set()
            waiting = [stub.FetchChunk(peer_pb2.FetchChunkRequest(digest=large), timeout=0.5) for _ in range(3)]
            for call in waiting:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                outcomes.add(type(from_rpc_error(caught.value)))
            assert outcomes == {NoWorkError, UnreachableError}
        received = [message async for message in stub.FetchChunk(peer_pb2.FetchChunkRequest(digest=large), timeout=20)]
        assert sum(len(message.data) for message in received) == 40 * MESSAGE_BYTES
