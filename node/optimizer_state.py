"""Where a starting trainer gets the optimizer's moments from. Impure: the compute child fetches, the disk
keeps.

Invariant: a trainer starts only with the moments whose digest the manifest names; version 0 has none, which
means zeros.
"""

import asyncio
from pathlib import Path

import structlog
from blake3 import blake3

from node.compute.messages import Done, FetchOptimizerState
from node.context import Node
from protocol.certificates import anchor_pem
from protocol.child import ChildProcess
from protocol.errors import HexcombError, UnreachableError
from protocol.ids import Digest, PeerId
from protocol.manifest import Body

FETCH_DEADLINE_S = 600.0
KEEP_DEADLINE_S = 60.0

log = structlog.get_logger("optimizer")


async def bring_optimizer_state(node: Node, child: ChildProcess, body: Body) -> str:
    """The path of a file with the moments after the body's version; "" where that is zeros.

    Raises `UnreachableError` when no trainer that serves them is found, to be tried again.
    """
    if body.optimizer is None:
        return ""
    path = _path(node, body)
    if path.exists() and await asyncio.to_thread(_digest, path) == body.optimizer:
        return str(path)
    for peer_id, endpoint in await _trainers(node):
        try:
            request = _request(node, body, body.optimizer, peer_id=peer_id, endpoint=endpoint, path=str(path))
            await child.request(request, Done, deadline_s=FETCH_DEADLINE_S)
        except HexcombError as error:
            if child.is_closed:
                raise
            log.info("no optimizer state", peer=peer_id, version=body.version, why=error.sentence())
            continue
        _forget_but(path)
        return str(path)
    raise UnreachableError(
        f"the optimizer's state after version {body.version} was not found",
        why="no trainer that answers has it",
        remedy="It is asked for again; a trainer of the last round must be up.",
    )


async def keep_optimizer_state(node: Node, child: ChildProcess, body: Body) -> None:
    """Writes the moments in force in the node's own trainer to the disk; a failure costs only that safety."""
    if body.optimizer is None:
        return
    path, endpoint = _path(node, body), node.state.trainer_endpoint
    request = _request(node, body, body.optimizer, peer_id=node.peer_id, endpoint=endpoint, path=str(path))
    try:
        await child.request(request, Done, deadline_s=KEEP_DEADLINE_S)
    except HexcombError as error:
        if child.is_closed:
            raise
        log.warning("optimizer state not kept", version=body.version, why=error.sentence())
        return
    _forget_but(path)


def _path(node: Node, body: Body) -> Path:
    folder = node.home.path / "optimizer"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"v{body.version}.bin"


def _digest(path: Path) -> Digest:
    return Digest(blake3(max_threads=1).update_mmap(path).hexdigest())


def _forget_but(path: Path) -> None:
    for other in path.parent.glob("*.bin"):
        if other != path:
            other.unlink(missing_ok=True)


async def _trainers(node: Node) -> list[tuple[PeerId, str]]:
    """Trainers' own peer services, as the directory names them."""
    records = [opened.record for opened in await node.presence.list_records()]
    return [
        (record.peer_id, record.trainer_endpoint)
        for record in records
        if record.trainer_endpoint and record.peer_id != node.peer_id
    ]


def _request(
    node: Node, body: Body, digest: Digest, *, peer_id: PeerId, endpoint: str, path: str
) -> FetchOptimizerState:
    return FetchOptimizerState(
        endpoint=endpoint,
        peer_id=peer_id,
        version=body.version,
        digest=digest,
        num_elements=sum(tensor.num_elements for tensor in body.tensors),
        path=path,
        ca_certificate=anchor_pem(node.joined.coordinator_key),
        leaf_certificate=node.leaf.certificate_pem,
        leaf_key=node.leaf.key_pem,
    )
