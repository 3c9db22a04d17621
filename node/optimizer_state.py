"""Where a starting trainer gets the optimizer's moments from. Impure: the compute child fetches, the disk
keeps.

Invariant: a trainer starts only with the moments whose digest the manifest names; version 0 has none, which
means zeros.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog
from blake3 import blake3

from node.compute.messages import Done, FetchOptimizerState
from node.context import Node
from node.home import Home
from protocol.certificates import anchor_pem
from protocol.child import ChildProcess
from protocol.errors import HexcombError, UnreachableError
from protocol.ids import Digest, PeerId, Version
from protocol.manifest import Body
from protocol.round import Member

FETCH_DEADLINE_S = 600.0
MAX_DAEMONS = 32

log = structlog.get_logger("optimizer")


async def bring_optimizer_state(node: Node, child: ChildProcess, body: Body, *, members: Sequence[Member]) -> str:
    """The path of a file with the moments after the body's version; "" where that is zeros. `members` are those of the
    last plan that came; the directory names others.

    Raises `UnreachableError` when no trainer that serves them is found, to be tried again.
    """
    if body.optimizer is None:
        return ""
    path = moments_path(node, body.version)
    if path.exists() and await asyncio.to_thread(_digest, path) == body.optimizer:
        return str(path)
    for peer_id, endpoint in await _trainers(node, members):
        try:
            request = _request(node, body, body.optimizer, peer_id=peer_id, endpoint=endpoint, path=str(path))
            await child.request(request, Done, deadline_s=FETCH_DEADLINE_S)
        except HexcombError as error:
            if child.is_closed:
                raise
            log.info("no optimizer state", peer=peer_id, version=body.version, why=error.sentence())
            continue
        forget_other_moments(node, body.version)
        return str(path)
    raise UnreachableError(
        f"the optimizer's state after version {body.version} was not found",
        why="no trainer that answers has it",
        remedy="It is asked for again; a trainer of the last round must be up.",
    )


def moments_path(node: Node, version: Version) -> Path:
    """Where the moments after `version` lie on this node's disk. A trainer writes them before it attests, so that no
    committed version is ever without."""
    return moments_file(node.home, version)


def moments_file(home: Home, version: Version) -> Path:
    """The same in a home."""
    folder = home.path / "optimizer"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"v{version}.bin"


def forget_other_moments(node: Node, version: Version) -> None:
    """Removes what is on the disk for other versions, and what a killed process left half written."""
    kept = moments_path(node, version)
    for other in kept.parent.iterdir():
        if other != kept:
            other.unlink(missing_ok=True)


def _digest(path: Path) -> Digest:
    return Digest(blake3(max_threads=1).update_mmap(path).hexdigest())


async def _trainers(node: Node, members: Sequence[Member]) -> list[tuple[PeerId, str]]:
    """Trainers' own peer services: those that a signed plan named, then those that the directory knows; then daemons of
    other nodes, one of which may be a trainer that rests."""
    planned = [(member.peer_id, member.endpoint) for member in members]
    records = [opened.record for opened in await node.presence.list_records()]
    listed = [(record.peer_id, record.trainer_endpoint) for record in records if record.trainer_endpoint]
    daemons = [(record.peer_id, record.endpoint) for record in records if record.endpoint][:MAX_DAEMONS]
    return [found for found in dict.fromkeys([*planned, *listed, *daemons]) if found[0] != node.peer_id]


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
