"""Our package names are generic; nobody else's distribution in this environment may own them too."""

from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES


def strangers() -> dict[str, set[str]]:
    """Package -> distributions other than ours that claim it."""
    owners = packages_distributions()
    claims = {name: set(owners.get(name, [])) - {"hexcomb"} for name in PACKAGES}
    return {name: others for name, others in claims.items() if others}


def test_nobody_else_owns_our_package_names() -> None:
    assert strangers() == {}


def test_a_collision_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "intruder-1.0.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (planted / "top_level.txt").write_text("node\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert strangers() == {"node": {"intruder"}}
