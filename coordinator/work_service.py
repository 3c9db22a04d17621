"""Slots on their way to nodes, while nodes work on them, and back. Impure: gRPC messages, threads, the grader.

Invariants: nobody holds a lease that nobody was told of: whatever goes wrong between the core's grant and the answer,
a caller who does not wait included, the lease is given back. A moved slot goes out with exactly the pieces that the core
says it goes on from, each of which is signed by who sampled it, or it starts anew.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.core.events import LeaseReturned, PrefixLost, WorkRequested
from coordinator.core.replies import Grant
from coordinator.core.state import Prefix
from coordinator.hearsay import printable
from coordinator.join_service import counted
from coordinator.office import Office
from coordinator.received import checked_prefix
from coordinator.submissions import check_size
from protocol.errors import EngineError, HexcombError, LeaseUnknownError, RolloutMalformedError, WorkRefusedError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.rollout import pack_ids
from protocol.tasks import prompt_digest
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import slot_message

MAX_SLOTS_A_LEASE = 1024
MAX_REASON = 300
MAX_HANDED_BYTES = 8 << 20
"""Of pieces in one lease, so that its message stays below what gRPC takes."""

NOT_AWAITED = "the node did not wait for its lease"
STARTED_ANEW = "the node's daemon was started anew, and knows nothing of this lease"

Place = tuple[int, int]
Pieces = list[common_pb2.Piece]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node last got no work."""

    code: str
    sentence: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Withheld:
    """Slots of a lease that the node was not told of, since their prompts cannot be made."""

    places: frozenset[Place]
    reason: str


class WorkService:
    """Grants, receives and takes back. `refused` says of each node why it last got no work, until it gets some."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        self._withheld: dict[LeaseId, Withheld] = {}
        self._boots: dict[PeerId, str] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self.refused: dict[PeerId, Refusal] = {}

    async def lease(self, peer_id: PeerId, request: control_pb2.LeaseWorkRequest) -> control_pb2.LeaseWorkResponse:
        """A lease, with all that its slots need. Raises as the core does, or `EngineError` where no prompt of it could
        be made."""
        wish = WorkRequested(
            peer_id=peer_id,
            version=Version(request.version),
            root=Digest(request.root[:64]),
            num_slots=max(1, min(request.num_slots, MAX_SLOTS_A_LEASE)),
            lease_id=LeaseId(secrets.token_hex(8)),
        )
        asking = asyncio.ensure_future(self._office.authority.submit(wish))
        try:
            grant = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._send(self._give_back_when_granted(peer_id, asking))
            raise
        except WorkRefusedError as refusal:
            self.refused[peer_id] = Refusal(refusal.code, refusal.sentence(), self._office.clock())
            raise
        self.refused.pop(peer_id, None)
        try:
            works = await self._works(grant)
        except asyncio.CancelledError:
            self._send(self._give_back(peer_id, grant.lease_id, NOT_AWAITED, is_fault=False))
            raise
        except HexcombError as error:
            is_task = isinstance(error, EngineError)
            await self._give_back(peer_id, grant.lease_id, error.sentence(), is_fault=False)
            raise
        remaining_s = (grant.deadline_ms - self._office.clock()) / 1000
        return control_pb2.LeaseWorkResponse(lease_id=grant.lease_id, slots=works, remaining_s=remaining_s)
