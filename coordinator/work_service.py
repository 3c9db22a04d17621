"""Slots on their way to nodes, while nodes work on them, and back. Impure: gRPC messages, threads, the grader.

Invariants: nobody holds a lease that nobody was told of: whatever goes wrong between the core's grant and the answer,
a caller who does not wait included, the lease is given back. A moved slot goes out with exactly the pieces that the
core says it goes on from, each of which is signed by who sampled it, or it starts anew.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
from protocol.errors import EngineError, HexcombError, LeaseUnknownError, WorkRefusedError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.rollout import pack_ids
from protocol.tasks import prompt_digest
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import slot_message

MAX_SLOTS_A_LEASE = 1024
MAX_REASON = 300
MAX_BOOT_ID = 64
MAX_HANDED_BYTES = 8 << 20
"""Of pieces in one lease, so that its message stays below what gRPC takes."""

NOT_AWAITED = "the node did not wait for its lease"
STARTED_ANEW = "the node's daemon was started anew, and knows nothing of this lease"

Place = tuple[int, int]
Pieces = list[common_pb2.Piece]
Moved = tuple[SlotKey, Prefix, tuple[bytes, ...]]
"""A slot, what it goes on from, and what is kept of it."""

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
        async with self._or_give_back(peer_id, grant.lease_id):
            works = await self._works(grant)
        remaining_s = (grant.deadline_ms - self._office.clock()) / 1000
        return control_pb2.LeaseWorkResponse(lease_id=grant.lease_id, slots=works, remaining_s=remaining_s)

    def receive(self, peer_id: PeerId, request: control_pb2.SubmitPiecesRequest) -> control_pb2.SubmitPiecesResponse:
        """Keeps pieces of slots under way, and waits for nothing. Raises `UsageError` on a call that is too large."""
        office = self._office
        with counted(office.authority):
            check_size(len(request.progress), sum(len(progress.pieces) for progress in request.progress))
        answer, now_ms = office.pieces.receive(peer_id, request.progress), office.clock()
        leases = office.authority.core.state.leases
        held = [(key, lease) for key in answer.lease_ids if (lease := leases.get(key)) and lease.peer_id == peer_id]
        return control_pb2.SubmitPiecesResponse(
            unwanted=answer.unwanted,
            leases=[
                control_pb2.LeaseTime(lease_id=key, remaining_s=(lease.deadline_ms - now_ms) / 1000)
                for key, lease in held
            ],
            gaps=[control_pb2.SlotGap(slot=slot, start=start) for slot, start in answer.gaps],
        )

    async def take_back(self, peer_id: PeerId, request: control_pb2.ReturnLeaseRequest) -> None:
        """A node gives a lease back. Raises `LeaseUnknownError`."""
        reason = printable(request.reason, MAX_REASON)
        event = LeaseReturned(peer_id, LeaseId(request.lease_id), reason, request.is_fault)
        await self._office.authority.submit(event)

    async def settle(self, peer_id: PeerId, lease_id: LeaseId) -> None:
        """Takes the slots back that the node was never told of, once it has filled all others of the lease."""
        withheld = self._withheld.get(lease_id)
        if withheld is None:
            return
        lease = self._office.authority.core.state.leases.get(lease_id)
        if lease is not None and withheld.places.issuperset(lease.slots):
            await self._give_back(peer_id, lease_id, withheld.reason, is_try=True)
        if lease_id not in self._office.authority.core.state.leases:
            self._withheld.pop(lease_id, None)

    async def note_boot(self, peer_id: PeerId, boot_id: str) -> None:
        """A session begins: a daemon that was started anew holds nothing of what its earlier start held."""
        boot_id = boot_id[:MAX_BOOT_ID]
        before = self._boots.get(peer_id, boot_id)
        if not boot_id:
            return
        self._boots[peer_id] = boot_id
        if before == boot_id:
            return
        leases = self._office.authority.core.state.leases
        for lease_id in [key for key, lease in leases.items() if lease.peer_id == peer_id]:
            await self._give_back(peer_id, lease_id, STARTED_ANEW, is_fault=True)

    # Between the grant and the answer

    async def _works(self, grant: Grant) -> list[control_pb2.SlotWork]:
        """The slots of a lease with prompts and pieces, less those whose prompts cannot be made."""
        made = await self._office.grader.try_prompts([slot.task for slot in grant.slots])
        prompts = {task: ids for task, ids in made.items() if not isinstance(ids, HexcombError)}
        failures = [made for made in made.values() if isinstance(made, HexcombError)]
        slots = [slot for slot in grant.slots if slot.task in prompts]
        if failures:
            self._withhold(grant, slots, f"the prompt cannot be made: {failures[0].sentence()}")
        pieces = await self._prefixes(slots)
        return [
            control_pb2.SlotWork(
                slot=slot_message(slot),
                prompt_digest=prompt_digest(prompts[slot.task]),
                prompt_ids=pack_ids(prompts[slot.task]),
                pieces=pieces.get(slot, ()),
            )
            for slot in slots
        ]

    def _withhold(self, grant: Grant, told: Sequence[SlotKey], reason: str) -> None:
        """Remembers the slots of a lease that its node is not told of. Raises `EngineError` if that is all of them."""
        hidden = frozenset((slot.task.index, slot.sample) for slot in set(grant.slots).difference(told))
        leases = self._office.authority.core.state.leases
        self._withheld = {key: value for key, value in self._withheld.items() if key in leases}
        self._withheld[grant.lease_id] = Withheld(hidden, reason)
        log.error("slots are withheld", lease=grant.lease_id, num_slots=len(hidden), why=reason)
        if not told:
            raise EngineError("the lease was taken back", why=reason, remedy="Ask again in a moment.")

    async def _prefixes(self, slots: Sequence[SlotKey]) -> dict[SlotKey, Pieces]:
        """What moved slots go on from. One whose pieces are gone or do not hold starts anew."""
        office, state = self._office, self._office.authority.core.state
        held = [(slot, found.prefix) for slot in slots if (found := state.find(slot)) is not None]
        moved = [(slot, prefix, office.pieces.frames(slot)) for slot, prefix in held if prefix is not None]
        if not moved:
            return {}
        check = partial(self._check_prefixes, moved)
        found_pieces, lost = await asyncio.get_running_loop().run_in_executor(self._checker, check)
        for slot, reason in lost.items():
            log.warning("a slot starts anew", slot=str(slot), why=reason)
            await office.authority.submit(PrefixLost(slot, printable(reason, MAX_REASON)))
        return found_pieces

    def _check_prefixes(self, moved: Sequence[Moved]) -> tuple[dict[SlotKey, Pieces], dict[SlotKey, str]]:
        """(pieces of those that hold, reasons of those that do not). Runs in a thread."""
        found, lost, room = dict[SlotKey, Pieces](), dict[SlotKey, str](), MAX_HANDED_BYTES
        for slot, prefix, frames in moved:
            try:
                found[slot] = checked_prefix(frames, slot, prefix, spec=self._office.spec)
                room -= sum(map(len, frames))
                if room < 0:
                    lost[slot] = "one lease cannot carry all that was received of its slots"
                    del found[slot]
            except HexcombError as error:
                lost[slot] = error.sentence()
        return found, lost

    # Leases that nobody will fill

    @contextlib.asynccontextmanager
    async def _or_give_back(self, peer_id: PeerId, lease_id: LeaseId) -> AsyncIterator[None]:
        """Whatever ends what happens inside gives the lease back. Where prompts cannot be made its slots were tried in
        vain; else nobody is to blame."""
        try:
            yield
        except asyncio.CancelledError:
            self._send(self._give_back(peer_id, lease_id, NOT_AWAITED))
            raise
        except HexcombError as error:
            is_try = self._withheld.pop(lease_id, None) is not None
            await asyncio.shield(self._send(self._give_back(peer_id, lease_id, error.sentence(), is_try=is_try)))
            raise

    async def _give_back_when_granted(self, peer_id: PeerId, asking: asyncio.Future[Grant]) -> None:
        with contextlib.suppress(WorkRefusedError):
            await self._give_back(peer_id, (await asking).lease_id, NOT_AWAITED)

    async def _give_back(
        self, peer_id: PeerId, lease_id: LeaseId, reason: str, *, is_fault: bool = False, is_try: bool = False
    ) -> None:
        with contextlib.suppress(LeaseUnknownError):  # it is over already
            event = LeaseReturned(peer_id, lease_id, printable(reason, MAX_REASON), is_fault, is_try)
            await self._office.authority.submit(event)

    def _send(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Has it done whoever waits for it. What is left when the coordinator ends does not matter: leases run out."""

        async def run() -> None:
            try:
                await errand
            except HexcombError as error:
                log.warning("a lease was not given back", why=error.sentence())

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task
