"""The lag rule: its edges, and the capacity formula against its table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


counts = st.integers(0, 1000)


@given(max_lag=st.integers(0, 16), version=counts, batch=st.integers(1, 64), accepted=counts, running=counts)
def test_a_group_is_counted_once_wherever_it_is(
    max_lag: int, version: int, batch: int, accepted: int, running: int
) -> None:
    """What is granted takes one away, what is accepted neither gives nor takes, a version gives a batch."""

    def groups(*, more_versions: int = 0, more_accepted: int = 0, more_running: int = 0) -> int:
        return capacity(
            max_lag=max_lag,
            version=Version(version + more_versions),
            groups_per_batch=batch,
            num_accepted=accepted + more_accepted,
            num_running=running + more_running,
            max_concurrent=10**9,
        )

    assert groups(more_running=1) == groups() - 1
    assert groups(more_accepted=1, more_running=-1) == groups()
    assert groups(more_versions=1) == groups() + batch
    assert groups(more_accepted=version * batch - accepted, more_running=-running) == (max_lag + 1) * batch


@given(v_train=counts, v_token=counts, max_lag=st.integers(0, 16))
def test_a_token_ages_by_one_with_each_version_and_never_gets_fresh_again(
    v_train: int, v_token: int, max_lag: int
) -> None:
    ages = [lag(v_train=Version(v_train + later), v_token=Version(v_token)) for later in range(20)]
    assert ages == [v_train - v_token + later for later in range(20)]
    fresh = [
        is_fresh(v_train=Version(v_train + later), v_token=Version(v_token), max_lag=max_lag) for later in range(20)
    ]
    if v_token <= v_train:
        assert fresh == sorted(fresh, reverse=True)
        assert sum(fresh) == max(0, min(20, max_lag + 1 - (v_train - v_token)))


def test_a_bound_of_zero_is_equality() -> None:
    assert [is_fresh(v_train=Version(3), v_token=Version(v), max_lag=0) for v in range(6)] == [v == 3 for v in range(6)]
