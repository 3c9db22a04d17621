"""What hivemind leaves open beside the validation of entries: each hole shown open without hardening, shut
with it.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protocol.child import ChildProcess
from tests.directory.probe import Prepare, Read, Replay, Seen

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def probe(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChildProcess]:
    folder = tmp_path_factory.mktemp("probe")
    child = await ChildProcess.start(
        "tests.directory.probe",
        run_dir=folder / "run",
        log_path=folder / "log",
        deadline_s=20,
        env={"OMP_NUM_THREADS": "1"},
    )
    try:
        await child.request(Prepare(str(folder)), Seen, deadline_s=90)
        yield child
    finally:
        await child.terminate()


async def read(probe: ChildProcess, lie: str, *, hardened: bool) -> Seen:
    return await probe.request(Read(lie, hardened), Seen, deadline_s=30)


@pytest.mark.parametrize("hardened", [True, False])
async def test_without_a_lie_both_records_are_found(probe: ChildProcess, hardened: bool) -> None:
    assert await read(probe, "none", hardened=hardened) == Seen(holder=True, bystander=True)


async def test_an_empty_dictionary_for_ever_does_not_end_the_search(probe: ChildProcess) -> None:
    assert await read(probe, "empty, for ever", hardened=False) == Seen(holder=False, bystander=False)
    assert (await read(probe, "empty, for ever", hardened=True)).holder


async def test_a_plain_value_hides_nobody(probe: ChildProcess) -> None:
    assert (await read(probe, "a plain value, for ever", hardened=True)).holder


async def test_a_bad_entry_does_not_take_the_good_ones_with_it(probe: ChildProcess) -> None:
    lie = "a bad entry beside a good one"
    assert await read(probe, lie, hardened=False) == Seen(holder=True, bystander=False)
    assert await read(probe, lie, hardened=True) == Seen(holder=True, bystander=True)


async def test_a_dictionary_of_no_size_does_not_hang_the_reader(probe: ChildProcess) -> None:
    assert (await read(probe, "no size", hardened=False)) != Seen(holder=True, bystander=True)
    assert await read(probe, "no size", hardened=True) == Seen(holder=True, bystander=True)


async def test_cached_entries_do_not_hide_stored_ones(probe: ChildProcess) -> None:
    assert await read(probe, "cached", hardened=False) == Seen(holder=False, bystander=True)
    assert await read(probe, "cached", hardened=True) == Seen(holder=True, bystander=True)


async def test_an_older_record_does_not_shorten_the_newer(probe: ChildProcess) -> None:
    assert not (await probe.request(Replay(hardened=False), Seen, deadline_s=10)).holder
    assert (await probe.request(Replay(hardened=True), Seen, deadline_s=10)).holder
