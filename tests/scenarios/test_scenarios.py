"""Every story under tests/scenarios, played against the real core; and that the player would see a wrong one."""

import difflib
from pathlib import Path

import pytest

from coordinator.core import ledger
from tests.scenarios.looks import perform
from tests.scenarios.script import commands_of, weave
from tests.scenarios.stage import StoryError

FOLDER = Path(__file__).parent
STORIES = sorted(FOLDER.glob("*.txt"))
MIN_STORIES = 20

SHORT = """\
# A node fills one slot.
start 1 1
    + version 0 committed
lease r0 1
submit r0 0/0
expect accepted
"""


def difference(expected: str, came_out: str, name: str) -> str:
    """A unified diff, empty if there is none."""
    lines = difflib.unified_diff(
        expected.splitlines(), came_out.splitlines(), f"{name} as written", f"{name} as it came out", lineterm=""
    )
    return "\n".join(lines)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    came_out = perform(written)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(came_out)
        return
    assert written == came_out, difference(written, came_out, path.name)


def test_there_are_enough_stories() -> None:
    assert len(STORIES) >= MIN_STORIES


def test_a_played_story_plays_the_same_again() -> None:
    once = perform(SHORT)
    assert perform(once) == once
    assert once.startswith("# A node fills one slot.\nstart 1 1\n    + version 0 committed\n")


def test_a_changed_outcome_is_seen() -> None:
    """Negative control: one character of one outcome."""
    good = perform(SHORT)
    bad = good.replace("0/0 (v0*4)", "0/0 (v0*5)")
    assert bad != good
    found = difference(bad, perform(bad), "short.txt")
    assert "-    + filled by r0: 0/0 (v0*5)" in found
    assert "+    + filled by r0: 0/0 (v0*4)" in found


def test_a_missing_outcome_is_seen() -> None:
    good = perform(SHORT)
    bad = "\n".join(line for line in good.splitlines() if "> score" not in line) + "\n"
    assert bad != good
    assert difference(bad, perform(bad), "short.txt")


@pytest.mark.parametrize(
    "lie",
    ["expect refused LEASE_UNKNOWN", "expect books filled=2", "expect no RolloutAccepted", "expect head 1", "dance r0"],
)
def test_what_is_expected_holds_even_when_outcomes_are_rewritten(lie: str) -> None:
    with pytest.raises(StoryError, match=r"line 7: "):
        perform(f"{SHORT}{lie}\n")


def test_another_core_makes_another_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a core that gives work without a lease."""
    story = f"{SHORT}submit r0 0/0 digest=other lease=L9\nexpect refused ROLLOUT_CONFLICT\n"
    perform(story)
    monkeypatch.setattr(ledger, "_fill_of", lambda *_: None)
    with pytest.raises(StoryError, match="expected ROLLOUT_CONFLICT"):
        perform(story)


def test_outcomes_go_below_their_commands() -> None:
    story = "# remark\n\na 1  # why\n    old\nb 2\n"
    assert [command.words for command in commands_of(story)] == [["a", "1"], ["b", "2"]]
    assert weave(story, [["x", "y"]]) == "# remark\n\na 1  # why\n    x\n    y\nb 2\n"
