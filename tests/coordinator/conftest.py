"""What the tests of the coordinator's shell share: one base folder, one grading child, and a coordinator for each."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.grader import Grader
from tests.coordinator.office import SUMS, Office, serving, write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that run files name."""
    return write_base(tmp_path_factory.mktemp("base"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def grader(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Grader]:
    """A real grading child; starting one takes seconds, and it holds nothing of any run."""
    folder = tmp_path_factory.mktemp("grader", numbered=True)
    folder.chmod(0o700)
    async with Grader(SUMS, model_dir=base, run_dir=folder, log_path=folder / "grader.log") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def office(grader: Grader, base: Path, make_home: Callable[[], Path]) -> AsyncIterator[Office]:
    """A coordinator that is ready, with no node yet."""
    async with serving(grader, base, make_home) as running:
        yield running
