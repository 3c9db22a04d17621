"""What nodes of a random history do, well or badly, and what the account of it must allow. A base for `swarm.Swarm`."""

from hypothesis.stateful import RuleBasedStateMachine

from coordinator.core import events
from coordinator.core.replies import Grant
from coordinator.core.state import encode_state
from protocol.errors import HexcombError
from protocol.ids import Digest, LeaseId, PeerId, RoundId, SlotKey, Version
from protocol.manifest import Body
from tests.property.account import Account, CountedWorld
from tests.scenarios.tokens import Tokens, behind, edges, merged

NAMES = ("a", "b", "c", "d")
CAPABILITY = events.Capability(1.0, 1.0, 1, "cpu")


class Nodes(RuleBasedStateMachine):
    """Up to four nodes around one core. `grants` are leases of which more may be heard, `unscored` what the grader
    owes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = CountedWorld()
        self.book = Account(self.world)
        self.grants: list[tuple[str, Grant]] = []
        self.unscored: list[SlotKey] = []
        self.num_leases = 0

    @property
    def head(self) -> int:
        """The newest version."""
        return self.book.head

    def account(self) -> None:
        """Enters what happened since."""
        self.book.read()

    def attempt(self, event: events.Event) -> object:
        """The reply, or the refusal, which leaves everything as it was."""
        before = encode_state(self.world.core.state)
        try:
            return self.world.do(event).reply
        except HexcombError as refusal:
            assert encode_state(self.world.core.state) == before, "a refusal changed the state"
            return refusal
        finally:
            self.account()

    def pass_time(self, seconds: float, *, is_silent: bool = False) -> None:
        """Time passes in steps of a heartbeat, in which the nodes are heard or not."""
        while seconds > 0:
            if not is_silent:
                self.beat()
            self.world.tick(min(seconds, 1.0))
            self.account()
            seconds -= 1.0

    def beat(self, *, but: str = "", behind: int = 0) -> None:
        """Heartbeats of all nodes but one, with the head loaded, or what was it some versions ago."""
        version = max(-1, self.head - behind)
        for name in [name for name in NAMES if name != but and name in self.world.core.state.nodes]:
            self.world.see(name, version=version)
            if name not in self.world.core.soft.capabilities:
                self.world.do(events.CapabilityLearned(PeerId(name), CAPABILITY))
        self.account()

    def ask(self, name: str, num_slots: int, behind: int = 0) -> Grant | None:
        """A wish for work under the head, or an older version, or one that is not there yet."""
        version = Version(self.head - behind)
        root = self.world.core.state.roots.get(version, Digest(""))
        self.num_leases += 1
        lease_id = LeaseId(f"{self.num_leases:016x}")
        reply = self.attempt(events.WorkRequested(PeerId(name), version, root, num_slots, lease_id))
        if not isinstance(reply, Grant):
            return None
        assert 0 <= behind <= self.book.max_lag, "a lease for a version that is too old"
        assert root == self.book.roots[version], "a lease for weights that nobody committed"
        return reply

    def after_prefix(self, slot: SlotKey, own: Tokens) -> Tokens:
        """Pieces that go on from what a slot keeps, or begin."""
        kept = self.book.prefixes.get(slot)
        return (*(behind(kept[1]) if kept else ()), *own)

    def hand_in(self, name: str, grant: Grant, *, version: int | None, length: int) -> None:
        """All slots of a lease come on by some tokens of a version, or of the one that they were at."""
        progress = []
        for slot in grant.slots:
            before = self.book.handed_in.get(slot) or self.book.prefixes.get(slot)
            kept = behind(before[1]) if before else ()
            start = kept[-1][0] if kept else slot.version
            pieces = (*kept, (Version(start if version is None else version), length))
            edge = edges(str(slot), pieces)[-1]
            given = self.book.given.get(slot, ())
            progress.append(events.SlotProgress(PeerId(name), grant.lease_id, slot, merged(pieces), edge, given))
            self.book.hand_in(name, grant.lease_id, slot, merged(pieces), edge)
        self.attempt(events.PiecesReceived(tuple(progress)))

    def submit(self, owner: str, grant: Grant, slot: SlotKey, *, shape: str, digest: Digest, thief: str = "") -> None:
        """A rollout with tokens of these or those versions; what is accepted must have been allowed."""
        name, head = thief or owner, self.head
        own: Tokens = {
            "plain": ((Version(head), 5),),
            "old": ((slot.version, 5),),
            "both": ((slot.version, 2), (Version(head), 3)),
            "future": ((Version(head), 2), (Version(head + 1), 3)),
            "backwards": ((Version(head), 2), (Version(max(0, head - 1)), 3)),
            "early": ((Version(max(0, slot.version - 1)), 2), (Version(head), 3)),
            "anew": ((Version(head), 7),),
            "forged": ((Version(head), 5),),
            "turn": ((Version(head), 3),),
            "failed": ((Version(head), 3),),
        }[shape]
        pieces = own if shape == "anew" else self.after_prefix(slot, own)
        held = self.book.claims.get(grant.lease_id, set()).copy()
        holder, _, deadline_ms = self.book.holders[grant.lease_id]
        kept, known = self.book.prefixes.get(slot), self.book.accepted.get(slot)
        made = tuple(edges(str(slot), pieces))
        said = () if shape == "anew" else self.book.given.get(slot, ())
        given = (*said, (sum(length for _, length in pieces) - 2, 1)) if shape == "forged" else said
        answer = {"turn": self.environment_says(slot, pieces), "failed": "no such tool"}.get(shape)
        event = events.RolloutSubmitted(PeerId(name), grant.lease_id, slot, digest, merged(pieces), made, given, answer)
        before = self.book.given.get(slot, ())
        reply = self.attempt(event)
        outcome = getattr(reply, "outcome", None)
        if outcome in ("ACCEPTED", "TURN_TAKEN", "SLOT_FAILED"):
            assert known is None, "two rollouts accepted for one slot"
            assert name == holder, "a rollout accepted from another node than the lease's"
            assert slot in held, "a rollout accepted without a claim to its slot"
            assert self.world.now_ms < deadline_ms, "a rollout accepted after its lease was over"
            assert kept is None or kept[1] in made, "a rollout accepted that does not go on from what came before"
            versions = [version for version, _ in pieces]
            assert versions == sorted(versions), "versions went backwards"
            assert slot.version <= versions[0], "a token is older than its slot"
            assert head - self.book.max_lag <= versions[-1] <= head, "the newest token is too old, or of the future"
            assert given == before, "a node spoke for the environment"
            if outcome != "ACCEPTED":
                return
            self.book.accept(slot, name, digest, merged(pieces))
            self.unscored.append(slot)
            again = self.attempt(event)
            assert getattr(again, "outcome", None) == "DUPLICATE", "an acknowledged rollout was forgotten at once"
        elif outcome == "DUPLICATE":
            assert known == (name, digest) or (known is None and given != before)
        elif known == (name, digest):
            assert self.world.core.state.find(slot) is None, "an acknowledged rollout was forgotten"

    def environment_says(self, slot: SlotKey, pieces: Tokens) -> events.EnvironmentReplied:
        """Two tokens after a turn, as of the version before them."""
        return events.EnvironmentReplied(2, edges(str(slot), (*pieces, (pieces[-1][0], 2)))[-1])

    def hand_over(self, name: str, grant: Grant, slot: SlotKey, own: Tokens) -> object:
        """A rollout after what was kept of its slot; an acknowledgement is noted."""
        pieces = self.after_prefix(slot, own)
        made = tuple(edges(str(slot), pieces))
        given = self.book.given.get(slot, ())
        event = events.RolloutSubmitted(PeerId(name), grant.lease_id, slot, Digest("x"), merged(pieces), made, given)
        reply = self.attempt(event)
        if getattr(reply, "outcome", None) == "ACCEPTED":
            self.book.accept(slot, name, Digest("x"), merged(pieces))
            self.unscored.append(slot)
        return reply

    def give_reward(self, slot: SlotKey, reward: float | None) -> None:
        """The grader's first word on a slot counts."""
        if reward is not None and slot not in self.book.ends:
            self.book.rewards.setdefault(slot, reward)
        self.attempt(events.RolloutScored(slot, reward))

    def fill(self, name: str, *, late: int = 0, is_spread: bool = False, curse: str = "") -> None:
        """A node leases slots and fills them; the last `late` are not scored, the first tokens may be older."""
        grant = self.ask(name, 4)
        if grant is None:
            return
        version = Version(self.head)
        if curse == "poison" and any(slot.sample == 0 and slot.task.index % 5 == 0 for slot in grant.slots):
            self.attempt(events.LeaseReturned(PeerId(name), grant.lease_id, "out of memory", is_fault=True))
            return
        for place, slot in enumerate(grant.slots):
            own = ((version, 2),) if slot in self.book.prefixes else ((slot.version, 2), (version, 2))
            reply = self.hand_over(name, grant, slot, own if is_spread else ((version, 4),))
            assert getattr(reply, "outcome", None) == "ACCEPTED", "honest work was not taken"
            if place < len(grant.slots) - late:
                self.unscored.pop()
                self.give_reward(slot, 1.0 if curse == "equal" else float(slot.sample))

    def attest_all(self, *, liar: str = "", absent: str = "") -> None:
        """Every member of the open round says what it made."""
        round_ = self.world.core.state.round
        for peer_id in round_.peer_ids if round_ else ():
            assert round_ is not None
            if peer_id == absent:
                continue
            self.speak(peer_id, round_.round_id, self.world.next_body(salt="lie" if peer_id == liar else ""))
            if self.world.core.state.round is not round_:
                return

    def speak(self, peer_id: PeerId, round_id: RoundId, body: Body) -> object:
        """A node attests a body; a word that is refused was not given."""
        words = self.book.words.setdefault(round_id, {})
        before = dict(words)
        words[peer_id] = body.digest
        reply = self.attempt(events.VersionAttested(peer_id, round_id, body, {"loss": 1.0}))
        if isinstance(reply, HexcombError):
            self.book.words[round_id] = before
        return reply
