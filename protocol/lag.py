"""The lag rule: how stale a token may be, and how much work may be under way. Pure.

One function computes lag and all three gates use it (lease, acceptance, cut). `capacity` is the admission formula
of AReaL's staleness manager, in groups; it bounds the aggregate only, so the cut checks every token again.
"""

from protocol.ids import Version


def lag(*, v_train: Version, v_token: Version) -> int:
    """Versions between the weights an update starts from and the weights that sampled a token; negative = future."""
    return v_train - v_token


def is_fresh(*, v_train: Version, v_token: Version, max_lag: int) -> bool:
    """Whether a token may contribute to the update that starts from `v_train`."""
    return 0 <= lag(v_train=v_train, v_token=v_token) <= max_lag


def capacity(
    *,
    max_lag: int,
    version: Version,
    groups_per_batch: int,
    num_accepted: int,
    num_running: int,
    max_concurrent: int,
) -> int:
    """How many more groups may be opened now; not positive when none may.

    `num_accepted` counts groups taken since version 0, those of past versions included (after a restart it is
    `version * groups_per_batch` at least, else the bound would be forgotten).
    """
    by_lag = (max_lag + version + 1) * groups_per_batch - (num_accepted + num_running)
    return min(max_concurrent - num_running, by_lag)
