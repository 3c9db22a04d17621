"""Which versions' bytes a node keeps: what the bound needs, and what its own job stands on."""

from node.state import NodeState
from node.work import oldest_needed
from protocol.ids import Digest, Version


def test_bound_alone_decides_for_a_node_in_step() -> None:
    state = NodeState(loaded=(Version(9), Digest("r")))
    assert oldest_needed(Version(10), max_lag=2, state=state) == 7


def test_loaded_version_stays_however_old() -> None:
    state = NodeState(loaded=(Version(1), Digest("r")))
    assert oldest_needed(Version(10), max_lag=2, state=state) == 1


def test_version_that_an_engine_starts_from_stays_until_it_is_up() -> None:
    """An engine may take longer to start than versions take to pass; its file must not go under it."""
    state = NodeState(starting=Version(4))
    assert oldest_needed(Version(50), max_lag=2, state=state) == 4
    state.drop_job()
    assert oldest_needed(Version(50), max_lag=2, state=state) == 47
