"""Fetches the optimizer's state after a version from a trainer, into a file. Impure: gRPC and the disk.

Invariant: the file appears only when its bytes have the length and the digest that the manifest names;
reading stops one byte after that length.
"""

import secrets
from pathlib import Path
from typing import IO

import blake3
import grpc

from node.compute.messages import FetchOptimizerState
from protocol.errors import ChunkCorruptError, UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_options import CLIENT_OPTIONS
from protocol.grpc_reads import read_message
from protocol.ids import PeerId
from protocol.tls import channel_options
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub

BYTES_PER_ELEMENT = 8
STALL_S = 30.0


async def fetch_optimizer_state(request: FetchOptimizerState) -> None:
    """Writes first and second moments to `request.path`.

    Raises `UnreachableError` when the trainer falls silent, `ChunkCorruptError` when what it sends is not
    what the manifest names, and the error that it answers, e.g. `VersionTooOldError`. A caller's deadline
    cancels it.
    """
    path = Path(request.path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    credentials = grpc.ssl_channel_credentials(request.ca_certificate, request.leaf_key, request.leaf_certificate)
    options = [*CLIENT_OPTIONS, *channel_options(PeerId(request.peer_id))]
    try:
        async with grpc.aio.secure_channel(request.endpoint, credentials, options=options) as channel:
            with temporary.open("xb") as file:
                await _receive(PeerServiceStub(channel), request, file)
        temporary.replace(path)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, doing=f"fetching moments from {request.peer_id}") from error
    finally:
        temporary.unlink(missing_ok=True)


async def _receive(stub: PeerServiceStub, request: FetchOptimizerState, file: IO[bytes]) -> None:
    expected, received, hasher = request.num_elements * BYTES_PER_ELEMENT, 0, blake3.blake3()
    call = stub.FetchOptimizer(peer_pb2.FetchOptimizerRequest(version=request.version))
    try:
        while received <= expected:
            message = await read_message(call, deadline_s=STALL_S)
            if not isinstance(message, peer_pb2.FetchOptimizerResponse) or not message.data:
                break
            received += len(message.data)
            hasher.update(message.data)
            file.write(message.data)
    except TimeoutError:
        raise UnreachableError(f"{request.peer_id} sent nothing for {STALL_S:g} s") from None
    finally:
        call.cancel()
    if received != expected or hasher.hexdigest() != request.digest:
        raise ChunkCorruptError(
            f"the optimizer's state from {request.peer_id} was refused",
            why="it is not the one that the manifest names",
        )
