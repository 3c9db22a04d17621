"""Tests that run beside others do so by the groups of `tests/conftest.py`."""

import os

import pytest


def test_a_worker_knows_the_group_of_its_tests(request: pytest.FixtureRequest) -> None:
    """pytest-xdist puts the group behind the test's name, where it has seen one."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@house") == is_worker
