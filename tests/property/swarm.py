"""A machine that plays random histories of a swarm against the core and knows what can never happen.

The machine keeps its own account of what was granted, accepted and trained, drawn from replies and facts, never from
the core's state. `World` checks the books after every event; a crash compares the replayed state byte for byte.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator.core import events, shares
from coordinator.core import facts as f
from coordinator.core.books import check
from coordinator.core.replies import Grant
from protocol.errors import HexcombError
from protocol.ids import Digest, LeaseId, PeerId, RoundId, SlotKey, Version
from tests.coordinator.world import BASE, World, make_rules

NAMES = ("a", "b", "c", "d")
MAX_LAG = 1
CAPABILITY = events.Capability(1.0, 1.0, 1, "cpu")
names = st.sampled_from(NAMES)
digests = st.sampled_from([Digest("x"), Digest("x"), Digest("y")])
shapes = st.sampled_from(["plain", "old", "both", "future", "backwards", "early"])
curses = st.sampled_from(["absent", "idler", "unready", "liar"])
ends = st.sampled_from(["commit", "open", "lie", "silence"])


class Swarm(RuleBasedStateMachine):
    """Four nodes that come, go, lie and repeat themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(make_rules(max_lag=MAX_LAG, expected_nodes=3, settle_s=1.0, evaluate_every=2))
        self.grants: list[tuple[str, Grant]] = []
        self.claims: dict[LeaseId, set[SlotKey]] = {}
        self.accepted: dict[SlotKey, tuple[str, Digest]] = {}
        self.segments: dict[SlotKey, tuple[tuple[Version, int], ...]] = {}
        self.sealed: dict[RoundId, f.RoundSealed] = {}
        self.words: dict[RoundId, dict[PeerId, Digest]] = {}
        self.trained: set[SlotKey] = set()
        self.unscored: list[SlotKey] = []
        self.roots: dict[Version, Digest] = {}
        self.num_seen = 0

    @initialize(num_trainers=st.sampled_from([None, 2, 2]), bad=names, curse=curses)
    def begin(self, num_trainers: int | None, bad: str, curse: str) -> None:
        self.bad, self.curse = bad, curse
        self.world.rules = self.world.core.rules = replace(self.world.rules, num_trainers=num_trainers)
        self.world.do(events.BaseRegistered(BASE))
        for name in NAMES[:3]:
            self.world.join(name)
        self.world.see_all()
        self.account()

    @property
    def head(self) -> int:
        """The newest version."""
        return max(self.roots)

    def account(self) -> None:
        """Enters the new facts into the machine's own books, which must allow them."""
        for fact in self.world.facts[self.num_seen :]:
            match fact:
                case f.LeaseGranted():
                    held = {slot for slots in self.claims.values() for slot in slots}
                    assert not held & set(fact.slots), "a slot under two leases"
                    assert not set(fact.slots) & set(self.accepted), "a filled slot was granted"
                    self.claims[fact.lease_id] = set(fact.slots)
                case f.LeaseClosed():
                    assert (fact.how == "filled") == (not self.claims.pop(fact.lease_id))
                case f.SlotGivenBack() | f.RolloutAccepted():
                    self.claims[fact.lease_id].remove(fact.slot)
                case f.RoundSealed():
                    self.seal(fact)
                case f.VersionCommitted():
                    self.commit(fact)
                case _:
                    pass
        self.num_seen = len(self.world.facts)

    def seal(self, fact: f.RoundSealed) -> None:
        """A round may hold accepted slots with live tokens alone, each once, none trained before."""
        keys = [key for _, part in fact.shares for key in part]
        assert len(keys) == len(set(keys))
        assert set(keys) <= set(self.accepted)
        assert not set(keys) & self.trained, "a slot is to be trained on twice"
        assert fact.round_id not in self.sealed, "a round's name was used twice"
        earlier = [s for s in self.sealed.values() if s.base_version == fact.base_version]
        assert all({k for _, p in s.shares for k in p} == set(keys) for s in earlier), "other slots than before"
        self.sealed[fact.round_id] = fact
        if self.world.core.state.round is None or self.world.round_id != fact.round_id:
            return
        num_live = 0
        for peer_id, _ in fact.shares:
            for item in shares.share_of(self.world.core.state, fact.round_id, peer_id):
                versions = [v for v, n in self.segments[item.slot] for _ in range(n)]
                live = [v for v, alive in zip(versions, item.mask, strict=True) if alive]
                assert live
                assert all(0 <= fact.base_version - v <= MAX_LAG for v in live), "a token over the bound is live"
                num_live += len(live)
        assert num_live == fact.num_tokens

    def commit(self, fact: f.VersionCommitted) -> None:
        """Versions follow each other, on top of each other, each with one root."""
        assert fact.version == len(self.roots), "a version is skipped or exists twice"
        assert fact.body.parent == self.roots.get(Version(fact.version - 1))
        self.roots[fact.version] = fact.root
        if fact.round_id is not None:
            sealed, words = self.sealed[fact.round_id], self.words[fact.round_id]
            for peer_id, _ in sealed.shares:
                assert words[peer_id] == fact.body.digest, "a version without the word of every member"
            keys = {key for _, part in sealed.shares for key in part}
            assert not keys & self.trained
            self.trained |= keys

    def attempt(self, event: events.Event) -> object:
        """The reply, or the refusal."""
        try:
            return self.world.do(event).reply
        except HexcombError as refusal:
            return refusal
        finally:
            self.account()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5, 8.0]), silent=st.booleans())
    def wait(self, seconds: float, silent: bool) -> None:
        """Time passes in steps of a heartbeat, in which the nodes are heard or not."""
        while seconds > 0:
            if not silent:
                self.heartbeats("", 0)
            self.world.tick(min(seconds, 1.0))
            self.account()
            seconds -= 1.0

    @rule(but=st.sampled_from(("", *NAMES)), behind=st.sampled_from([0, 0, 0, 1, 5]))
    def heartbeats(self, but: str, behind: int) -> None:
        version = max(-1, self.head - behind)
        for name in [name for name in NAMES if name != but and name in self.world.core.state.nodes]:
            self.world.see(name, version=version)
            if name not in self.world.core.soft.capabilities:
                self.world.do(events.CapabilityLearned(PeerId(name), CAPABILITY))
        self.account()

    @rule()
    def newcomer(self) -> None:
        if NAMES[3] not in self.world.core.state.nodes:
            self.world.join(NAMES[3], rate=500.0)
            self.account()

    @rule(name=names, num_slots=st.integers(0, 6), behind=st.integers(-1, 2))
    def ask(self, name: str, num_slots: int, behind: int) -> None:
        version = Version(self.head - behind)
        root = self.world.core.state.roots.get(version, Digest(""))
        lease_id = LeaseId(f"{name}{len(self.grants)}{self.num_seen}")
        reply = self.attempt(events.WorkRequested(PeerId(name), version, root, num_slots, lease_id))
        if isinstance(reply, Grant):
            self.grants.append((name, reply))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), shape=shapes, digest=digests)
    def submit_something(self, data: st.DataObject, shape: str, digest: Digest) -> None:
        """A slot of a recent lease, whatever became of it."""
        owner, grant = data.draw(st.sampled_from(self.grants[-6:]))
        self.submit(owner, grant, data.draw(st.sampled_from(grant.slots)), shape=shape, digest=digest)

    @rule(owner=names, thief=st.sampled_from(("", "", *NAMES)), shape=shapes, digest=digests)
    def submit_at_once(self, owner: str, thief: str, shape: str, digest: Digest) -> None:
        """A slot of a lease that is open, by its holder or by another."""
        self.heartbeats("", 0)
        self.ask(owner, 1, 0)
        if self.grants and self.grants[-1][0] == owner:
            grant = self.grants[-1][1]
            self.submit(owner, grant, grant.slots[0], shape=shape, digest=digest, thief=thief)

    def submit(self, owner: str, grant: Grant, slot: SlotKey, *, shape: str, digest: Digest, thief: str = "") -> None:
        """A rollout with tokens of these or those versions; what is accepted must have been allowed."""
        name, head = thief or owner, self.head
        pieces = {
            "plain": ((Version(head), 5),),
            "old": ((slot.version, 5),),
            "both": ((slot.version, 2), (Version(head), 3)),
            "future": ((Version(head), 2), (Version(head + 1), 3)),
            "backwards": ((Version(head), 2), (Version(max(0, head - 1)), 3)),
            "early": ((Version(max(0, slot.version - 1)), 2), (Version(head), 3)),
        }[shape]
        held = self.claims.get(grant.lease_id, set()).copy()
        event = events.RolloutSubmitted(PeerId(name), grant.lease_id, slot, digest, pieces)
        reply = self.attempt(event)
        known = self.accepted.get(slot)
        outcome = getattr(reply, "outcome", None)
        if outcome == "ACCEPTED":
            assert known is None, "two rollouts accepted for one slot"
            assert name == owner, "a rollout accepted from another node than the lease's"
            assert slot in held, "a rollout accepted without a claim to its slot"
            versions = [version for version, _ in pieces]
            assert versions == sorted(versions), "versions went backwards"
            assert slot.version <= versions[0], "a token is older than its slot"
            assert head - MAX_LAG <= versions[-1] <= head, "the newest token is too old, or of the future"
            self.accepted[slot], self.segments[slot] = (name, digest), pieces
            self.unscored.append(slot)
            again = self.attempt(event)
            assert getattr(again, "outcome", None) == "DUPLICATE", "an acknowledged rollout was forgotten at once"
        elif outcome == "DUPLICATE":
            assert known == (name, digest)
        elif known == (name, digest):
            assert slot not in self.unfinished(), "an acknowledged rollout was forgotten"

    def unfinished(self) -> set[SlotKey]:
        """Accepted slots that are on the core's books as living."""
        return {key for key in self.accepted if self.world.core.state.find(key) is not None}

    @rule(count=st.integers(1, 8), reward=st.sampled_from([0.0, 1.0, 1.0, None]))
    def score(self, count: int, reward: float | None) -> None:
        """The oldest missing scores come in; the last of them twice."""
        if not self.unscored:
            return
        due, self.unscored = self.unscored[:count], self.unscored[count:]
        for slot in [*due, due[-1]]:
            self.attempt(events.RolloutScored(slot, reward))

    @rule(late=st.sampled_from([0, 0, 1, 2]), spread=st.booleans(), num_turns=st.integers(1, 6), end=ends)
    def work_well(self, late: int, spread: bool, num_turns: int, end: str) -> None:
        """Nodes do as they should, so that versions come to be; the first turn's last scores come late, and the last
        turn's round has some other end."""
        for turn in range(num_turns):
            self.wait(0.1, False)
            for name in NAMES:
                self.fill(name, late=0 if turn else late, spread=spread)
            if turn < num_turns - 1 or end == "commit":
                self.attest("", "")
        members = self.world.core.state.round.peer_ids if self.world.core.state.round else ("",)
        if end in ("lie", "silence"):
            self.attest(members[0] if end == "lie" else "", members[-1] if end == "silence" else "")
        if end == "silence":
            self.wait(31.0, False)

    @rule(name=names, num_versions=st.integers(0, 2), delay=st.booleans())
    def work_slowly(self, name: str, num_versions: int, delay: bool) -> None:
        """A node fills a lease while the versions go on, and every token has the version of its time."""
        version = Version(self.head)
        root, lease_id = self.world.core.state.roots[version], LeaseId(f"s{name}{self.num_seen}")
        grant = self.attempt(events.WorkRequested(PeerId(name), version, root, 2, lease_id))
        if num_versions:
            self.work_well(0, False, num_versions, "commit")
        for slot in grant.slots if isinstance(grant, Grant) else ():
            pieces = tuple((Version(v), 2) for v in range(slot.version, self.head + 1))
            reply = self.attempt(events.RolloutSubmitted(PeerId(name), lease_id, slot, Digest("s"), pieces))
            if getattr(reply, "outcome", None) == "ACCEPTED":
                self.accepted[slot], self.segments[slot] = (name, Digest("s")), pieces
                self.unscored.append(slot)
        if delay:
            self.work_well(0, False, 2, "commit")
        self.score(8, 1.0)

    @rule(absent=names)
    def work_on(self, absent: str) -> None:
        """The same with a node that does nothing, and is lost at last; what was left unscored stays so."""
        self.heartbeats(absent, 0)
        for name in NAMES:
            if name != absent:
                self.fill(name, late=1, spread=True)
        self.attest("", absent)
        self.world.tick(0.5)
        self.account()

    def fill(self, name: str, *, late: int = 0, spread: bool = False) -> None:
        """A node leases slots and fills them; the last `late` are not scored, the first tokens may be older."""
        version = Version(self.head)
        lease_id = LeaseId(f"f{name}{self.num_seen}")
        root = self.world.core.state.roots[version]
        grant = self.attempt(events.WorkRequested(PeerId(name), version, root, 4, lease_id))
        if not isinstance(grant, Grant):
            return
        for place, slot in enumerate(grant.slots):
            pieces = ((slot.version, 2), (version, 2)) if spread else ((version, 4),)
            reply = self.attempt(events.RolloutSubmitted(PeerId(name), grant.lease_id, slot, Digest("x"), pieces))
            assert getattr(reply, "outcome", None) == "ACCEPTED"
            self.accepted[slot], self.segments[slot] = (name, Digest("x")), pieces
            if place < len(grant.slots) - late:
                self.attempt(events.RolloutScored(slot, float(slot.sample)))
            else:
                self.unscored.append(slot)

    @rule(liar=st.sampled_from(("", "", "", *NAMES)), absent=st.sampled_from(("", "", "", *NAMES)))
    def attest(self, liar: str, absent: str) -> None:
        round_ = self.world.core.state.round
        for peer_id in round_.peer_ids if round_ else ():
            assert round_ is not None
            if peer_id == absent:
                continue
            body = self.world.next_body(salt="lie" if peer_id == liar else "")
            self.words.setdefault(round_.round_id, {})[peer_id] = body.digest
            self.attempt(events.VersionAttested(peer_id, round_.round_id, body, {"loss": 1.0}))
            if self.world.core.state.round is not round_:
                return

    @precondition(lambda self: self.world.core.state.round is not None)
    @rule(name=names, suspects=st.lists(names, max_size=2))
    def fail(self, name: str, suspects: list[str]) -> None:
        self.attempt(
            events.RoundFailed(PeerId(name), self.world.round_id, tuple(map(PeerId, suspects)), "no part came")
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), name=names)
    def give_back(self, data: st.DataObject, name: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.claims)))
        self.attempt(events.LeaseReturned(PeerId(name), lease_id))

    @rule(name=names)
    def lose_stream(self, name: str) -> None:
        self.attempt(events.SessionEnded(PeerId(name)))

    @rule(version=st.integers(0, 3))
    def evaluate(self, version: int) -> None:
        self.attempt(events.EvaluationScored(Version(version), 4, 0.5))

    @rule(luck=st.integers(0, 2))
    def crash(self, luck: int) -> None:
        if luck:
            return
        self.world.crash()
        self.account()
        for slot in self.unfinished():
            found = self.world.core.state.find(slot)
            assert found is not None
            assert (found.peer_id, found.digest) == self.accepted[slot], "an accepted rollout changed"

    def teardown(self) -> None:
        """Whatever happened: three healthy nodes make the next version, though the fourth is absent, or alive and
        useless: takes work and never does it, never has the weights, or lies about those it made."""
        if not self.roots:
            return
        before, bad = self.head, self.bad
        self.newcomer()
        self.world.is_checked = False  # every tenth second is enough here
        for second in range(300):
            for name in NAMES:
                if name != bad or self.curse != "absent":
                    version = -1 if name == bad and self.curse == "unready" else self.head
                    self.world.see(name, version=version)
                    self.world.do(events.CapabilityLearned(PeerId(name), CAPABILITY))
            self.wait(1.0, True)
            if self.curse == "idler":
                self.ask(bad, 100, 0)
            for name in NAMES:
                if name != bad:
                    self.fill(name)
            for slot in self.unscored:
                self.attempt(events.RolloutScored(slot, float(slot.sample)))
            self.attest(bad if self.curse == "liar" else "", "" if self.curse == "liar" else bad)
            if self.head > before or second % 10 == 0:
                check(self.world.core.state)
            if self.head > before:
                return
        raise AssertionError(f"the swarm stands still: {self.world.core.waiting_for(self.world.now_ms)}")
