"""A swarm around the core: helpers that bring events in, check the books after each, and keep every fact."""

from dataclasses import replace

from coordinator.core import events as e
from coordinator.core.books import check
from coordinator.core.effects import Effect
from coordinator.core.facts import Fact, LeaseGranted
from coordinator.core.handle import Core, Decision
from coordinator.core.replies import Grant, Receipt
from coordinator.core.rules import Rules
from coordinator.core.state import encode_state
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, RunId, SlotKey, Version
from protocol.manifest import Body, TensorSpec, digest_of
from protocol.run import EnvironmentSpec, OptimizerSpec, Role, RunSpec, SamplingContract

RUN_ID = RunId("ab" * 16)
INVITE = InviteId("0123456789abcdef")


def make_rules(**changes: object) -> Rules:
    """Small rules; a name of `RunSpec` changes the spec, any other the rules."""
    spec = RunSpec(
        run_id=RUN_ID,
        name="test",
        environment=EnvironmentSpec("sums"),
        seed=7,
        sampling=SamplingContract(1.0, 64, (0,), 100),
        optimizer=OptimizerSpec(lr=1e-3),
        groups_per_batch=2,
        group_size=2,
        max_lag=2,
        mode="async",
        heartbeat_s=1.0,
        lease_s=20.0,
        round_s=30.0,
    )
    names = set(RunSpec.__dataclass_fields__)
    spec = replace(spec, **{key: value for key, value in changes.items() if key in names})  # type: ignore[arg-type]
    rest = {key: value for key, value in changes.items() if key not in names}
    return Rules(spec, **rest)  # type: ignore[arg-type]


def make_body(version: int, *, parent: Digest | None, salt: str = "") -> Body:
    """A body of 8 elements whose content depends on version and salt."""
    return Body(
        run_id=RUN_ID,
        version=Version(version),
        parent=parent,
        tensors=(TensorSpec("w", (4, 2), "F32"),),
        files=(),
        chunk_bytes=1024,
        chunks=(digest_of(f"{version}{salt}".encode()),),
        optimizer=digest_of(b"optimizer") if version else None,
    )


BASE = make_body(0, parent=None)


class World:
    """One core and the nodes around it. Every event's facts are kept in `facts`."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or make_rules()
        self.core = Core(self.rules)
        self.now_ms = 1_000_000
        self.facts: list[Fact] = []
        self.effects: list[Effect] = []
        self.is_checked = True
        self._num_leases = 0

    def do(self, event: e.Event) -> Decision:
        """One event, after which the books must hold."""
        decision = self.core.handle(event, self.now_ms)
        self.facts += decision.facts
        self.effects += decision.effects
        if self.is_checked:
            check(self.core.state)
        return decision

    def tick(self, seconds: float = 0.0) -> Decision:
        """Time passes, and somebody notices, twice a second."""
        end_ms = self.now_ms + round(seconds * 1000)
        while end_ms - self.now_ms > 500:
            self.now_ms += 500
            self.do(e.TimerFired())
        self.now_ms = end_ms
        return self.do(e.TimerFired())

    def stall(self, seconds: float) -> Decision:
        """Time passes, and the coordinator notices nothing of it until it is over."""
        self.now_ms += round(seconds * 1000)
        return self.do(e.TimerFired())

    def crash(self) -> None:
        """The process dies and comes back with what the journal has."""
        before = encode_state(self.core.state)
        self.core = Core(self.rules)
        self.core.replay(self.facts)
        assert encode_state(self.core.state) == before, "replay gives another state"
        self.do(e.CoordinatorStarted())

    def start(self, *, trainers: int = 1, rollouts: int = 1) -> None:
        """Base, nodes `t0…` and `r0…` in their roles with version 0 loaded; the number of trainers is pinned."""
        self.rules = replace(self.rules, num_trainers=trainers, expected_nodes=trainers + rollouts)
        self.core.rules = self.rules
        self.do(e.BaseRegistered(BASE))
        for index in range(trainers):
            self.join(f"t{index}", allowed="trainer")
        for index in range(rollouts):
            self.join(f"r{index}", allowed="rollout")
        self.see_all()

    def join(self, name: str, *, allowed: e.InviteRole = "auto", rate: float = 100.0) -> PeerId:
        """A new node that says hello and what it can do."""
        peer_id, invite_id = PeerId(name), InviteId(allowed)
        if invite_id not in self.core.state.invites:
            self.do(e.InviteCreated(invite_id, "00", 1000, self.now_ms + 10**9, allowed))
        self.do(e.InviteRedeemed(invite_id, peer_id))
        self.see(peer_id, version=-1)
        self.do(e.CapabilityLearned(peer_id, e.Capability(rate, rate, 1, "cpu")))
        return peer_id

    def see(
        self, peer_id: str, *, version: int | None = None, endpoint: str | None = None, unwilling: str = ""
    ) -> Decision:
        """A heartbeat; by default with the head loaded."""
        head = self.core.state.head
        loaded = Version(version if version is not None else head.version if head else -1)
        trains = self.core.state.roles.get(PeerId(peer_id)) == "trainer"
        where = endpoint if endpoint is not None else f"{peer_id}:1" if trains else ""
        root = self.core.state.roots.get(loaded, Digest(""))
        presence = e.Presence(loaded, root, (loaded,), f"{peer_id}:2", where, "busy", 1.0, "test", "", unwilling)
        return self.do(e.NodeSeen(PeerId(peer_id), presence))

    def see_all(self, *, but: tuple[str, ...] = ()) -> None:
        """A heartbeat of every living node, with the head loaded."""
        for peer_id in list(self.core.soft.live):
            if peer_id not in but:
                self.see(peer_id)

    def role(self, name: str) -> Role | None:
        """A node's role."""
        return self.core.state.roles.get(PeerId(name))

    def lease(self, name: str = "r0", num_slots: int = 2, *, version: int | None = None) -> Grant:
        """A lease under the head, or another version."""
        head = self.core.state.head
        assert head is not None
        loaded = Version(head.version if version is None else version)
        root = self.core.state.roots.get(loaded, Digest(""))
        self._num_leases += 1
        lease_id = LeaseId(f"{self._num_leases:016x}")
        reply = self.do(e.WorkRequested(PeerId(name), loaded, root, num_slots, lease_id)).reply
        assert isinstance(reply, Grant)
        return reply

    def submit(
        self,
        grant: Grant,
        slot: SlotKey,
        *,
        name: str = "r0",
        segments: tuple[tuple[int, int], ...] | None = None,
        digest: str | None = None,
    ) -> Receipt:
        """A rollout for a slot; by default of four tokens of the head's version."""
        head = self.core.state.head
        assert head is not None
        pieces = tuple((Version(v), n) for v, n in segments or ((head.version, 4),))
        word = Digest(digest or f"digest of {slot}")
        reply = self.do(e.RolloutSubmitted(PeerId(name), grant.lease_id, slot, word, pieces)).reply
        assert isinstance(reply, Receipt)
        return reply

    def score(self, slot: SlotKey, reward: float | None = None) -> Decision:
        """The grader's word; by default 1 for even samples and 0 for odd ones."""
        return self.do(e.RolloutScored(slot, float(slot.sample % 2 == 0) if reward is None else reward))

    def fill_batch(self, *, name: str = "r0", segments: tuple[tuple[int, int], ...] | None = None) -> None:
        """As many complete groups as a batch needs."""
        spec = self.rules.spec
        wanted = spec.groups_per_batch * spec.group_size
        while wanted:
            grant = self.lease(name, min(wanted, spec.group_size))
            for slot in grant.slots:
                self.submit(grant, slot, name=name, segments=segments)
                self.score(slot)
            wanted -= len(grant.slots)

    @property
    def round_id(self) -> RoundId:
        """The open round."""
        assert self.core.state.round is not None
        return self.core.state.round.round_id

    def next_body(self, *, salt: str = "") -> Body:
        """A body that could follow the head."""
        head = self.core.state.head
        assert head is not None
        return make_body(head.version + 1, parent=head.root, salt=salt)

    def attest(self, name: str, *, salt: str = "") -> Decision:
        """A member's word on the next version."""
        event = e.VersionAttested(PeerId(name), self.round_id, self.next_body(salt=salt), {"loss": 1.0})
        return self.do(event)

    def finish_round(self) -> None:
        """All members agree."""
        assert self.core.state.round is not None
        body, round_id = self.next_body(), self.round_id
        for peer_id in self.core.state.round.peer_ids:
            self.do(e.VersionAttested(peer_id, round_id, body, {"loss": 1.0}))

    def make_version(self) -> None:
        """A whole version: batch, round, commit, everybody loads it."""
        self.fill_batch()
        self.finish_round()
        self.see_all()

    def granted(self) -> list[LeaseGranted]:
        """All leases so far."""
        return [fact for fact in self.facts if isinstance(fact, LeaseGranted)]

    def asked(self, kind: type[Effect]) -> list[Effect]:
        """All effects of a kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]
