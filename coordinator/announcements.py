"""What nodes are told unasked: roles, versions, plans, cancels; and the whole of it again to one that comes back.

The effects of the core are carried out here. Nothing is decided: a message that a node misses is told again by
`greeting` when its next stream opens. Impure: reads the journal, queues messages.
"""

from collections.abc import Callable
from typing import assert_never

from coordinator.authority import Authority
from coordinator.core.effects import (
    AbortRound,
    AnnounceVersion,
    AssignRole,
    CancelLeases,
    CancelSlots,
    Effect,
    RequestEvaluation,
    ScoreRollout,
    SendPlan,
)
from coordinator.evaluations import Evaluations
from coordinator.home import CoordinatorHome
from coordinator.scoring import Scoring
from coordinator.sessions import Sessions
from protocol.errors import VersionFromFutureError
from protocol.ids import PeerId, Version
from protocol.manifest import SignedManifest
from protocol.round import RoundPlan, sign_plan
from protocol.run import RunSpec
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import manifest_message, prompt_messages, slot_message

MAX_HOLDERS = 16


class Announcer:
    """Carries out effects."""

    def __init__(
        self,
        home: CoordinatorHome,
        spec: RunSpec,
        authority: Authority,
        sessions: Sessions,
        scoring: Scoring,
        evaluations: Evaluations,
        clock: Callable[[], int],
    ) -> None:
        self._home, self._spec, self._authority, self._sessions = home, spec, authority, sessions
        self._scoring, self._evaluations, self._clock = scoring, evaluations, clock
        self.bootstraps: Callable[[], list[str]] = list
        self._plan: tuple[str, control_pb2.SessionResponse] | None = None

    async def carry_out(self, effect: Effect) -> None:
        """One effect, after its facts are in the journal."""
        match effect:
            case AssignRole(peer_id=peer_id):
                self._sessions.send([peer_id], self._role_message(peer_id))
            case ScoreRollout(slot=slot):
                self._scoring.add(slot)
            case CancelLeases(peer_id=peer_id, lease_ids=lease_ids):
                cancelled = control_pb2.LeasesCancelled(lease_ids=lease_ids)
                self._sessions.send([peer_id], control_pb2.SessionResponse(leases_cancelled=cancelled))
            case CancelSlots(peer_id=peer_id, slots=slots):
                cancelled = control_pb2.LeasesCancelled(slots=[slot_message(slot) for slot in slots])
                self._sessions.send([peer_id], control_pb2.SessionResponse(leases_cancelled=cancelled))
            case SendPlan():
                message = self._plan_message(effect)
                self._plan = (effect.round_id, message)
                self._sessions.send([member.peer_id for member in effect.members], message)
            case AbortRound(round_id=round_id, members=members, reason=reason):
                aborted = control_pb2.RoundAborted(round_id=round_id, reason=reason)
                self._sessions.send(members, control_pb2.SessionResponse(round_aborted=aborted))
            case AnnounceVersion(version=version):
                announced = await self.announced(version)
                self._sessions.broadcast(control_pb2.SessionResponse(version_announced=announced))
            case RequestEvaluation(peer_id=peer_id, version=version):
                self._evaluations.note_asked(peer_id, version)
                prompts = prompt_messages(await self._evaluations.prompts())
                wish = control_pb2.EvaluationRequested(version=version, prompts=prompts)
                self._sessions.send([peer_id], control_pb2.SessionResponse(evaluation_requested=wish))
            case _:
                assert_never(effect)

    def welcome(self) -> control_pb2.SessionResponse:
        """The first message of every stream."""
        welcome = control_pb2.Welcome(
            run_spec=self._spec.to_bytes(),
            now_ms=self._clock(),
            epoch=self._authority.core.state.epoch,
            dht_bootstraps=self.bootstraps(),
        )
        return control_pb2.SessionResponse(welcome=welcome)

    async def greeting(self, peer_id: PeerId) -> list[control_pb2.SessionResponse]:
        """All that a node must know when its stream opens, after the welcome. A head that is not durable yet is left
        out: it is announced on all open streams once it is."""
        state, messages = self._authority.core.state, list[control_pb2.SessionResponse]()
        head = state.head
        if head is not None and (signed := await self._authority.manifest(head.version)) is not None:
            announced = self._announcement(head.version, signed)
            messages.append(control_pb2.SessionResponse(version_announced=announced))
        if peer_id in state.roles:
            messages.append(self._role_message(peer_id))
        is_member = state.round is not None and peer_id in state.round.peer_ids
        if is_member and self._plan is not None and state.round is not None and self._plan[0] == state.round.round_id:
            messages.append(self._plan[1])
        return messages

    async def announced(self, version: Version) -> control_pb2.VersionAnnounced:
        """A committed version's manifest, and who holds it: trainers first, then whoever says so."""
        signed = await self._authority.manifest(version)
        if signed is None:
            raise VersionFromFutureError(f"version {version} is not known", why="it was never committed or is retired")
        return self._announcement(version, signed)

    def _announcement(self, version: Version, signed: SignedManifest) -> control_pb2.VersionAnnounced:
        return control_pb2.VersionAnnounced(manifest=manifest_message(signed), holders=self._holders(version))

    def _holders(self, version: Version) -> list[str]:
        state, live = self._authority.core.state, self._authority.core.soft.live
        seats = {"trainer": 0, "rollout": 1, "idle": 2}
        found = [
            (seats[state.roles.get(peer_id, "idle")], f"{peer_id}@{sighting.presence.endpoint}")
            for peer_id, sighting in live.items()
            if sighting.presence.endpoint
            and (version in sighting.presence.versions_held or self._made_it(peer_id, version))
        ]
        return [holder for _, holder in sorted(found)][:MAX_HOLDERS]

    def _made_it(self, peer_id: PeerId, version: Version) -> bool:
        """Whether a trainer that was in step made the version, before its next heartbeat says so."""
        state, sighting = self._authority.core.state, self._authority.core.soft.live[peer_id]
        return state.roles.get(peer_id) == "trainer" and sighting.presence.version == version - 1

    def _role_message(self, peer_id: PeerId) -> control_pb2.SessionResponse:
        role = self._authority.core.state.roles.get(peer_id, "idle")
        return control_pb2.SessionResponse(role_assigned=control_pb2.RoleAssigned(role=role))

    def _plan_message(self, effect: SendPlan) -> control_pb2.SessionResponse:
        plan = RoundPlan(
            run_id=self._spec.run_id,
            round_id=effect.round_id,
            base_version=effect.base_version,
            base_root=effect.base_root,
            members=effect.members,
            shards=effect.shards,
            divisor=effect.divisor,
            deadline_ms=self._clock() + int(effect.remaining_s * 1000),
            wire=self._spec.wire,
        )
        signed = sign_plan(self._home.identity, plan)
        document = common_pb2.SignedDocument(payload=signed.payload, signature=signed.signature)
        return control_pb2.SessionResponse(round_sealed=control_pb2.RoundSealed(plan=document))
