"""A swarm in virtual time: the coordinator's real core, and simulated nodes that bring it events and obey its effects.

Nothing here decides what the core decides. Time is a heap of calls, so an hour costs seconds; chance is one seed. What
a batch consumed is counted from what the simulated engines sampled, not from the core's own notes, so that the core's
word on freshness is checked by somebody else.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.core import effects as x
from coordinator.core import events as e
from coordinator.core.handle import Core
from coordinator.core.replies import Grant, Reply
from coordinator.core.rules import Rules
from node.planner import wanted_outstanding
from protocol.errors import HexcombError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.lag import lag
from tests.bench.simulated_nodes import Engine, Job, RolloutNode, Segments, Trainer
from tests.coordinator.world import BASE, make_body

TIMER_S = 1.0


@dataclass(slots=True)
class Consumed:
    """What one round trained on. `train_s` is what its slowest member takes, `busy_s` what all take together;
    `num_running` slots were on nodes when it began. `num_over` counts live tokens over the bound, by this module's own
    books."""

    version: Version
    sealed_s: float
    train_s: float = 0.0
    busy_s: float = 0.0
    num_running: int = 0
    num_slots: int = 0
    num_tokens: int = 0
    num_live: int = 0
    num_over: int = 0
    max_lag: int = 0
    versions: set[Version] = field(default_factory=set)


class Clock:
    """Virtual time: calls in order of their moment, then of their making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls when so much time has passed."""
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._ties), call))

    def run(self, *, until: Callable[[], bool], limit_s: float) -> None:
        """Lets time pass until something is true. Raises `TimeoutError` at `limit_s` of virtual time."""
        while not until():
            self.now_s, _, call = heapq.heappop(self._calls)
            if self.now_s > limit_s:
                raise TimeoutError(f"virtual time is over after {limit_s:.0f} s")
            call()


class Swarm:
    """The core and everybody around it. `length_of` and `reward_of` say what a slot will come to, wherever it runs."""

    def __init__(
        self,
        rules: Rules,
        *,
        engines: list[Engine],
        trainer_rates: list[float],
        length_of: Callable[[SlotKey], int],
        reward_of: Callable[[SlotKey], float | None] | None = None,
        num_leases: Callable[..., int] = wanted_outstanding,
        pause_s: float = 3.0,
        pieces_s: float = 3.0,
        all_every: int = 5,
        seed: int = 0,
    ) -> None:
        self.rules = replace(rules, num_trainers=len(trainer_rates), expected_nodes=len(trainer_rates) + len(engines))
        self.core, self.clock = Core(self.rules), Clock()
        self.random = random.Random(seed)
        self.length_of, self.num_leases, self._pieces_s = length_of, num_leases, pieces_s
        self._all_every = all_every
        self._reward_of = reward_of or (lambda slot: self.random.random())
        self.head = Version(-1)
        self.sampled: dict[SlotKey, Segments] = {}
        self.waits_s: list[float] = []
        self.filled_s: dict[Version, list[float]] = {}
        self._granted_s: dict[SlotKey, float] = {}
        self.rounds: list[Consumed] = []
        self.refusals: Counter[str] = Counter()
        self.num_events = self._num_streams = 0
        self.ties = itertools.count()
        self.nodes = {
            (peer_id := PeerId(f"r{i:03}")): RolloutNode(self, peer_id, engine) for i, engine in enumerate(engines)
        }
        self.trainers = {
            (peer_id := PeerId(f"t{i:03}")): Trainer(self, peer_id, rate, pause_s)
            for i, rate in enumerate(trainer_rates)
        }
        self._start()

    def run(self, *, until: Callable[[], bool], limit_s: float = 1e7) -> float:
        """Virtual seconds until something is true; the books must balance then."""
        started_s = self.clock.now_s
        self.clock.run(until=until, limit_s=limit_s)
        assert self.core.books().is_balanced
        return self.clock.now_s - started_s

    def run_to(self, version: int, *, limit_s: float = 1e7) -> float:
        """Virtual seconds until that version exists."""
        return self.run(until=lambda: self.head >= version, limit_s=limit_s)

    def tell(self, event: e.Event) -> Reply:
        """Brings an event in. Effects are carried out at once, but after it returned. Raises what the
        core raises."""
        self.num_events += 1
        try:
            decision = self.core.handle(event, self.now_ms)
        except HexcombError as refusal:
            self.refusals[refusal.code] += 1
            raise
        for effect in decision.effects:
            self.clock.after(0.0, partial(self._carry_out, effect))
        return decision.reply

    @property
    def now_ms(self) -> int:
        """The coordinator's clock."""
        return 1_000_000 + round(self.clock.now_s * 1000)

    def new_lease_id(self) -> LeaseId:
        """As the shell draws one for each request."""
        return LeaseId(f"{next(self.ties):016x}")

    def take(self, grant: Grant) -> list[Job]:
        """The work that a lease is, with what others sampled of its slots."""
        jobs: list[Job] = []
        for slot in grant.slots:
            self._granted_s.setdefault(slot, self.clock.now_s)
            known = self.core.state.find(slot)
            prefix = known.prefix if known is not None else None
            segments, edge = (prefix.segments, prefix.edge) if prefix else ((), None)
            jobs.append(Job(grant.lease_id, slot, self.length_of(slot), segments, edge))
        return jobs

    def note_accepted(self, slot: SlotKey, segments: Segments) -> None:
        """Remembers what was really sampled, and how long the slot took since it was first granted."""
        self.sampled[slot] = segments
        self.waits_s.append(self.clock.now_s - self._granted_s.pop(slot))
        self.filled_s.setdefault(slot.version, []).append(self.clock.now_s)

    def waiting_s(self) -> list[float]:
        """For how long each slot has waited that was granted and is not filled."""
        return [self.clock.now_s - granted_s for granted_s in self._granted_s.values()]

    def see(self, peer_id: PeerId, version: Version, *, trainer_endpoint: str = "") -> None:
        """A heartbeat."""
        root = self.core.state.roots.get(version, Digest(""))
        presence = e.Presence(version, root, (version,), f"{peer_id}:2", trainer_endpoint, "busy", 1.0, "simulated")
        self.tell(e.NodeSeen(peer_id, presence))

    @property
    def _members(self) -> list["Trainer | RolloutNode"]:
        return [*self.trainers.values(), *self.nodes.values()]

    def _start(self) -> None:
        self.tell(e.BaseRegistered(BASE))
        seats = [(peer, "trainer", one.capability) for peer, one in self.trainers.items()]
        seats += [(peer, "rollout", node.capability) for peer, node in self.nodes.items()]
        for peer_id, role, capability in seats:
            invite_id = InviteId(role)
            if invite_id not in self.core.state.invites:
                self.tell(e.InviteCreated(invite_id, "00", 100_000, self.now_ms + 10**12, role))  # type: ignore[arg-type]
            self.tell(e.InviteRedeemed(invite_id, peer_id))
            self.see(peer_id, Version(-1))
            self.tell(e.CapabilityLearned(peer_id, capability))
        self._repeat(self.rules.spec.heartbeat_s, self._beat)
        self._repeat(TIMER_S, lambda: self.tell(e.TimerFired()))
        if self._pieces_s:
            self._repeat(self._pieces_s, self._stream)

    def _repeat(self, every_s: float, call: Callable[[], object]) -> None:
        def again() -> None:
            call()
            self.clock.after(every_s, again)

        self.clock.after(every_s, again)

    def _beat(self) -> None:
        for member in self._members:
            member.beat()

    def _stream(self) -> None:
        """Pieces. To keep the count of events low most name one slot of each lease, and one in `all_every` all."""
        self._num_streams += 1
        of_all = self._num_streams % self._all_every == 0
        progress = tuple(item for node in self.nodes.values() for item in node.pieces(of_all=of_all))
        if progress:
            self.tell(e.PiecesReceived(progress))

    def _carry_out(self, effect: x.Effect) -> None:
        match effect:
            case x.ScoreRollout(slot):
                self.tell(e.RolloutScored(slot, self._reward_of(slot)))
            case x.SendPlan():
                self._begin_round(effect)
            case x.AnnounceVersion(version):
                self.head = version
                for member in self._members:
                    member.on_version()
            case x.CancelLeases(peer_id, lease_ids) if peer_id in self.nodes:
                self.nodes[peer_id].cancel(lambda job: job.lease_id in lease_ids)
            case x.CancelSlots(peer_id, slots) if peer_id in self.nodes:
                self.nodes[peer_id].cancel(lambda job: job.slot in slots)
            case _:
                pass  # roles are pinned, rounds do not fail, nobody evaluates

    def _begin_round(self, plan: x.SendPlan) -> None:
        """The members compute; when the slowest has its sums, all average and attest the same weights."""
        consumed = Consumed(plan.base_version, self.clock.now_s)
        consumed.num_running = sum(node.num_outstanding for node in self.nodes.values())
        for member in plan.members:
            before = consumed.num_tokens
            self._count(plan.round_id, member.peer_id, consumed)
            train_s = (consumed.num_tokens - before) / self.trainers[member.peer_id].tokens_per_s
            consumed.busy_s += train_s
            consumed.train_s = max(consumed.train_s, train_s)
        self.rounds.append(consumed)
        body = make_body(plan.base_version + 1, parent=plan.base_root)

        def attest() -> None:
            for member in plan.members:
                self.tell(e.VersionAttested(member.peer_id, plan.round_id, body, {}))

        self.clock.after(consumed.train_s, attest)

    def _count(self, round_id: RoundId, peer_id: PeerId, consumed: Consumed) -> None:
        for item in self.core.share_of(round_id, peer_id):
            segments, start = self.sampled.pop(item.slot), 0
            consumed.num_slots += 1
            for version, num_tokens in segments:
                num_live = item.mask[start : start + num_tokens].count(True)
                start += num_tokens
                age = lag(v_train=self.head, v_token=version)
                consumed.num_live += num_live
                if num_live:
                    consumed.versions.add(version)
                    consumed.max_lag = max(consumed.max_lag, age)
                    consumed.num_over += num_live if age > self.rules.spec.max_lag else 0
            assert start == len(item.mask), "the share has another length than the rollout"
            consumed.num_tokens += start
