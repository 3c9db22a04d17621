"""What a story looks at, what it expects, and how it is played from its first line to its last."""

from dataclasses import fields

from coordinator.core import leases
from coordinator.core.replies import Grant, Receipt
from coordinator.core.turn import Turn
from protocol.errors import HexcombError
from protocol.ids import PeerId, Version
from tests.scenarios import phrases
from tests.scenarios.acts import RoundActs
from tests.scenarios.script import Command, commands_of, weave
from tests.scenarios.stage import StoryError


class Player(RoundActs):
    """Looks (`books`, `share t0`, …) write what they see; `expect …` writes nothing and holds whatever the outcomes in
    the file say."""

    def play(self, command: Command) -> list[str]:
        """What came of a command. Raises `StoryError`, with the line, for one that cannot be played."""
        verb, *words = command.words
        act = getattr(self, f"do_{verb}", None)
        if act is None:
            raise StoryError(f"line {command.line}: there is no command {verb!r}")
        if verb != "expect":
            self.clear()
        options = dict(word.split("=", 1) for word in words if word[0].isalpha() and "=" in word)
        plain = [word for word in words if not (word[0].isalpha() and "=" in word)]
        try:
            act(*plain, **options)
        except (AssertionError, LookupError, StoryError, TypeError, ValueError) as error:
            raise StoryError(f"line {command.line}: {command.text}: {error!r}") from error
        if verb == "expect":
            return []
        self.tell()
        return self.lines

    def do_books(self) -> None:
        """Where all slots are, and what became of all leases."""
        self.lines += phrases.of_books(self.core.books())

    def do_waits(self) -> None:
        """What the run waits for."""
        code, sentence = self.core.waiting_for(self.now_ms)
        self.lines.append(f"{code}: {sentence}")

    def do_capacity(self, version: str = "") -> None:
        """How many groups a node with that version, or the head, might open."""
        self.lines.append(f"{self._capacity(int(version) if version else self.head)} groups")

    def _capacity(self, version: int) -> int:
        turn = Turn(self.core.rules, self.core.state, self.core.soft, self.now_ms)
        return leases.spare_groups(turn, version=Version(version))

    def do_share(self, *names: str) -> None:
        """What trainers do with the batch; tokens in brackets are masked."""
        round_ = self.core.state.round
        if round_ is None:
            raise StoryError("no round is open")
        for name in names:
            items = self.core.share_of(round_.round_id, PeerId(name))
            self.lines += [f"{name} {phrases.of_share(item)}" for item in items]

    def do_node(self, *names: str) -> None:
        """What the coordinator knows of nodes."""
        shown = ("num_leased", "num_accepted", "num_tokens", "failure", "rate", "num_strikes")
        for name in names:
            node = self.core.state.nodes[PeerId(name)]
            words = [f"{key} {round(getattr(node, key), 3):g}" for key in shown if hasattr(node, key)]
            role = self.core.state.roles.get(PeerId(name), "no role")
            self.lines.append(f"{name}: {role}, {', '.join(words)}")

    def do_letters(self) -> None:
        """Slots that nobody could fill."""
        for letter in self.core.state.dead_letters:
            self.lines.append(f"{phrases.slot_word(letter.slot)} at v{letter.at_version}: {letter.reason}")

    def do_expect(self, what: str, *words: str, **numbers: str) -> None:
        """`refused CODE`, `granted 2`, `accepted`, `duplicate`, `too_old`, `fact Kind`, `no Kind`, `effect Kind`,
        `nothing`, `books trained=4`, `head 3`, `waits CODE`, `capacity 8`: of the last command, or as things are."""
        last = self.replies[-1] if self.replies else None
        seen: object
        match what, words:
            case "refused", (code,):
                self._same(getattr(last, "code", last), code)
            case "granted", (count,):
                self._same(len(last.slots) if isinstance(last, Grant) else last, int(count))
            case (("accepted" | "duplicate" | "too_old"), ()):
                outcome = {"accepted": "ACCEPTED", "duplicate": "DUPLICATE", "too_old": "VERSION_TOO_OLD"}[what]
                self._same({r.outcome if isinstance(r, Receipt) else r for r in self.replies}, {outcome})
            case (("fact" | "effect" | "no"), kinds):
                found = {type(one).__name__ for one in [*self.new_facts, *self.new_effects]}
                self._same({kind: kind in found for kind in kinds}, dict.fromkeys(kinds, what != "no"))
            case "nothing", ():
                self._same(self.new_facts, [])
                self._same([reply for reply in self.replies if isinstance(reply, HexcombError)], [])
            case "books", ():
                books = self.core.books()
                known = {field.name for field in fields(books)}
                seen = {name: getattr(books, name) for name in numbers if name in known}
                self._same(seen, {name: int(text) for name, text in numbers.items()})
            case "head", (count,):
                self._same(self.head, int(count))
            case "waits", (code,):
                self._same(self.core.waiting_for(self.now_ms)[0], code)
            case "capacity", (count,):
                self._same(self._capacity(self.head), int(count))
            case _:
                raise StoryError(f"nobody knows how to expect {what} {' '.join(words)}")

    @staticmethod
    def _same(seen: object, expected: object) -> None:
        if seen != expected:
            raise StoryError(f"expected {expected}, saw {seen}")


def perform(story: str) -> str:
    """The story with what really came out below each command. Raises `StoryError`."""
    player, outcomes = Player(), []
    for command in commands_of(story):
        outcomes.append(player.play(command))
    player.finish()
    return weave(story, outcomes)
