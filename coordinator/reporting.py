"""The report, made from the core's state when somebody asks. Pure but for the clock that it is given.

With thousands of nodes it takes a while, so a part is made anew only where something has changed.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.authority import Authority
from coordinator.core.curriculum import MIN_REWARDS, shares_of
from coordinator.core.events import ANY_ROLE, Capability, InviteRole, Presence
from coordinator.core.roles import Candidate
from coordinator.core.state import State, VersionRecord
from coordinator.report import (
    BooksReport,
    DeadLetterReport,
    EvaluationReport,
    LeaseReport,
    NodeReport,
    PoolReport,
    RefusalReport,
    RunReport,
    StatusReport,
    VersionReport,
)
from coordinator.settings import RunFile
from coordinator.work_service import Refusal
from protocol.ids import PeerId, Version

RATE_WINDOW_MS = 120_000


class _Known(NamedTuple):
    """All that the report of a node is made of."""

    role: str
    invite_role: InviteRole
    presence: Presence | None
    capability: Capability | None
    refusal: Refusal | None
    rate: float
    failure: float
    num_leased: int
    num_trained: int


class Reporter:
    """Makes `StatusReport`s. `refused` says why nodes got no work when they last asked."""

    def __init__(
        self, authority: Authority, run: RunFile, *, refused: Mapping[PeerId, Refusal], clock: Callable[[], int]
    ) -> None:
        self._authority, self._run, self._refused, self._clock = authority, run, refused, clock
        self._started_ms = clock()
        self._history: dict[Version, VersionReport] = {}
        self._nodes: dict[PeerId, tuple[_Known, NodeReport]] = {}

    def report(self) -> StatusReport:
        """The run as it stands now."""
        state, now_ms = self._authority.core.state, self._clock()
        nodes = [self._node(peer_id) for peer_id in state.nodes]
        books = self._authority.core.books()
        run_state, waiting_for = self._authority.core.waiting_for(now_ms)
        return StatusReport(
            run=self._run_report(),
            state=run_state,
            waiting_for=waiting_for,
            version=state.head.version if state.head else -1,
            epoch=state.epoch,
            uptime_s=(now_ms - self._started_ms) / 1000,
            versions_per_hour=versions_per_hour([record.committed_ms for record in state.versions], now_ms=now_ms),
            tokens_per_s=sum(node.tokens_per_s for node in nodes if node.state == "live"),
            num_accepted=sum(node.num_accepted for node in state.nodes.values()),
            num_diverged=state.num_diverged,
            num_masked_tokens=state.num_tokens_masked,
            num_moved_slots=state.num_moved,
            pools=self._pools(state),
            nodes=nodes,
            books=BooksReport(**{name: getattr(books, name) for name in BooksReport.model_fields}),
            leases=LeaseReport(**{name: getattr(books, name) for name in LeaseReport.model_fields}),
            lag_histogram=dict(state.lag_histogram),
            history=self._versions(state),
            evaluations=[
                EvaluationReport(version=record.version, accuracy=record.accuracy, num_tasks=record.num_tasks)
                for record in state.versions
                if record.accuracy is not None
            ],
            dead_letters=[
                DeadLetterReport(slot=str(letter.slot), reason=letter.reason, at_version=letter.at_version)
                for letter in state.dead_letters
            ],
            refusals=dict(self._authority.refusals),
        )

    def _run_report(self) -> RunReport:
        run = self._run
        return RunReport(
            run_id=self._authority.core.rules.spec.run_id,
            name=run.name,
            environment=run.environment.name,
            mode=run.batch.mode,
            max_lag=self._authority.core.rules.spec.max_lag,
            groups_per_batch=run.batch.groups,
            group_size=run.batch.group_size,
            stop_version=run.stop_version,
        )

    def _pools(self, state: State) -> list[PoolReport]:
        """Of a curriculum, once it has begun."""
        curriculum = self._authority.core.rules.curriculum
        if curriculum is None or not state.pools:
            return []
        names, shares = (pool.name for pool in self._run.environment.pools), shares_of(curriculum, state.pools)
        return [
            PoolReport(
                name=name,
                share=share,
                num_groups=pool.num_opened,
                num_rewards=pool.num_rewards,
                mean_reward=pool.mean_reward if pool.num_rewards >= MIN_REWARDS else None,
            )
            for name, share, pool in zip(names, shares, state.pools, strict=True)
        ]

    def _versions(self, state: State) -> list[VersionReport]:
        """The history of rounds; the report of a version does not change."""
        known, self._history = self._history, {}
        for record in state.versions:
            if record.round_id is not None:
                self._history[record.version] = known.get(record.version) or _version_report(record)
        return list(self._history.values())

    def _node(self, peer_id: PeerId) -> NodeReport:
        """Made anew only where something has changed."""
        state, soft = self._authority.core.state, self._authority.core.soft
        sighting, node = soft.live.get(peer_id), state.nodes[peer_id]
        known = _Known(
            role=state.roles.get(peer_id, "idle"),
            invite_role=node.invite_role,
            presence=sighting.presence if sighting else None,
            capability=soft.capabilities.get(peer_id),
            refusal=self._refused.get(peer_id),
            rate=node.rate,
            failure=node.failure,
            num_leased=node.num_leased,
            num_trained=node.num_trained,
        )
        before = self._nodes.get(peer_id)
        if before is None or before[0] != known:
            before = self._nodes[peer_id] = (known, _node_report(peer_id, known))
        return before[1]


def _node_report(peer_id: PeerId, known: _Known) -> NodeReport:
    presence, capability, refusal = known.presence, known.capability, known.refusal
    wish = presence.allowed_roles if presence else ANY_ROLE
    return NodeReport(
        peer_id=peer_id,
        name=(presence.name if presence else "") or peer_id[-8:],
        role=known.role,
        allowed_roles=list(Candidate(peer_id, known.invite_role, None, None, wish=wish).may),
        state="live" if presence else "lost",
        version=presence.version if presence else -1,
        tokens_per_s=presence.tokens_per_s if presence else 0.0,
        engine=presence.engine if presence else "",
        activity=presence.activity if presence else "",
        device=capability.device if capability else "",
        decode_tokens_per_s=capability.decode_tokens_per_s if capability else 0.0,
        train_tokens_per_s=capability.train_tokens_per_s if capability else 0.0,
        measured_tokens_per_s=known.rate,
        failure=known.failure,
        num_leased=known.num_leased,
        rollouts_trained=known.num_trained,
        refused=RefusalReport(code=refusal.code, sentence=refusal.sentence, at_ms=refusal.at_ms) if refusal else None,
    )


def versions_per_hour(committed_ms: list[int], *, now_ms: int) -> float:
    """The rate over the last two minutes, or over the last two versions where they are further apart."""
    recent = [time_ms for time_ms in committed_ms if time_ms >= now_ms - RATE_WINDOW_MS]
    if len(recent) < 3:
        recent = committed_ms[-2:]
    if len(recent) < 2 or recent[-1] == recent[0]:
        return 0.0
    return 3_600_000 * (len(recent) - 1) / (max(now_ms, recent[-1]) - recent[0])


def _version_report(record: VersionRecord) -> VersionReport:
    return VersionReport(
        version=record.version,
        committed_ms=record.committed_ms,
        reward=record.metrics.get("reward", 0.0),
        num_rollouts=int(record.metrics.get("num_slots", 0)),
        mean_lag=record.metrics.get("staleness/mean", 0.0),
        max_lag=int(record.metrics.get("staleness/max", 0)),
        metrics=record.metrics,
    )
