"""A piece store beside a state of one group, and pieces for it: what its tests share."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from coordinator.authority import Authority
from coordinator.core.events import PiecesReceived
from coordinator.core.state import Group, Lease, Prefix, Slot, State, VersionRecord
from coordinator.pieces import Answer, PieceStore
from coordinator.received import pieces_in
from protocol.ids import Digest, LeaseId, RunId, SlotKey, TaskKey, Version
from protocol.keys import Identity
from protocol.rollout import Piece, edges_of, sign_piece
from protocol.run import EnvironmentSpec, OptimizerSpec, RunSpec, SamplingContract
from protocol.v1 import control_pb2
from protocol.wire import piece_message, slot_message

RUN = RunId("ab" * 16)
FOX, OWL = Identity.from_seed(b"f" * 32), Identity.from_seed(b"o" * 32)
TASK = TaskKey("sums", 7, 0)
SLOT = SlotKey(Version(1), TASK, 0)
A, B = LeaseId("a" * 16), LeaseId("b" * 16)
SPEC = RunSpec(
    run_id=RUN,
    name="test",
    environment=EnvironmentSpec("sums"),
    seed=7,
    sampling=SamplingContract(1.0, 100, (1,), 1000),
    optimizer=OptimizerSpec(1e-3),
    groups_per_batch=1,
    group_size=2,
    max_lag=4,
    mode="async",
    heartbeat_s=1.0,
    lease_s=60.0,
    round_s=60.0,
)


class Desk:
    """A state with one group of two slots, the first leased to FOX, and a store beside it. It stands for the
    authority, and keeps what it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State(versions=[VersionRecord(Version(3), Digest("0" * 64), 0, None, {})])
        self.state.groups[0] = Group(TASK, Version(1), [Slot("leased", A), Slot()])
        self.state.leases[A] = Lease(FOX.peer_id, 10**15, [(0, 0)])
        self.core = SimpleNamespace(state=self.state)
        self.refusals: Counter[str] = Counter()
        self.told: list[PiecesReceived] = []
        self.store = self.open()

    def open(self) -> PieceStore:
        return PieceStore(self.path, cast(Authority, self), SPEC)

    async def submit(self, event: PiecesReceived) -> None:
        self.told.append(event)

    def say(self, *pieces: Piece, lease: LeaseId = A, who: Identity = FOX, slot: SlotKey = SLOT) -> Answer:
        return self.store.receive(who.peer_id, [progress_of(*pieces, lease=lease, slot=slot)])

    @property
    def starts(self) -> list[int]:
        """Of the pieces that are kept."""
        return [piece.start for piece in pieces_in(self.store.frames(SLOT))]

    def move(self, *, to: Identity = OWL, lease: LeaseId = B, prefix: Prefix | None = None) -> None:
        """The core gives the slot to another node."""
        self.state.leases.clear()
        self.state.leases[lease] = Lease(to.peer_id, 10**15, [(0, 0)])
        self.state.groups[0].slots[0] = Slot("leased", lease, prefix=prefix)


def piece(start: int, *token_ids: int, version: int = 2, who: Identity = FOX, slot: SlotKey = SLOT) -> Piece:
    logprobs = tuple(-0.25 * (1 + n) for n in range(len(token_ids)))
    return sign_piece(
        who, run_id=RUN, slot=slot, piece=Piece(who.peer_id, Version(version), start, token_ids, logprobs)
    )


def progress_of(*pieces: Piece, lease: LeaseId = A, slot: SlotKey = SLOT) -> control_pb2.SlotProgress:
    messages = [piece_message(each) for each in pieces]
    return control_pb2.SlotProgress(lease_id=lease, slot=slot_message(slot), pieces=messages)


def prefix_of(*pieces: Piece) -> Prefix:
    segments = tuple((each.version, len(each.token_ids)) for each in pieces)
    return Prefix(segments, edges_of(SLOT, pieces)[-1])


THREE = (piece(0, 5, 6), piece(2, 7, 8, 9, version=3), piece(5, 10, version=3))
