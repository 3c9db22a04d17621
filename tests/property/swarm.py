"""A machine that plays random histories of a swarm against the core and knows what can never happen.

It keeps its own account (`account.Account`). `World` checks the core's books after every event; a crash compares the
replayed state byte for byte; a refusal may change nothing. Each history has its own policy, mode, bound and, at its
end, a curse that a healthy swarm must survive.
"""

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from coordinator.core import events
from coordinator.core.books import check
from coordinator.core.rules import Curriculum
from protocol.errors import HexcombError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, Version
from protocol.run import EnvironmentSpec
from tests.coordinator.world import BASE, make_body, make_rules
from tests.property.nodes import CAPABILITY, NAMES, Nodes

STRANGER = PeerId("nobody")
CURSES = ("absent", "idler", "unready", "liar", "poison", "equal")
names = st.sampled_from(NAMES)
digests = st.sampled_from([Digest("x"), Digest("x"), Digest("y")])
honest = ["plain", "old", "both", "turn", "turn", "failed"]
shapes = st.sampled_from([*honest, "future", "backwards", "early", "anew", "forged"])
ends = st.sampled_from(["commit", "open", "lie", "silence"])


class Swarm(Nodes):
    """Four nodes that come, go, lie and repeat themselves."""

    kind: ClassVar[dict[str, object]] = {}
    """What histories to play: words of `begin` that are pinned."""

    @initialize(
        drawn=st.fixed_dictionaries(
            {
                "num_trainers": st.sampled_from([None, 2, 2]),
                "bad": names,
                "curse": st.sampled_from(CURSES),
                "policy": st.sampled_from(["mask_tokens", "mask_tokens", "drop", "wait"]),
                "mode": st.sampled_from(["async", "async", "async", "sequential", "periodic"]),
                "max_lag": st.sampled_from([1, 1, 2, 0]),
                "has_dynamic_sampling": st.booleans(),
                "num_tasks": st.sampled_from([0, 3]),
                "curriculum": st.sampled_from([None, None, Curriculum((1.0, 2.0))]),
            }
        )
    )
    def begin(self, drawn: dict[str, Any]) -> None:
        """Three nodes, and the rules of this history."""
        how = {**drawn, **self.kind}
        rules = make_rules(
            max_lag=how["max_lag"],
            mode=how["mode"],
            staleness=how["policy"],
            dynamic_sampling=how["has_dynamic_sampling"],
            environment=EnvironmentSpec("sums", num_tasks=how["num_tasks"]),
            expected_nodes=3,
            settle_s=1.0,
            evaluate_every=2,
            curriculum=how["curriculum"],
        )
        self.bad, self.curse = how["bad"], how["curse"]
        self.world.rules = self.world.core.rules = replace(rules, num_trainers=how["num_trainers"])
        self.world.do(events.BaseRegistered(BASE))
        for name in NAMES[:3]:
            self.world.join(name)
        self.world.see_all()
        self.account()

    @invariant()
    def account_holds(self) -> None:
        self.book.check()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5, 8.0]), is_silent=st.booleans())
    def wait(self, seconds: float, is_silent: bool) -> None:
        self.pass_time(seconds, is_silent=is_silent)

    @rule(but=st.sampled_from(("", *NAMES)), behind=st.sampled_from([0, 0, 0, 1, 5]))
    def heartbeats(self, but: str, behind: int) -> None:
        self.beat(but=but, behind=behind)

    @rule(liar=st.sampled_from(("", "", "", *NAMES)), absent=st.sampled_from(("", "", "", *NAMES)))
    def attest(self, liar: str, absent: str) -> None:
        self.attest_all(liar=liar, absent=absent)

    @rule()
    def newcomer(self) -> None:
        if NAMES[3] not in self.world.core.state.nodes:
            self.world.join(NAMES[3], rate=500.0)
            self.account()

    @rule(name=names, num_slots=st.integers(0, 6), behind=st.integers(-1, 2))
    def ask_for_work(self, name: str, num_slots: int, behind: int) -> None:
        grant = self.ask(name, num_slots, behind)
        if grant is not None:
            self.grants.append((name, grant))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), shape=shapes, digest=digests)
    def submit_something(self, data: st.DataObject, shape: str, digest: Digest) -> None:
        """A slot of a recent lease, whatever became of it."""
        owner, grant = data.draw(st.sampled_from(self.grants[-6:]))
        self.submit(owner, grant, data.draw(st.sampled_from(grant.slots)), shape=shape, digest=digest)

    @rule(owner=names, thief=st.sampled_from(("", "", *NAMES)), shape=shapes, digest=digests)
    def submit_at_once(self, owner: str, thief: str, shape: str, digest: Digest) -> None:
        """A slot of a lease that is open, by its holder or by another."""
        self.beat()
        grant = self.ask(owner, 1)
        if grant is not None:
            self.submit(owner, grant, grant.slots[0], shape=shape, digest=digest, thief=thief)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), thief=st.sampled_from(("", "", "", *NAMES)), length=st.integers(1, 3), is_new=st.booleans())
    def hand_in_pieces(self, data: st.DataObject, thief: str, length: int, is_new: bool) -> None:
        """All slots of a recent lease come on, whatever became of it."""
        owner, grant = data.draw(st.sampled_from(self.grants[-6:]))
        self.hand_in(thief or owner, grant, version=self.head if is_new else None, length=length)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), thief=st.sampled_from(("", "", *NAMES)))
    def await_replies(self, data: st.DataObject, thief: str) -> None:
        """What came of a recent lease is with the environment, or somebody says so."""
        owner, grant = data.draw(st.sampled_from(self.grants[-6:]))
        self.attempt(events.TurnsAwaited(PeerId(thief or owner), grant.lease_id, grant.slots))
        self.book.await_reply(thief or owner, grant.lease_id, grant.slots)

    @precondition(lambda self: self.book.prefixes)
    @rule(data=st.data())
    def lose_pieces(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.book.prefixes)))
        self.attempt(events.PrefixLost(slot, "their file is gone"))
        assert slot not in self.book.prefixes, "a slot waits for pieces that are gone"

    @rule(count=st.integers(1, 8), reward=st.sampled_from([0.0, 1.0, 1.0, None]))
    def score(self, count: int, reward: float | None) -> None:
        """The oldest missing scores come in; the last of them twice."""
        due, self.unscored = self.unscored[:count], self.unscored[count:]
        for slot in [*due, *due[-1:]]:
            self.give_reward(slot, reward)

    @rule(late=st.sampled_from([0, 0, 1, 2]), is_spread=st.booleans(), num_turns=st.integers(1, 6), end=ends)
    def work_well(self, late: int, is_spread: bool, num_turns: int, end: str) -> None:
        """Nodes do as they should, so that versions come to be; the first turn's last scores come late, and the last
        turn's round has some other end."""
        for turn in range(num_turns):
            self.pass_time(0.1)
            for name in NAMES:
                self.fill(name, late=0 if turn else late, is_spread=is_spread)
            if turn < num_turns - 1 or end == "commit":
                self.attest_all()
        members = self.world.core.state.round.peer_ids if self.world.core.state.round else ("",)
        if end in ("lie", "silence"):
            self.attest_all(liar=members[0] if end == "lie" else "", absent=members[-1] if end == "silence" else "")
        if end == "silence":
            self.pass_time(31.0)

    @rule(name=names, num_versions=st.integers(0, 2), delay=st.booleans(), is_handed_in=st.booleans())
    def work_slowly(self, name: str, num_versions: int, delay: bool, is_handed_in: bool) -> None:
        """A node fills a lease while the versions go on, and every token has the version of its time."""
        grant = self.ask(name, 2)
        if grant is not None and is_handed_in:
            self.grants.append((name, grant))
            self.hand_in(name, grant, version=self.head, length=2)
        if num_versions:
            self.work_well(0, False, num_versions, "commit")
        if grant is not None:
            for slot in grant.slots:
                began = max(slot.version, self.head - num_versions)
                self.hand_over(name, grant, slot, tuple((Version(v), 2) for v in range(began, self.head + 1)))
        if delay:
            self.work_well(0, False, 2, "commit")
        self.score(8, 1.0)

    @rule(name=names, is_asking=st.booleans())
    def come_too_late(self, name: str, is_asking: bool) -> None:
        """A node does what would have been right before the last versions came: it hands in, or it asks for more, while
        slots of that time wait."""
        self.beat()
        grant, num_versions = self.ask(name, 2), self.book.max_lag + 1
        self.work_well(0, False, num_versions, "commit")
        if grant is None:
            return
        if is_asking:
            self.attempt(events.LeaseReturned(PeerId(name), grant.lease_id))
            self.beat()
            self.ask(name, 2, num_versions)
            return
        for slot in grant.slots:
            self.submit(name, grant, slot, shape="old", digest=Digest("x"))

    @rule(name=names, other=names, shape=shapes)
    def move(self, name: str, other: str, shape: str) -> None:
        """A node goes in the middle of its work, and another takes it up, or does not go on from there."""
        self.beat()
        grant = self.ask(name, 2)
        if grant is None:
            return
        self.hand_in(name, grant, version=self.head, length=3)
        self.attempt(events.LeaseReturned(PeerId(name), grant.lease_id, "its owner came home"))
        after = self.ask(other, 6)
        if after is not None:
            for slot in after.slots:
                self.submit(other, after, slot, shape=shape, digest=Digest("x"))

    @rule(absent=names)
    def work_on(self, absent: str) -> None:
        """The same with a node that does nothing, and is lost at last; what was left unscored stays so."""
        self.beat(but=absent)
        for name in NAMES:
            if name != absent:
                self.fill(name, late=1, is_spread=True)
        self.attest_all(absent=absent)
        self.world.tick(0.5)
        self.account()

    @precondition(lambda self: self.world.core.state.round is not None)
    @rule(step=st.sampled_from([0, 2, 1]), is_outsider=st.booleans())
    def attest_wrongly(self, step: int, is_outsider: bool) -> None:
        """All members agree on a body that is not the next, or one that is none speaks for all of them."""
        round_ = self.world.core.state.round
        assert round_ is not None
        parent = self.book.roots[Version(self.head)] if step != 1 or is_outsider else Digest("an" * 32)
        body = make_body(self.head + step, parent=parent)
        outsiders = tuple(PeerId(name) for name in NAMES if PeerId(name) not in round_.peer_ids)
        for peer_id in outsiders if is_outsider else round_.peer_ids:
            reply = self.speak(peer_id, round_.round_id, body)
            assert isinstance(reply, HexcombError) or step == 0, "a word on a version that cannot follow was taken"

    @rule(kind=st.integers(0, 7))
    def strange(self, kind: int) -> None:
        """Somebody who has no place in the run says something that a member might."""
        grant = self.grants[-1][1] if self.grants else None
        key, lease_id = (grant.slots[0], grant.lease_id) if grant else (None, LeaseId("none"))
        root, round_ = self.book.roots[Version(self.head)], self.world.core.state.round
        round_id = round_.round_id if round_ else RoundId("0.0")
        presence = events.Presence(Version(self.head), root, (), "x:1", "x:2", "busy", 1.0, "test")
        said: list[events.Event | None] = [
            events.NodeSeen(STRANGER, presence),
            events.CapabilityLearned(STRANGER, CAPABILITY),
            events.WorkRequested(STRANGER, Version(self.head), root, 1, LeaseId("strange")),
            events.LeaseReturned(STRANGER, lease_id, "mine"),
            events.RolloutSubmitted(STRANGER, lease_id, key, Digest("x"), ((Version(self.head), 4),)) if key else None,
            events.VersionAttested(STRANGER, round_id, self.world.next_body(salt="strange"), {}),
            events.RoundFailed(STRANGER, round_id, (PeerId("a"), PeerId("b")), "because"),
            events.InviteRedeemed(InviteId("guessed"), STRANGER),
        ]
        event = said[kind]
        if event is not None:
            assert isinstance(self.attempt(event), HexcombError), "a stranger was heard"

    @precondition(lambda self: self.world.core.state.round is not None)
    @rule(name=names, suspects=st.lists(names, max_size=2))
    def fail(self, name: str, suspects: list[str]) -> None:
        named = tuple(map(PeerId, suspects))
        self.attempt(events.RoundFailed(PeerId(name), self.world.round_id, named, "no part came"))

    @precondition(lambda self: self.book.claims)
    @rule(data=st.data(), name=st.sampled_from(("", "", *NAMES)), is_fault=st.booleans())
    def give_back(self, data: st.DataObject, name: str, is_fault: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.book.claims)))
        peer_id = PeerId(name) if name else self.book.holders[lease_id][0]
        self.attempt(events.LeaseReturned(peer_id, lease_id, "out of memory", is_fault))

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
        self.book.crash()
        self.account()

    def teardown(self) -> None:
        """Whatever happened: three healthy nodes make the next version, though the fourth is absent, or alive and
        useless (takes work and never does it, never has the weights, lies about those it made), though some slots
        cannot be filled by anybody, or all rewards are equal."""
        if not self.book.roots:
            return
        before, bad = self.head, self.bad
        self.newcomer()
        self.world.is_checked = False  # every tenth second is enough here
        for second in range(300):
            self.turn_of_the_healthy(bad)
            if self.head > before or second % 10 == 0:
                check(self.world.core.state)
                self.book.check()
            if self.head > before:
                return
        raise AssertionError(f"the swarm stands still: {self.world.core.waiting_for(self.world.now_ms)}")

    def turn_of_the_healthy(self, bad: str) -> None:
        """A second of the end of a history."""
        for name in NAMES:
            if name != bad or self.curse != "absent":
                self.world.see(name, version=-1 if name == bad and self.curse == "unready" else self.head)
                self.world.do(events.CapabilityLearned(PeerId(name), CAPABILITY))
        self.pass_time(1.0, is_silent=True)
        if self.curse == "idler":
            self.ask(bad, 100)
        for name in NAMES:
            if name != bad or self.curse in ("poison", "equal"):
                self.fill(name, curse=self.curse)
        for slot in self.unscored:
            self.give_reward(slot, 1.0 if self.curse == "equal" else float(slot.sample))
        self.unscored.clear()
        absent = "" if self.curse in ("liar", "poison", "equal") else bad
        self.attest_all(liar=bad if self.curse == "liar" else "", absent=absent)
