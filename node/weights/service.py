"""The daemon's half of the peer service: chunks and manifests for whoever the run's TLS lets in. Impure:
gRPC.

Invariant: what is served was read and hashed for this call; reading is bounded to a few calls at a time,
and a call that would have to wait behind too many others is refused, so that no crowd of callers fills the
memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from node.weights.blobs import BlobStore
from protocol.errors import HexcombError, NoWorkError, VersionFromFutureError
from protocol.grpc_errors import abort_with
from protocol.ids import Digest, Version
from protocol.manifest import SignedManifest
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceServicer
from protocol.wire import manifest_message

MESSAGE_BYTES = 256 << 10
MAX_CONCURRENT = 8
MAX_WAITING = 64
SERVE_DEADLINE_S = 60.0
"""A caller that reads one chunk more slowly than this gives its turn to another."""

ManifestSource = Callable[[Version], SignedManifest | None]
"""The manifest of a version that the node holds, -1 for the newest; None if it holds none such."""


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
    """Serves the chunks of `blobs` and the manifests that `manifest_of` knows."""

    def __init__(self, blobs: BlobStore, manifest_of: ManifestSource, *, max_concurrent: int = MAX_CONCURRENT) -> None:
        self._blobs, self._manifest_of = blobs, manifest_of
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
                for start in range(0, max(len(data), 1), MESSAGE_BYTES):
                    message = data[start : start + MESSAGE_BYTES]
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
