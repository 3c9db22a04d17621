"""What can happen in a story: nodes come and go, work and fail, time passes, the coordinator dies.

Each method `do_<verb>` is a command; its arguments are the command's words, its options `name=value` words.
"""

from collections.abc import Sequence
from dataclasses import replace

from coordinator.core import events as e
from coordinator.core.handle import Core
from coordinator.core.replies import Grant
from protocol.errors import HexcombError
from protocol.ids import Digest, InviteId, LeaseId, PeerId, Version
from protocol.rollout import Spans
from protocol.run import EnvironmentSpec, Role
from tests.coordinator.world import BASE, make_body, make_rules
from tests.scenarios.phrases import seconds_word, slot_word
from tests.scenarios.stage import Actor, Stage, StoryError
from tests.scenarios.tokens import Tokens, behind, edges, merged, tokens_of

STEP_MS = 500
MAX_LEASES = 200
ROLES: dict[str, e.InviteRole] = {"auto": "auto", "trainer": "trainer", "rollout": "rollout"}
WISHES: dict[str, tuple[Role, ...]] = {"auto": e.ANY_ROLE, "trainer": ("trainer",), "rollout": ("rollout",)}


class SwarmActs(Stage):
    """Nodes, time and the coordinator itself."""

    def do_rules(self, **changes: str) -> None:
        """`rules max_lag=0 mode=sequential`: names of `RunSpec` or `Rules`, or `num_tasks`, before anything else."""
        values = {name: _value(text) for name, text in changes.items()}
        if "num_tasks" in changes:
            values["environment"] = EnvironmentSpec("sums", num_tasks=int(changes["num_tasks"]))
            del values["num_tasks"]
        self.core = Core(make_rules(**values))

    def do_base(self) -> None:
        """The organizer's base model is there."""
        self.do(e.BaseRegistered(BASE))

    def do_start(self, trainers: str = "1", rollouts: str = "1") -> None:
        """`start 1 2`: a base, trainer t0, rollout nodes r0 and r1, all with version 0 loaded."""
        self.is_outline = True
        names = [f"t{i}" for i in range(int(trainers))] + [f"r{i}" for i in range(int(rollouts))]
        self.core.rules = replace(self.core.rules, num_trainers=int(trainers), expected_nodes=len(names))
        self.do_base()
        for name in names:
            self.do_join(name, "trainer" if name.startswith("t") else "rollout")
        self.do_load("all")

    def do_join(self, name: str, allowed: str = "auto", rate: str = "100", wish: str = "auto") -> None:
        """`join r0 rollout rate=50 wish=rollout`: a node enrols with an invite for that role, says hello, what its
        owner allows and what it can do, in tokens per second."""
        self.is_outline = True
        invite_id, peer_id = InviteId(f"invite-{allowed}"), PeerId(name)
        if invite_id not in self.core.state.invites:
            self.do(e.InviteCreated(invite_id, "00", 1000, self.now_ms + 10**9, ROLES[allowed]))
        self.do(e.InviteRedeemed(invite_id, peer_id))
        self.actors[name] = Actor(float(rate), wish=WISHES[wish])
        self._hello(name)

    def do_wish(self, name: str, wish: str) -> None:
        """`wish r0 trainer`: a node starts anew, and its owner allows another role."""
        self.do(e.SessionEnded(PeerId(name)))
        self.actors[name] = replace(self.actors[name], wish=WISHES[wish], version=-1, root=Digest(""))
        self._hello(name)

    def _hello(self, name: str) -> None:
        rate = self.actors[name].rate
        self.see(name)
        self.do(e.CapabilityLearned(PeerId(name), e.Capability(rate, rate, 1, "cpu")))

    def do_load(self, *names: str) -> None:
        """`load all`, `load t0 r0`: nodes load the head, and say so in a heartbeat."""
        for name in self.actors if names == ("all",) else names:
            actor = self.actors[name]
            if not actor.is_silent and not actor.is_stuck:
                actor.version, actor.root = self.head, self.core.state.roots.get(Version(self.head), Digest(""))
                self.see(name)

    def do_stuck(self, *names: str) -> None:
        """From now on these nodes load nothing new."""
        for name in names:
            self.actors[name].is_stuck = True

    def do_silence(self, *names: str) -> None:
        """From now on nothing is heard of these nodes."""
        for name in names:
            self.actors[name].is_silent = True

    def do_return(self, *names: str) -> None:
        """Silent nodes are heard again."""
        for name in names:
            self.actors[name].is_silent = False
            self._hello(name)

    def do_break(self, name: str) -> None:
        """A node's stream breaks."""
        self.do(e.SessionEnded(PeerId(name)))

    def do_tick(self, span: str = "0s") -> None:
        """`tick 5s`: time passes, the timer fires twice a second, nodes send a heartbeat each second."""
        end_ms = self.now_ms + _milliseconds(span)
        while True:
            self.now_ms = min(self.now_ms + STEP_MS, end_ms)
            if self.now_ms % 1000 == 0:
                for name, actor in self.actors.items():
                    if not actor.is_silent:
                        self.see(name)
            self.do(e.TimerFired())
            self.tell(stamp=f"{seconds_word(self.now_ms)} ")
            if self.now_ms == end_ms:
                return

    def do_freeze(self, span: str) -> None:
        """`freeze 40s`: time passes, and the coordinator notices nothing of it until it is over."""
        self.now_ms += _milliseconds(span)
        self.do(e.TimerFired())

    def do_crash(self) -> None:
        """The coordinator dies and comes back with what its journal has; nodes say hello again."""
        self.restart()
        self.do(e.CoordinatorStarted())
        for name, actor in self.actors.items():
            if not actor.is_silent:
                self._hello(name)


class WorkActs(SwarmActs):
    """Leases, pieces, rollouts and their rewards."""

    def do_lease(self, name: str, num_slots: str, version: str = "", root: str = "") -> None:
        """`lease r0 2`: a node asks for work under what it has loaded, or says it has (`version=3 root=other`)."""
        loaded = Version(int(version) if version else self.actors[name].version if name in self.actors else self.head)
        known = Digest(root) or self.core.state.roots.get(loaded, Digest(""))
        lease_id = LeaseId(f"L{self.num_leases + 1}")
        reply = self.do(e.WorkRequested(PeerId(name), loaded, known, int(num_slots), lease_id))
        if isinstance(reply, Grant):
            self.num_leases += 1
            self.keys |= {slot_word(slot): slot for slot in reply.slots}
            self.claims |= {(name, slot_word(slot)): lease_id for slot in reply.slots}

    def do_pieces(self, name: str, *words: str, lease: str = "", given: str = "") -> None:
        """`pieces r0 0/0 v0*8 v0*8`: all that came of these slots so far, piece by piece. With `given=8+4` four tokens
        from position 8 on are the environment's."""
        slots, pieces = _split(words)
        progress = [
            e.SlotProgress(
                PeerId(name), self._claim(name, word, lease), self.keys[word], merged(pieces), edge, _spans(given)
            )
            for word in slots
            for edge in edges(word, pieces)[-1:]
        ]
        self.do(e.PiecesReceived(tuple(progress)))

    def do_submit(self, name: str, *words: str, **how: str) -> None:
        """`submit r0 0/0 0/1 v0*8 v1*4`: filled slots, piece by piece; by default four tokens of the head, after what
        others sampled. `given=8+4` is where the environment spoke; `reply=2` is how long it speaks now, `reply=why` why
        it cannot."""
        slots, pieces = _split(words)
        for word in slots:
            self._submit(name, word, pieces or self._default(word), **how)

    def _default(self, word: str) -> Tokens:
        slot = self.core.state.find(self.keys[word])
        prefix = behind(slot.prefix.edge) if slot is not None and slot.prefix else ()
        return (*prefix, (Version(self.head), 4))

    def _submit(
        self,
        name: str,
        word: str,
        pieces: Tokens,
        *,
        lease: str = "",
        digest: str = "",
        given: str = "",
        reply: str = "",
    ) -> None:
        claim, body = self._claim(name, word, lease), Digest(digest or f"of {word} by {name}")
        made, answer = tuple(edges(word, pieces)), None
        if reply.isdecimal():
            longer = (*pieces, (pieces[-1][0], int(reply)))
            answer = e.EnvironmentReplied(int(reply), edges(word, longer)[-1])
        self.do(
            e.RolloutSubmitted(
                PeerId(name), claim, self.keys[word], body, merged(pieces), made, _spans(given), answer or reply or None
            )
        )

    def _claim(self, name: str, word: str, lease: str) -> LeaseId:
        return LeaseId(lease) if lease else self.claims.get((name, word), LeaseId("none"))

    def do_giveback(self, name: str, lease: str, *reason: str) -> None:
        """`giveback r0 L1 shutting down`: an unfinished lease comes back; `fault: …` if the node tried and failed."""
        text = " ".join(reason)
        is_fault = text.startswith("fault:")
        reason_text = text.removeprefix("fault:").strip()
        self.do(e.LeaseReturned(PeerId(name), LeaseId(lease), reason_text, is_fault))

    def do_forget(self, word: str, *reason: str) -> None:
        """`forget 0/0 signature`: the pieces that a slot should go on from are gone."""
        self.do(e.PrefixLost(self.keys[word], " ".join(reason)))

    def do_score(self, *words: str) -> None:
        """`score 0/0=1 0/1=missing`, or `score 0/0 0/1`: 1 for even samples, 0 for odd ones."""
        for word in words:
            name, _, text = word.partition("=")
            slot = self.keys[name]
            even = float(slot.sample % 2 == 0)
            self.do(e.RolloutScored(slot, even if not text else None if text == "missing" else float(text)))

    def do_batch(self, name: str = "r0", reward: str = "") -> None:
        """`batch r0`: the node leases, fills and has scored until a batch is reserved or nothing more is to be had."""
        self.is_outline, last = True, self.num_leases + MAX_LEASES
        while self.core.state.batch is None:
            self.do_lease(name, "2")
            if isinstance(self.replies[-1], HexcombError):
                return
            newest = f"L{self.num_leases}"
            mine = [word for (who, word), lease in self.claims.items() if (who, lease) == (name, newest)]
            for word in mine:
                self._submit(name, word, self._default(word))
                self.do_score(f"{word}={reward}" if reward else word)
            if self.num_leases > last:
                raise StoryError("a batch takes for ever")


class RoundActs(WorkActs):
    """Rounds and versions."""

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[str, e.VersionAttested] = {}

    def do_attest(self, *names: str, other: str = "") -> None:
        """`attest t0 t1`: trainers made the next version; `other=x` makes it another body."""
        for name in names:
            head, round_ = self.core.state.head, self.core.state.round
            if head is None or round_ is None:
                raise StoryError("no round is open")
            body = make_body(head.version + 1, parent=head.root, salt=other)
            self.words[name] = e.VersionAttested(PeerId(name), round_.round_id, body, {"loss": 1.0})
            self.do(self.words[name])

    def do_repeat(self, name: str) -> None:
        """`repeat t0`: a trainer says again what it last attested."""
        self.do(self.words[name])

    def do_fail(self, name: str, *reason: str, suspects: str = "") -> None:
        """`fail t0 no part came suspects=t1`: a member gives the round up."""
        round_ = self.core.state.round
        if round_ is None:
            raise StoryError("no round is open")
        named = tuple(PeerId(peer) for peer in suspects.split(",") if peer)
        self.do(e.RoundFailed(PeerId(name), round_.round_id, named, " ".join(reason)))

    def do_version(self, count: str = "1", by: str = "r0", but: str = "") -> None:
        """`version 3`: three times a batch, a round in which all agree, and everybody loads what came of it."""
        self.is_outline = True
        for _ in range(int(count)):
            if self.core.state.round is None:
                self.do_batch(by)
            self.do_attest(*self.core.state.round.peer_ids if self.core.state.round else ("nobody",))
            self.do_load(*(name for name in self.actors if name not in but.split(",")))


def _spans(text: str) -> Spans:
    """`8+4` is four tokens from position 8 on."""
    return tuple((int(start), int(length)) for start, length in (part.split("+") for part in text.split(",") if part))


def _split(words: Sequence[str]) -> tuple[list[str], Tokens]:
    """Slots, and pieces of tokens."""
    return [word for word in words if "*" not in word], tokens_of([word for word in words if "*" in word])


def _milliseconds(span: str) -> int:
    if not span.endswith("s"):
        raise StoryError(f"{span} is no time, as 5s or 0.5s")
    return round(float(span[:-1]) * 1000)


def _value(text: str) -> object:
    """A setting: a number, yes or no, or a word."""
    if text in ("yes", "no"):
        return text == "yes"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
