"""The lag rule: its edges, and the capacity formula against its table."""

import pytest

from protocol.ids import Version
from protocol.lag import capacity, is_fresh, lag

# max_lag, version, groups per batch, accepted, running, max concurrent -> capacity
TABLE = [
    (0, 0, 8, 0, 0, 64, 8),
    (0, 0, 8, 0, 8, 64, 0),
    (2, 0, 8, 0, 0, 64, 24),
    (2, 0, 8, 0, 0, 16, 16),
    (2, 0, 8, 10, 14, 64, 0),
    (2, 1, 8, 10, 14, 64, 8),
    (2, 5, 8, 48, 0, 64, 16),
    (2, 5, 8, 40, 0, 64, 24),  # after a restart: what was trained counts as accepted
    (2, 5, 8, 0, 0, 64, 64),  # and what happens if it is forgotten
    (4, 3, 16, 60, 70, 64, -6),
    (4, 3, 16, 60, 70, 200, -2),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_capacity(row: tuple[int, int, int, int, int, int, int]) -> None:
    max_lag, version, batch, accepted, running, concurrent, expected = row
    found = capacity(
        max_lag=max_lag,
        version=Version(version),
        groups_per_batch=batch,
        num_accepted=accepted,
        num_running=running,
        max_concurrent=concurrent,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("v_train", "v_token", "age", "fresh"),
    [(5, 5, 0, True), (5, 3, 2, True), (5, 2, 3, False), (5, 6, -1, False)],
)
def test_fresh_up_to_the_bound_and_never_from_the_future(v_train: int, v_token: int, age: int, fresh: bool) -> None:
    assert lag(v_train=Version(v_train), v_token=Version(v_token)) == age
    assert is_fresh(v_train=Version(v_train), v_token=Version(v_token), max_lag=2) is fresh
