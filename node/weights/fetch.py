"""Pulls the chunks of a version from several holders at once, each checked by its hash. Impure: gRPC
(asyncio).

Invariants: nothing enters the store but bytes with the digest that the manifest names; reading from a
holder stops one byte after the length that the manifest declares; one slow, dead or lying holder costs only
its own share, since what it was asked for goes to the next, and chunks that hang with it are asked of a
second one at the end.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from node.bandwidth import Throttle
from node.weights.blobs import BlobStore
from node.weights.content import chunk_length
from protocol.errors import ChunkCorruptError, ChunkMissingError, HexcombError, UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_reads import read_message
from protocol.ids import Digest, PeerId, Version
from protocol.manifest import Body, SignedManifest, digest_of
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub
from protocol.wire import signed_manifest

NUM_STREAMS_PER_HOLDER = 4
MAX_STREAMS = 16
MAX_COPIES = 2
MAX_BAD = 3
MAX_UNREACHABLE = 2
STALL_S = 10.0
CHUNK_S = 60.0
MAX_FILE_BYTES = 32 << 20
FAIR_CHUNK_S = 20.0
"""Under a limit so many chunks come at a time that each takes about so long, well within `CHUNK_S`."""


class Holder(NamedTuple):
    """A peer that says it holds a version, and where its peer service listens (host:port)."""

    peer_id: PeerId
    endpoint: str


ChannelFactory = Callable[[Holder], grpc.aio.Channel]
"""Opens a channel on which TLS accepts nobody but the holder; whoever calls it closes it."""


@dataclass(slots=True)
class HolderReport:
    """What one holder was good for: `num_bad` are chunks with wrong bytes, `num_missing` those it did not
    have.
    """

    num_chunks: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    num_missing: int = 0
    num_unreachable: int = 0

    @property
    def is_dropped(self) -> bool:
        """Whether the holder is asked for nothing more in this fetch."""
        return self.num_bad >= MAX_BAD or self.num_unreachable >= MAX_UNREACHABLE


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The outcome of a fetch: chunks that were here already, and what each holder did."""

    num_present: int
    holders: dict[PeerId, HolderReport]


class _Wanted(NamedTuple):
    digest: Digest
    max_bytes: int
    is_exact: bool


@dataclass(slots=True)
class _Fetch:
    """The state that the streams of one fetch share."""

    blobs: BlobStore
    pending: dict[Digest, _Wanted]
    reports: dict[PeerId, HolderReport]
    tried: dict[Digest, set[PeerId]] = field(default_factory=dict)
    throttle: Throttle = field(default_factory=Throttle)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_STREAMS))
    flying: Counter[Digest] = field(default_factory=Counter)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def choose(self, holder: Holder) -> _Wanted | None:
        """What to ask of the holder next: what nobody is asked for, else a second copy of what hangs
        elsewhere.
        """
        open_to_it = [
            wanted
            for digest, wanted in self.pending.items()
            if holder.peer_id not in self.tried.setdefault(digest, set()) and self.flying[digest] < MAX_COPIES
        ]
        return min(open_to_it, key=lambda wanted: self.flying[wanted.digest], default=None)

    def is_open_to(self, holder: Holder) -> bool:
        """Whether the holder may still become useful: it is not dropped, and has not been tried for
        everything.
        """
        if self.reports[holder.peer_id].is_dropped:
            return False
        return any(holder.peer_id not in self.tried.get(digest, set()) for digest in self.pending)


async def fetch_version(
    body: Body,
    *,
    holders: Sequence[Holder],
    blobs: BlobStore,
    channel_factory: ChannelFactory,
    deadline_s: float,
    throttle: Throttle | None = None,
) -> FetchReport:
    """Brings every chunk and model file of the version into `blobs`, from the holders in parallel, no faster than
    `throttle` lets through; a deadline that the limit makes impossible is put off.

    Raises `ChunkMissingError` when the holders that answer lack something, and `UnreachableError` when none
    answers or `deadline_s` seconds are over; what was fetched by then stays in the store.
    """
    wanted = wanted_chunks(body)
    missing = {digest: item for digest, item in wanted.items() if not blobs.has(digest)}
    reports = {holder.peer_id: HolderReport() for holder in holders}
    fetch = _Fetch(blobs, dict(missing), reports)
    if throttle is not None and throttle.is_limited:
        fetch.throttle = throttle
        num_at_once = int(FAIR_CHUNK_S * throttle.bytes_per_s / body.chunk_bytes)
        fetch.room = asyncio.Semaphore(min(max(num_at_once, 1), MAX_STREAMS))
        deadline_s = max(deadline_s, 2 * body.chunk_bytes * len(missing) / throttle.bytes_per_s)
    num_streams = max(1, min(NUM_STREAMS_PER_HOLDER, MAX_STREAMS // max(len(reports), 1)))
    try:
        async with asyncio.timeout(deadline_s), AsyncExitStack() as channels:
            stubs = [
                (holder, PeerServiceStub(await channels.enter_async_context(channel_factory(holder))))
                for holder in ({holder.peer_id: holder for holder in holders}.values() if missing else ())
            ]
            await _race(fetch, [_stream(fetch, *pair) for pair in stubs for _ in range(num_streams)])
    except TimeoutError:
        raise _failure(fetch, f"not within {deadline_s:g} s") from None
    if fetch.pending:
        raise _failure(fetch, "no holder that answers has them")
    return FetchReport(len(wanted) - len(missing), reports)


def wanted_chunks(body: Body) -> dict[Digest, _Wanted]:
    """Everything that a version consists of, by name."""
    files = {file.digest: _Wanted(file.digest, MAX_FILE_BYTES, is_exact=False) for file in body.files}
    chunks = {
        digest: _Wanted(digest, chunk_length(body, index), is_exact=True) for index, digest in enumerate(body.chunks)
    }
    return files | chunks


async def fetch_manifest(
    holder: Holder, version: Version, *, channel_factory: ChannelFactory, deadline_s: float
) -> SignedManifest:
    """The manifest of a version (-1 for the newest) that the holder has, not yet opened: check it by
    `open_manifest`.

    Raises `VersionFromFutureError` where the holder has none such, `UnreachableError` where it does not
    answer.
    """
    async with channel_factory(holder) as channel:
        request = peer_pb2.FetchManifestRequest(version=version)
        try:
            response = await PeerServiceStub(channel).FetchManifest(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, doing=f"fetching a manifest from {holder.peer_id}") from error
    return signed_manifest(response.manifest)


async def _stream(fetch: _Fetch, holder: Holder, stub: PeerServiceStub) -> None:
    """One chunk after the other from one holder, as long as it may be useful."""
    while fetch.is_open_to(holder):
        wanted = fetch.choose(holder)
        if wanted is None:
            async with fetch.changed:
                await fetch.changed.wait_for(lambda: not fetch.is_open_to(holder) or fetch.choose(holder))
            continue
        fetch.flying[wanted.digest] += 1
        fetch.tried[wanted.digest].add(holder.peer_id)
        try:
            async with fetch.room:
                await _take(fetch, holder, stub, wanted)
        finally:
            fetch.flying[wanted.digest] -= 1
        async with fetch.changed:
            fetch.changed.notify_all()


async def _take(fetch: _Fetch, holder: Holder, stub: PeerServiceStub, wanted: _Wanted) -> None:
    """Asks the holder for one chunk and writes down how it went."""
    report = fetch.reports[holder.peer_id]
    try:
        is_wanted = lambda: wanted.digest in fetch.pending and not report.is_dropped  # noqa: E731
        data = await _read(stub, wanted, is_wanted=is_wanted, throttle=fetch.throttle)
        if data is None:
            return
        if wanted.digest in fetch.pending:
            await asyncio.to_thread(fetch.blobs.put, data)
            fetch.pending.pop(wanted.digest, None)
        report.num_chunks += 1
        report.num_bytes += len(data)
        report.num_unreachable = 0
    except ChunkCorruptError:
        report.num_bad += 1
    except UnreachableError:
        report.num_unreachable += 1
        if not report.is_dropped:
            fetch.tried[wanted.digest].discard(holder.peer_id)
    except HexcombError:
        report.num_missing += 1


async def _read(
    stub: PeerServiceStub, wanted: _Wanted, *, is_wanted: Callable[[], bool], throttle: Throttle
) -> bytes | None:
    """The bytes of one chunk, checked; None if they are not wanted any more.

    A holder that sends nothing for `STALL_S` seconds counts as unreachable.
    """
    call = stub.FetchChunk(peer_pb2.FetchChunkRequest(digest=wanted.digest), timeout=CHUNK_S)
    data = bytearray()
    try:
        while len(data) <= wanted.max_bytes:
            message = await read_message(call, deadline_s=STALL_S)
            if not isinstance(message, peer_pb2.FetchChunkResponse) or not message.data:  # the end, or no progress
                break
            data += message.data
            await throttle.pass_on(len(message.data))  # while nothing is read the sender has to wait
            if not is_wanted():
                return None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, doing="fetching a chunk") from error
    except TimeoutError:
        raise UnreachableError(f"a chunk stalled for {STALL_S:g} s") from None
    finally:
        call.cancel()
    is_length_wrong = len(data) > wanted.max_bytes or (wanted.is_exact and len(data) < wanted.max_bytes)
    if is_length_wrong or digest_of(bytes(data)) != wanted.digest:
        raise ChunkCorruptError(f"chunk {wanted.digest} was refused", why="it is not what its name says")
    return bytes(data)


async def _race(fetch: _Fetch, streams: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs the streams until all have ended or all is fetched: some may still read copies of what another
    brought.
    """
    running = [asyncio.create_task(stream) for stream in streams]
    ended: asyncio.Future[Any] = asyncio.create_task(asyncio.wait(running) if running else _nothing())
    complete: asyncio.Future[Any] = asyncio.create_task(_complete(fetch))
    try:
        await asyncio.wait({ended, complete}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        complete.cancel()
        ended.cancel()
        for stream in running:
            stream.cancel()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _nothing() -> None:
    return


async def _complete(fetch: _Fetch) -> None:
    async with fetch.changed:
        await fetch.changed.wait_for(lambda: not fetch.pending)


def _failure(fetch: _Fetch, why: str) -> HexcombError:
    what = f"{len(fetch.pending)} chunks of the version could not be fetched"
    answered = any(report.num_chunks or report.num_bad or report.num_missing for report in fetch.reports.values())
    kind = ChunkMissingError if answered and not why.startswith("not within") else UnreachableError
    counts = "; ".join(
        f"{peer_id}: {r.num_chunks} good, {r.num_bad} bad, {r.num_missing} missing, {r.num_unreachable} unreachable"
        for peer_id, r in fetch.reports.items()
    )
    return kind(what, why=f"{why} ({counts or 'nobody holds it'})", remedy="It is tried again with other holders.")
