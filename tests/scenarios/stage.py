"""Where a story is played: the real core, a clock, and what came of the last command.

After every event the books are checked, and a refusal must leave the state as it was. At the end the facts, written
and read as the journal does it, must give the same state, byte for byte.
"""

from dataclasses import dataclass, replace

from coordinator.core import effects as a
from coordinator.core import events as e
from coordinator.core import facts as f
from coordinator.core.books import check
from coordinator.core.handle import Core
from coordinator.core.replies import Reply
from coordinator.core.state import encode_state
from protocol.errors import HexcombError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.run import Role
from tests.coordinator.world import make_rules
from tests.scenarios import phrases

OUTLINE = (f.RoleGiven, f.VersionCommitted, f.RoundSealed, f.RoundAborted, f.GroupDropped, f.SlotDropped, f.NodeLost)
"""What is told of a command that stands for many events."""

NOTHING = Digest("")


class StoryError(Exception):
    """A command that cannot be played, or an expectation that does not hold."""


@dataclass
class Actor:
    """A node of the story. `version` and `root` are what it has loaded; a stuck one loads nothing new; a silent one
    says nothing."""

    rate: float
    version: int = -1
    root: Digest = NOTHING
    is_stuck: bool = False
    is_silent: bool = False
    wish: tuple[Role, ...] = e.ANY_ROLE


class Stage:
    """The core and the nodes around it. `replies`, `new_facts` and `new_effects` are those of the last command."""

    def __init__(self) -> None:
        self.core = Core(make_rules())
        self.now_ms = phrases.START_MS
        self.facts: list[f.Fact] = []
        self.actors: dict[str, Actor] = {}
        self.keys: dict[str, SlotKey] = {}
        self.claims: dict[tuple[str, str], LeaseId] = {}  # by node and slot: the last lease that named it
        self.num_leases = 0
        self.clear()

    def clear(self) -> None:
        """A new command begins."""
        self.replies: list[Reply | HexcombError] = []
        self.new_facts: list[f.Fact] = []
        self.new_effects: list[a.Effect] = []
        self.is_outline = False
        self.lines: list[str] = []
        self._told = (0, 0, 0)

    @property
    def head(self) -> int:
        """The newest version; -1 before the base."""
        return self.core.state.head.version if self.core.state.head else -1

    def do(self, event: e.Event) -> Reply | None:
        """One event; a refusal is noted as its answer."""
        before = encode_state(self.core.state)
        try:
            decision = self.core.handle(event, self.now_ms)
        except HexcombError as refusal:
            self.replies.append(refusal)
            assert encode_state(self.core.state) == before, "a refusal changed the state"
            return None
        check(self.core.state)
        self.replies.append(decision.reply)
        self.facts += decision.facts
        self.new_facts += decision.facts
        self.new_effects += decision.effects
        return decision.reply

    def see(self, name: str) -> None:
        """A heartbeat."""
        actor = self.actors[name]
        trains = self.core.state.roles.get(PeerId(name)) == "trainer"
        loaded, endpoint = Version(actor.version), f"{name}:1" if trains else ""
        presence = e.Presence(loaded, actor.root, (loaded,), f"{name}:2", endpoint, "busy", 1.0, "test")
        presence = replace(presence, allowed_roles=actor.wish)
        self.do(e.NodeSeen(PeerId(name), presence))

    def tell(self, *, stamp: str = "") -> None:
        """Writes down what came since the last time."""
        replies, facts, effects = self._told
        self._told = (len(self.replies), len(self.new_facts), len(self.new_effects))
        told = []
        for reply in self.replies[replies:]:
            phrase = phrases.of_refusal(reply) if isinstance(reply, HexcombError) else phrases.of_reply(reply)
            if phrase is not None and (isinstance(reply, HexcombError) or not self.is_outline):
                told.append(phrase)
        for fact in self.new_facts[facts:]:
            if isinstance(fact, OUTLINE) or not self.is_outline:
                told.append(phrases.of_fact(fact))
        if not self.is_outline:
            told += [phrases.of_effect(effect) for effect in self.new_effects[effects:]]
        self.lines += [f"{stamp}{line}" for line in phrases.lines_of(told)]

    def restart(self) -> None:
        """The core dies and comes back from its facts."""
        before = encode_state(self.core.state)
        self.core = self._replayed()
        assert encode_state(self.core.state) == before, "the facts, replayed, give another state"

    def finish(self) -> None:
        """Raises `StoryError` unless the facts give the same state again."""
        if encode_state(self._replayed().state) != encode_state(self.core.state):
            raise StoryError("the facts of this story, replayed, give another state")

    def _replayed(self) -> Core:
        core = Core(self.core.rules)
        core.replay(f.decode_fact(f.encode_fact(fact)) for fact in self.facts)
        return core
