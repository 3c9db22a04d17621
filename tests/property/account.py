"""A second set of books, kept by whoever watches a swarm: what was granted, accepted, moved, trained.

It is drawn from events, replies and facts, never from the core's counters, and it holds no fact that contradicts what
it knows. Each assertion names what would have happened that never can.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from coordinator.core import facts as f
from coordinator.core import shares
from coordinator.core.events import Event
from coordinator.core.handle import Decision
from protocol.ids import Digest, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.rollout import Spans
from protocol.run import RunSpec
from tests.coordinator.world import World
from tests.scenarios.tokens import Tokens

End = Literal["trained", "dropped", "filtered", "failed"]


class CountedWorld(World):
    """Counts the events of all histories of a test run."""

    num_events = 0

    def do(self, event: Event) -> Decision:
        CountedWorld.num_events += 1
        return super().do(event)


class Account:
    """The books of one history. `claims` are open leases with their unfilled slots, `holders` their nodes, begin and
    deadline; `accepted` is what was acknowledged, `given` where the environment spoke, `ends` where slots ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[int, list[SlotKey]] = {}
        self.claims: dict[LeaseId, set[SlotKey]] = {}
        self.holders: dict[LeaseId, tuple[PeerId, int, int]] = {}
        self.accepted: dict[SlotKey, tuple[str, Digest]] = {}
        self.segments: dict[SlotKey, Tokens] = {}
        self.handed_in: dict[SlotKey, tuple[Tokens, Digest]] = {}
        self.to_move: set[SlotKey] = set()
        self.prefixes: dict[SlotKey, tuple[Tokens, Digest]] = {}
        self.given: dict[SlotKey, Spans] = {}
        self.rewards: dict[SlotKey, float] = {}
        self.num_rewards: Counter[int] = Counter()
        self.ends: dict[SlotKey, End] = {}
        self.sealed: dict[RoundId, f.RoundSealed] = {}
        self.words: dict[RoundId, dict[PeerId, Digest]] = {}
        self.roots: dict[Version, Digest] = {}
        self.num_tokens = {"trained": 0, "masked": 0}
        self.num_read = 0

    @property
    def spec(self) -> RunSpec:
        """The run's."""
        return self.world.rules.spec

    @property
    def num_pools(self) -> int:
        """Of the curriculum, if there is one."""
        return len(self.world.rules.curriculum.weights) if self.world.rules.curriculum else 1

    @property
    def max_lag(self) -> int:
        """The bound in force."""
        return self.spec.max_lag if self.spec.mode == "async" else 0

    @property
    def head(self) -> int:
        """The newest version."""
        return max(self.roots)

    def read(self) -> None:
        """Enters the new facts, which must be possible."""
        new, self.num_read = self.world.facts[self.num_read :], len(self.world.facts)
        for fact in new:
            self._enter(fact)
        assert not self.to_move, "what was received of a slot is lost, though the coordinator lives"

    def _enter(self, fact: f.Fact) -> None:
        match fact:
            case f.LeaseGranted():
                self._grant(fact)
            case f.LeaseExtended():
                peer_id, granted_ms, _ = self.holders[fact.lease_id]
                assert fact.deadline_ms <= self.world.now_ms + self.spec.lease_s * 1000, "a lease for ever"
                self.holders[fact.lease_id] = (peer_id, granted_ms, fact.deadline_ms)
            case f.LeaseClosed():
                left = self.claims.pop(fact.lease_id)
                assert (fact.how == "filled") == (not left)
                self.to_move |= {slot for slot in left if slot in self.handed_in}
            case f.SlotGivenBack() | f.RolloutAccepted():
                self.claims[fact.lease_id].remove(fact.slot)
                self.prefixes.pop(fact.slot, None)
                if isinstance(fact, f.SlotGivenBack) and fact.reason in ("stalled", "outgrown"):
                    self.to_move.add(fact.slot)
                else:
                    self.handed_in.pop(fact.slot, None)
                if isinstance(fact, f.SlotGivenBack) and fact.slot not in self.to_move:
                    self.given.pop(fact.slot, None)
            case f.TurnTaken():
                self.claims[fact.lease_id].remove(fact.slot)
                self.prefixes[fact.slot] = (fact.segments, fact.edge)
                assert fact.given[:-1] == self.given.get(fact.slot, ()), "what the environment said before is lost"
                self.given[fact.slot] = fact.given
                self.handed_in.pop(fact.slot, None)
            case f.SlotMoved():
                self._move(fact)
            case f.PrefixDropped():
                del self.prefixes[fact.slot]
                self.given.pop(fact.slot, None)
            case f.SlotFailed():
                self._end(fact.slot, "failed")
            case f.SlotCancelled():
                if fact.lease_id is not None:
                    self.claims[fact.lease_id].remove(fact.slot)
                self._end(fact.slot, "dropped")
            case f.RewardRecorded(reward=None):
                self._end(fact.slot, "failed")
            case f.RewardRecorded():
                self.num_rewards[fact.slot.task.index % self.num_pools] += 1
            case f.SlotDropped():
                self._end(fact.slot, "dropped")
            case f.GroupDropped():
                end: End = "dropped" if fact.reason == "stale" else "filtered"
                for slot in self._of_groups({fact.index}):
                    self._end(slot, end)
            case f.RoundSealed():
                self._seal(fact)
            case f.VersionCommitted():
                self._commit(fact)
            case _:
                pass

    def _grant(self, fact: f.LeaseGranted) -> None:
        held = {slot for slots in self.claims.values() for slot in slots}
        assert not held & set(fact.slots), "a slot under two leases"
        assert not set(fact.slots) & set(self.accepted), "a filled slot was granted"
        assert not set(fact.slots) & set(self.ends), "a slot that has ended was granted"
        for group in fact.opened:
            assert group.task.index not in self.groups, "a task was opened twice"
            keys = [SlotKey(group.version, group.task, sample) for sample in range(group.num_slots)]
            self.groups[group.task.index] = keys
        assert all(slot in self.groups[slot.task.index] for slot in fact.slots), "a slot that nobody issued"
        self.claims[fact.lease_id] = set(fact.slots)
        self.holders[fact.lease_id] = (fact.peer_id, self.world.now_ms, fact.deadline_ms)

    def _move(self, fact: f.SlotMoved) -> None:
        """What a slot keeps is the longest that was handed in by who held it."""
        assert all(fact.slot not in slots for slots in self.claims.values()), "a slot moved that a node holds"
        self.prefixes[fact.slot] = (fact.segments, fact.edge)
        assert self.handed_in.pop(fact.slot, None) == self.prefixes[fact.slot], "a slot keeps what was not handed in"
        assert fact.given == self.given.get(fact.slot, ()), "a slot that moved has other words of the environment"
        self.to_move.discard(fact.slot)

    def _of_groups(self, indices: set[int]) -> list[SlotKey]:
        """Slots of these groups that have not ended."""
        return [key for index in indices for key in self.groups[index] if key not in self.ends]

    def _end(self, slot: SlotKey, end: End) -> None:
        assert slot not in self.ends, f"a slot that was {self.ends.get(slot)} is {end}"
        self.ends[slot] = end
        self.prefixes.pop(slot, None)
        self.handed_in.pop(slot, None)
        self.to_move.discard(slot)

    def _seal(self, fact: f.RoundSealed) -> None:
        """A round may hold accepted slots with live tokens alone, each once, none trained before."""
        keys = [key for _, part in fact.shares for key in part]
        assert len(keys) == len(set(keys))
        assert set(keys) <= set(self.accepted)
        assert not set(keys) & set(self.ends), "a slot that has ended is to be trained on"
        assert fact.round_id not in self.sealed, "a round's name was used twice"
        assert fact.base_version == self.head
        earlier = [s for s in self.sealed.values() if s.base_version == fact.base_version]
        assert all({k for _, p in s.shares for k in p} == set(keys) for s in earlier), "other slots than before"
        self.sealed[fact.round_id] = fact
        if self.world.core.state.round is None or self.world.round_id != fact.round_id:
            return  # it ended in the same turn
        num_live = 0
        for peer_id, _ in fact.shares:
            for item in shares.share_of(self.world.core.state, fact.round_id, peer_id):
                num_live += self._check_item(item, fact.base_version)
        assert num_live == fact.num_tokens, "the divisor is not the number of live tokens"

    def _check_item(self, item: shares.ShareItem, base: Version) -> int:
        """The number of tokens that a trainer would learn from, each of which it may."""
        assert item.segments == self.segments[item.slot], "other tokens than were accepted"
        ages = [base - version for version, length in item.segments for _ in range(length)]
        said = {start + place for start, length in self.given.get(item.slot, ()) for place in range(length)}
        assert not any(item.mask[place] for place in said), "a token of the environment is to be learnt"
        live = [age for age, alive in zip(ages, item.mask, strict=True) if alive]
        assert live, "a slot without a live token"
        assert all(0 <= age <= self.max_lag for age in live), "a token over the bound is live"
        whole = self.spec.staleness == "drop" or self.max_lag == 0
        assert len(live) + len(said) == len(ages) or not whole, "a part of a rollout that should be dropped as a whole"
        rewards = [self.rewards[key] for key in self.groups[item.slot.task.index] if key in self.rewards]
        mean = sum(rewards) / len(rewards)
        assert abs(item.advantage - (self.rewards[item.slot] - mean)) < 1e-9, "an advantage out of nowhere"
        return len(live)

    def _commit(self, fact: f.VersionCommitted) -> None:
        """Versions follow each other, on top of each other, each with one root, by the word of every member."""
        assert fact.version == len(self.roots), "a version is skipped or exists twice"
        assert fact.body.parent == self.roots.get(Version(fact.version - 1))
        assert fact.body.version == fact.version
        self.roots[fact.version] = fact.root
        if fact.round_id is None:
            return
        sealed, words = self.sealed[fact.round_id], self.words[fact.round_id]
        assert sealed.base_version == fact.version - 1
        for peer_id, _ in sealed.shares:
            assert words[peer_id] == fact.body.digest, "a version without the word of every member"
        assert fact.groups == sealed.groups
        for key in (key for _, part in sealed.shares for key in part):
            self._end(key, "trained")
            versions: list[Version | None] = [v for v, length in self.segments[key] for _ in range(length)]
            for start, length in self.given.get(key, ()):
                versions[start : start + length] = [None] * length
            for version in (version for version in versions if version is not None):
                is_live = sealed.base_version - version <= self.max_lag
                self.num_tokens["trained" if is_live else "masked"] += 1
        assert not self._of_groups(set(fact.groups)), "a slot of a trained group is nowhere"

    def check(self) -> None:
        """What was acknowledged is there, or has ended in a way that a fact told; tokens are counted apart."""
        state = self.world.core.state
        for key in self._living():
            found = state.find(key)
            assert found is not None, "an acknowledged rollout is lost"
            assert (found.peer_id, found.digest) == self.accepted[key], "an acknowledged rollout changed"
            assert found.segments == self.segments[key]
            assert found.given == self.given.get(key, ())
        books, ends = self.world.core.books(), list(self.ends.values())
        for end in ("trained", "dropped", "filtered", "failed"):
            assert getattr(books, end) == ends.count(end), f"the book of what was {end}"
        assert books.issued == sum(map(len, self.groups.values())), "a slot was issued twice, or not at all"
        assert state.num_tokens_trained == self.num_tokens["trained"]
        assert state.num_tokens_masked == self.num_tokens["masked"], "masked tokens are not counted apart"
        if self.world.rules.curriculum and self.groups:
            pools = enumerate(state.pools)
            assert {number: pool.num_rewards for number, pool in pools if pool.num_rewards} == self.num_rewards
        num_tasks = self.spec.environment.num_tasks
        assert len(state.lengths) + len(state.longest) <= 64 * num_tasks, "more than 64 bytes are remembered of a task"

    def _living(self) -> Iterator[SlotKey]:
        return (key for key in self.accepted if key not in self.ends)

    def crash(self) -> None:
        """What was only received may be lost."""
        self.handed_in.clear()

    def hand_in(self, name: str, lease_id: LeaseId, slot: SlotKey, pieces: Tokens, edge: Digest) -> None:
        """Pieces of a slot, all that came so far; they count if they come from who holds it, and go on."""
        known = self.handed_in.get(slot) or self.prefixes.get(slot) or ((), Digest(""))
        longer = sum(length for _, length in pieces) > sum(length for _, length in known[0])
        if longer and slot in self.claims.get(lease_id, ()) and self.holders[lease_id][0] == name:
            self.handed_in[slot] = (pieces, edge)

    def await_reply(self, name: str, lease_id: LeaseId, slots: tuple[SlotKey, ...]) -> None:
        """Turns are with the environment: a slot that is lost then goes on from where its turn began."""
        if lease_id in self.claims and self.holders[lease_id][0] == name:
            for slot in self.claims[lease_id] & set(slots):
                self.handed_in.pop(slot, None)

    def accept(self, slot: SlotKey, name: str, digest: Digest, pieces: Tokens) -> None:
        """An acknowledgement was given: notes what it promises."""
        self.accepted[slot], self.segments[slot] = (name, digest), pieces
