"""A story of a swarm as text: commands at the left margin, what came of each indented below it. Pure.

Blank lines and lines that begin with `#` stand where they stand. `weave` writes the same story with other outcomes;
a story whose outcomes are what came out is woven into itself, byte for byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Command:
    """A line at the left margin: `words[0]` is the verb, `line` its number, from 1."""

    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """The command without its remark."""
        return self.text.split("  #")[0].split()


def commands_of(story: str) -> Iterator[Command]:
    """The commands of a story, in order."""
    for number, text in enumerate(story.splitlines(), start=1):
        if text and not text.startswith(("#", " ")):
            yield Command(number, text)


def weave(story: str, outcomes: Sequence[Sequence[str]]) -> str:
    """The story with `outcomes[i]` below its i-th command; commands beyond the last outcome have none."""
    lines: list[str] = []
    left = iter(outcomes)
    for text in story.splitlines():
        if text.startswith(" "):
            continue
        lines.append(text.rstrip())
        if text and not text.startswith("#"):
            lines += [f"{INDENT}{outcome}" for outcome in next(left, ())]
    return "\n".join(lines) + "\n"
