"""The daemon's half of the peer service: chunks and manifests for whoever the run's TLS lets in. Impure:
gRPC.

Invariant: what is served was read and hashed for this call; reading is bounded to a few calls at a time,
and a call that would have to wait behind too many others is refused, so that no crowd of callers fills the
memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from node.bandwidth import Throttle
from node.weights.blobs import BlobStore
from protocol.errors import HexcombError, NoWorkError, VersionFromFutureError, VersionTooOldError
from protocol.grpc_errors import abort_with
from protocol.ids import Digest, Version
from protocol.manifest import SignedManifest
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceServicer
from protocol.wire import manifest_message

MESSAGE_BYTES = 256 << 10
MAX_CONCURRENT = 8
MAX_WAITING = 64
MOMENTS_DEADLINE_S = 600.0
SERVE_DEADLINE_S = 60.0
"""A caller that reads one chunk more slowly than this gives its turn to another."""

SLOW_CONCURRENT = 4
"""Under a limit so many calls are served at a time at least: those of one fetch, which come side by side."""
LIMITED_MESSAGE_S = 0.25
"""Under a limit a message holds what may pass in so long, so that all callers see progress."""
MIN_MESSAGE_BYTES = 16 << 10

ManifestSource = Callable[[Version], SignedManifest | None]
"""The manifest of a version that the node holds, -1 for the newest; None if it holds none such."""


MomentsSource = Callable[[Version], Path]
"""Where the optimizer's moments after a version would lie."""


class UnservedPeer(PeerServiceServicer):
    """A peer service of which nothing is served; each half of it replaces what it serves."""

    async def FetchChunk(
        self, request: peer_pb2.FetchChunkRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchChunkResponse]:
        """Refused."""
        await _unserved(context)
        yield peer_pb2.FetchChunkResponse()

    async def FetchManifest(
        self, request: peer_pb2.FetchManifestRequest, context: Any
    ) -> peer_pb2.FetchManifestResponse:
        """Refused."""
        await _unserved(context)
        return peer_pb2.FetchManifestResponse()

    async def PushGradient(
        self, request_iterator: AsyncIterator[peer_pb2.PushGradientRequest], context: Any
    ) -> peer_pb2.PushGradientResponse:
        """Refused."""
        await _unserved(context)
        return peer_pb2.PushGradientResponse()

    async def FetchShard(
        self, request: peer_pb2.FetchShardRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchShardResponse]:
        """Refused."""
        await _unserved(context)
        yield peer_pb2.FetchShardResponse()

    async def FetchOptimizer(
        self, request: peer_pb2.FetchOptimizerRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchOptimizerResponse]:
        """Refused."""
        await _unserved(context)
        yield peer_pb2.FetchOptimizerResponse()


class WeightService(UnservedPeer):
    """Serves the chunks of `blobs` and the manifests that `manifest_of` knows; also, where `moments_of` finds them, the
    moments that a trainer which rests has left on the disk, since nobody else may have them."""

    def __init__(
        self,
        blobs: BlobStore,
        manifest_of: ManifestSource,
        *,
        moments_of: MomentsSource | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        throttle: Throttle | None = None,
    ) -> None:
        self._blobs, self._manifest_of, self._throttle = blobs, manifest_of, throttle or Throttle()
        self._moments_of = moments_of
        self._message_bytes = MESSAGE_BYTES
        if self._throttle.is_limited:
            per_s = self._throttle.bytes_per_s
            self._message_bytes = min(max(int(per_s * LIMITED_MESSAGE_S), MIN_MESSAGE_BYTES), MESSAGE_BYTES)
            in_time = int(per_s * SERVE_DEADLINE_S / 2) >> 20  # chunks of a MiB, as versions have them
            max_concurrent = min(max_concurrent, max(in_time, SLOW_CONCURRENT))
        self._room = asyncio.Semaphore(max_concurrent)
        self._num_waiting = 0
        self.num_bytes_served = 0

    async def FetchChunk(
        self, request: peer_pb2.FetchChunkRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchChunkResponse]:
        """Streams one chunk; refuses with CHUNK_MISSING, CHUNK_CORRUPT, or NO_WORK when too many wait."""
        try:
            async with asyncio.timeout(SERVE_DEADLINE_S), self._turn():
                data = await asyncio.to_thread(self._blobs.get, Digest(request.digest))
                for start in range(0, max(len(data), 1), self._message_bytes):
                    message = data[start : start + self._message_bytes]
                    await self._throttle.pass_on(len(message))
                    yield peer_pb2.FetchChunkResponse(data=message)
                    self.num_bytes_served += len(message)
        except HexcombError as error:
            await abort_with(context, error)
        except TimeoutError:
            slow = NoWorkError("a chunk was not served", why=f"it took over {SERVE_DEADLINE_S:g} s")
            await abort_with(context, slow)

    async def FetchManifest(
        self, request: peer_pb2.FetchManifestRequest, context: Any
    ) -> peer_pb2.FetchManifestResponse:
        """The manifest; refuses with VERSION_FROM_FUTURE where the node holds none such."""
        signed = self._manifest_of(Version(request.version))
        if signed is None:
            await abort_with(context, VersionFromFutureError(f"version {request.version} is not held here"))
        return peer_pb2.FetchManifestResponse(manifest=manifest_message(signed))

    async def FetchOptimizer(
        self, request: peer_pb2.FetchOptimizerRequest, context: Any
    ) -> AsyncIterator[peer_pb2.FetchOptimizerResponse]:
        """Streams the moments after a version; refuses with VERSION_TOO_OLD where they are not on the disk."""
        path = self._moments_of(Version(request.version)) if self._moments_of is not None else None
        try:
            if path is None or not path.exists():
                raise VersionTooOldError(f"the moments after version {request.version} are not here")
            async with asyncio.timeout(MOMENTS_DEADLINE_S), self._turn():
                with path.open("rb") as file:
                    while data := await asyncio.to_thread(file.read, self._message_bytes):
                        await self._throttle.pass_on(len(data))
                        yield peer_pb2.FetchOptimizerResponse(data=data)
        except HexcombError as error:
            await abort_with(context, error)
        except TimeoutError:
            slow = NoWorkError("moments were not served", why=f"it took over {MOMENTS_DEADLINE_S:g} s")
            await abort_with(context, slow)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._room.locked() and self._num_waiting >= MAX_WAITING:
            raise NoWorkError("a chunk was not served", why="too many calls wait", remedy="Ask another holder.")
        self._num_waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._room.release()


async def _unserved(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this half of the peer service is served elsewhere")
