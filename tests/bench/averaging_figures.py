"""What the averaging bench makes of its rounds. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.table import Figure, at_least, at_most, reported

MAX_ERROR = 1e-5
"""Of a mean of values around one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one side. `round_s` is the round's time as the bench defines it, `stepped_s` that with optimizer
    step and settled state, `whole_s` that with the version stored as well (hexcomb alone); `seek_s` is matchmaking;
    of `round_s` the own gradient's check takes `check_s`, the exchange `exchange_s`, the commit `commit_s`;
    `share_differing` are the values that are not the same in all members; `num_replaced` are the shards for which the
    owner's bytes had to win."""

    side: str
    num_members: int
    round_s: float
    stepped_s: float = 0.0
    whole_s: float = 0.0
    seek_s: float = 0.0
    check_s: float = 0.0
    exchange_s: float = 0.0
    commit_s: float = 0.0
    is_same: bool = True
    error: float = 0.0
    share_differing: float = 0.0
    num_replaced: int = 0


PARTS: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("the own gradient's check", lambda turn: turn.check_s),
    ("the exchange", lambda turn: turn.exchange_s),
    ("the commit", lambda turn: turn.commit_s),
)


def figures_of(turns: Sequence[Turn]) -> list[Figure]:
    """The table's lines, for each size of a group."""
    found: list[Figure] = []
    for num in sorted({turn.num_members for turn in turns}):
        found += _figures_of_group([turn for turn in turns if turn.num_members == num], f"{num} members:")
    return found


def _figures_of_group(turns: Sequence[Turn], name: str) -> list[Figure]:
    ours, hivemind, bare, gloo = (
        [turn for turn in turns if turn.side == side] for side in ("hexcomb", "hivemind", "grpc", "gloo")
    )
    plain, stepped, whole = _medians(ours)
    theirs_s, bare_s, gloo_s = (median(turn.round_s for turn in side) for side in (hivemind, bare, gloo))
    what = "signed plan to average at all, every check, and the commit"
    with_step = f"{_shown(ours, lambda turn: turn.stepped_s)}: the same with AdamW and settled state"
    parts = ", ".join(f"{median(map(part, ours)):.2f} s {of_what}" for of_what, part in PARTS)
    against = f"hivemind 1.1.12 {_shown(hivemind)}, trigger to average, no commit"
    beside = f"mutual TLS, same bytes and ways, no checks: {_shown(bare)}"
    same = sum(turn.is_same for turn in ours) / len(ours)
    replaced = sum(turn.num_replaced for turn in ours)
    return [
        at_least(
            f"{name} averaging, times as fast as hivemind",
            theirs_s / plain,
            1.5,
            unit="x",
            anchor=f"{_shown(ours)}: {what} ({parts}); {against}",
        ),
        reported(f"{name} with step and state", theirs_s / stepped, unit="x", anchor=f"{with_step}; {against}"),
        reported(
            f"{name} with step, state and stored version",
            theirs_s / whole,
            unit="x",
            anchor=f"{_shown(ours, lambda turn: turn.whole_s)}: weights and moments on disk, canary; {against}",
        ),
        at_least(f"{name} averaging, times as fast as bare gRPC", bare_s / plain, 0.8, unit="x", anchor=beside),
        reported(f"{name} with step and state, to bare gRPC", bare_s / stepped, unit="x", anchor=beside),
        reported(f"{name} averaging, to gloo", gloo_s / plain, unit="x", anchor=f"plain TCP: {_shown(gloo)}"),
        at_least(
            f"{name} rounds with the same bits and root at all",
            same,
            1.0,
            anchor=f"{len(ours)} rounds; {replaced} shards where the owner's bytes had to win",
        ),
        reported(
            f"{name} values that differ between hivemind's members",
            max(turn.share_differing for turn in hivemind),
            anchor="bit for bit, in a turn's last round",
        ),
        reported(
            f"{name} hivemind's matchmaking",
            median(turn.seek_s for turn in hivemind),
            unit="s",
            anchor="before the round, in no time above",
        ),
        at_most(
            f"{name} distance of any side from the true mean",
            max(turn.error for turn in turns),
            MAX_ERROR,
            anchor="float64, at a thousand places of every member and round",
        ),
    ]


def _medians(ours: Sequence[Turn]) -> tuple[float, float, float]:
    return (
        median(turn.round_s for turn in ours),
        median(turn.stepped_s for turn in ours),
        median(turn.whole_s for turn in ours),
    )


def _shown(turns: Sequence[Turn], seconds: Callable[[Turn], float] = lambda turn: turn.round_s) -> str:
    """Median, extremes and number of the rounds."""
    values = [seconds(turn) for turn in turns]
    return f"{median(values):.2f} s ({min(values):.2f} to {max(values):.2f}, {len(values)} rounds)"
