"""The averaging bench's arithmetic, and what each of its thresholds refuses."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bench.averaging import share_differing
from tests.bench.averaging_figures import Turn, figures_of
from tests.bench.exactness import average_in, distance, splits

OURS = Turn("hexcomb", 2, 1.0, stepped_s=1.5, whole_s=3.0, check_s=0.25, exchange_s=0.5, commit_s=0.125)
OTHERS = [Turn("hivemind", 2, 1.5, seek_s=2.0, share_differing=0.25), Turn("grpc", 2, 0.8), Turn("gloo", 2, 0.2)]


def test_ratios_are_of_medians() -> None:
    ours = [replace(OURS, round_s=seconds) for seconds in (9.0, 1.0, 0.5)]
    found = {figure.name: figure for figure in figures_of([*ours, *OTHERS])}
    assert found["2 members: averaging, times as fast as hivemind"].value == pytest.approx(1.5)
    assert found["2 members: with step and state"].value == pytest.approx(1.0)
    assert found["2 members: with step, state and stored version"].value == pytest.approx(0.5)
    assert found["2 members: averaging, times as fast as bare gRPC"].value == pytest.approx(0.8)
    assert found["2 members: averaging, to gloo"].value == pytest.approx(0.2)
    assert "1.00 s (0.50 to 9.00, 3 rounds)" in found["2 members: averaging, times as fast as hivemind"].anchor
    assert (
        "0.25 s the own gradient's check, 0.50 s the exchange, 0.12 s the commit" in next(iter(found.values())).anchor
    )
    assert all(figure.passed for figure in found.values())


def test_groups_are_kept_apart() -> None:
    four = [replace(turn, num_members=4, round_s=2 * turn.round_s) for turn in (OURS, *OTHERS)]
    names = [figure.name for figure in figures_of([*four, OURS, *OTHERS])]
    assert names == [
        *(figure.name for figure in figures_of([OURS, *OTHERS])),
        *(figure.name for figure in figures_of(four)),
    ]


@pytest.mark.parametrize(
    ("turn", "missed"),
    [
        (replace(OURS, round_s=1.01), {"as hivemind", "as bare gRPC"}),
        (replace(OURS, is_same=False), {"bits and root at all"}),
        (replace(OURS, error=1e-4), {"true mean"}),
    ],
)
def test_each_threshold_refuses(turn: Turn, missed: set[str]) -> None:
    failed = [figure.name for figure in figures_of([turn, *OTHERS]) if not figure.passed]
    assert len(failed) == len(missed)
    assert all(any(name.endswith(end) for name in failed) for end in missed)


def test_one_round_of_many_with_other_bits_is_a_miss() -> None:
    turns = [*[OURS] * 99, replace(OURS, is_same=False), *OTHERS]
    assert not all(figure.passed for figure in figures_of(turns))


def test_values_are_compared_by_their_bits(tmp_path: Path) -> None:
    vectors = np.zeros((3, 8), np.float32)
    vectors[1, 2] = -0.0
    vectors[2, 5:7] = 1.0
    paths = [tmp_path / str(index) for index in range(3)]
    for path, vector in zip(paths, vectors, strict=True):
        vector.tofile(path)
    assert share_differing(paths) == 3 / 8
    assert not any(path.exists() for path in paths)
    assert share_differing([]) == 0.0


def test_splits_lose_and_double_nothing() -> None:

    batch = list(range(9))
    found = list(splits(batch, random.Random(1)))
    assert {len(shares) for shares in found} == {2, 3, 4}
    assert all(sorted(item for share in shares for item in share) == batch for shares in found)
    assert sum([] in shares for shares in found) >= 3


def test_cuts_and_distances() -> None:
    chance = np.random.default_rng(0)
    parts = [chance.standard_normal(101, np.float32) for _ in range(3)]
    whole = average_in(parts, 1, 1 << 19, divisor=5)
    assert average_in(parts, 7, 8, divisor=5).tobytes() == whole.tobytes()
    assert distance(whole, whole) == 0.0
    assert distance(whole * np.float32(1.01), whole) == pytest.approx(0.01, rel=1e-3)
