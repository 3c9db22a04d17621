"""Turns of conversations on their way to the environment, and its replies on their way into slots. Impure: the grader,
the coordinator's key, the file of pieces.

Invariants: what the environment says comes from the organizer's own child and is signed by the coordinator, so that no
node can forge it; it is kept with the turn that it answers before the core hears of either; asked again about the same
turn, after a crash in between as well, the environment says the same.
"""

from collections.abc import Sequence

import structlog

from coordinator.authority import Authority
from coordinator.core.events import EnvironmentReplied
from coordinator.grader import Grader
from coordinator.grading import Conversation
from coordinator.hearsay import printable
from coordinator.pieces import PieceStore
from coordinator.received import MAX_PIECES
from protocol.errors import HexcombError, UnreachableError
from protocol.ids import Digest, LeaseId, PeerId
from protocol.keys import Identity
from protocol.rollout import Piece, Rollout, edges_of, pack_ids, sign_piece
from protocol.run import RunSpec

MAX_REASON = 300

Handed = tuple[Rollout, tuple[Digest, ...]]
"""A rollout with the digests after its pieces."""

Answer = EnvironmentReplied | str | None
"""A reply, why there could be none, or None: the conversation is over."""

log = structlog.get_logger()


class Turns:
    """Asks the environment, where there is one that replies."""

    def __init__(
        self, authority: Authority, spec: RunSpec, *, grader: Grader, pieces: PieceStore, identity: Identity
    ) -> None:
        self._authority, self._spec, self._identity = authority, spec, identity
        self._grader, self._pieces = grader, pieces

    @property
    def peer_id(self) -> PeerId:
        """Who signs what the environment says."""
        return self._identity.peer_id

    async def answers(self, peer_id: PeerId, lease_id: LeaseId, handed: Sequence[Handed]) -> list[Answer]:
        """What becomes of each rollout that this node would hand in, each of another slot, in one call at a time. Those
        that it may not hand in are not asked about: what the core says of them does not depend on it. Raises
        `UnreachableError` when there is nobody to ask."""
        answers: list[Answer] = [None] * len(handed)
        asked = [place for place, item in enumerate(handed) if self._may_go_on(peer_id, lease_id, item)]
        for place, reply in zip(asked, await self._ask([handed[place][0] for place in asked]), strict=True):
            rollout = handed[place][0]
            if isinstance(reply, str):
                log.error("the environment did not reply", slot=str(rollout.slot), why=reply)
                answers[place] = f"its environment did not reply: {printable(reply, MAX_REASON)}"
            elif reply is not None and self._holds(peer_id, lease_id, handed[place]):
                answers[place] = self._keep(lease_id, rollout, reply)
        if any(isinstance(answer, EnvironmentReplied) for answer in answers):
            await self._pieces.flush()
        return answers

    async def _ask(self, rollouts: Sequence[Rollout]) -> Sequence[tuple[int, ...] | str | None]:
        if not rollouts:
            return ()
        said = [(rollout.slot.task, Conversation(rollout.token_ids, rollout.given)) for rollout in rollouts]
        try:
            return await self._grader.replies(said)
        except HexcombError as error:  # which is neither the slots' fault nor the node's
            raise UnreachableError(
                "the environment cannot be asked", why=error.sentence(), remedy="Try again in a moment."
            ) from error

    def _may_go_on(self, peer_id: PeerId, lease_id: LeaseId, item: Handed) -> bool:
        """Whether the rollout ends with a turn of which the environment is to hear."""
        contract, (rollout, _) = self._spec.sampling, item
        has_room = len(rollout.token_ids) < contract.max_new_tokens and len(rollout.pieces) < MAX_PIECES
        is_turn = rollout.finish_reason == "stop" and len(rollout.given) + 1 < contract.max_turns
        return has_room and is_turn and self._holds(peer_id, lease_id, item)

    def _holds(self, peer_id: PeerId, lease_id: LeaseId, item: Handed) -> bool:
        """Whether the slot is the node's, and the rollout goes on from what came with it: what another conversation
        would be told must not take the place of what was received of this one."""
        state, (rollout, edges) = self._authority.core.state, item
        slot, lease = state.find(rollout.slot), state.leases.get(lease_id)
        if slot is None or lease is None or slot.lease_id != lease_id or lease.peer_id != peer_id:
            return False
        if slot.prefix is None:
            return not rollout.given
        return rollout.given == slot.prefix.given and slot.prefix.edge in edges

    def _keep(self, lease_id: LeaseId, rollout: Rollout, reply: tuple[int, ...]) -> EnvironmentReplied | None:
        """The reply as a piece behind those of the rollout; none where nothing could be sampled after it."""
        start = len(rollout.token_ids)
        if start + len(reply) >= self._spec.sampling.max_new_tokens:
            return None
        data = pack_ids(reply), b""
        said = Piece.of_data(self.peer_id, rollout.pieces[-1].version, start, data, b"")
        said = sign_piece(self._identity, run_id=self._spec.run_id, slot=rollout.slot, piece=said)
        pieces = (*rollout.pieces, said)
        self._pieces.keep(rollout.slot, lease_id, pieces)
        return EnvironmentReplied(len(reply), edges_of(rollout.slot, pieces)[-1])
