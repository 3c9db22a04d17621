"""Supervision of a real child: every request ends, every death is told, nothing outlives its daemon."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from protocol import child_wire as wire
from protocol.child import ChildProcess
from protocol.errors import EngineError, MachineUnfitError, UnreachableError, VersionTooOldError
from tests.child.processes import is_gone
from tests.child.toy_child import Big, Cancelled, Count, Echo, Echoed, Fail, Hang, Noticed, Spawn

TOY = "tests.child.toy_child"
WAIT_S = 20.0


async def start(tmp_path: Path, *args: str, deadline_s: float = WAIT_S, max_queued_events: int = 8) -> ChildProcess:
    return await ChildProcess.start(
        TOY,
        run_dir=tmp_path / "run",
        log_path=tmp_path / "logs" / "toy.log",
        deadline_s=deadline_s,
        args=args,
        events=Noticed,
        max_queued_events=max_queued_events,
    )


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[ChildProcess]:
    process = await start(tmp_path)
    yield process
    await process.terminate()


async def test_replies_find_their_requests_and_events_come_in_order(child: ChildProcess) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(child.request(Echo(str(n)), Echoed, deadline_s=WAIT_S)) for n in range(50)]
    assert [task.result().text for task in asked] == [str(n) for n in range(50)]
    many = asyncio.create_task(child.request(Echo("many", 100), Echoed, deadline_s=WAIT_S))
    assert [(await child.next_event()).number for _ in range(100)] == list(range(100))
    assert (await many).text == "many"


async def test_errors_of_the_tree_cross_as_themselves(child: ChildProcess) -> None:
    with pytest.raises(VersionTooOldError) as caught:
        await child.request(Fail(typed=True), Echoed, deadline_s=WAIT_S)
    assert (caught.value.what, caught.value.why, caught.value.remedy) == (
        "v3 is too old",
        "v9 is out",
        "Fetch v9.",
    )
    with pytest.raises(EngineError, match="ZeroDivisionError because one over nothing") as other:
        await child.request(Fail(typed=False), Echoed, deadline_s=WAIT_S)
    assert "ZeroDivisionError: one over nothing" in other.value.__notes__[0]
    assert not child.is_closed


async def test_an_answer_of_another_type_is_an_error(child: ChildProcess) -> None:
    with pytest.raises(EngineError, match="wrong type"):
        await child.request(Echo("x"), Count, deadline_s=WAIT_S)
    with pytest.raises(EngineError, match="wrong type"):
        await child.request(Noticed(3), Echoed, deadline_s=WAIT_S)
    assert (await child.request(Echo("still"), Echoed, deadline_s=WAIT_S)).text == "still"


async def test_a_deadline_ends_the_request_and_the_work(child: ChildProcess) -> None:
    with pytest.raises(UnreachableError, match=r"did not answer Hang within 0\.2 s"):
        await child.request(Hang(), Echoed, deadline_s=0.2)
    assert (await child.request(Cancelled(), Count, deadline_s=WAIT_S)).value == 1


async def test_a_caller_that_is_cancelled_ends_the_work(child: ChildProcess) -> None:
    asked = asyncio.create_task(child.request(Hang(), Echoed, deadline_s=WAIT_S))
    await child.next_event()
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    assert (await child.request(Cancelled(), Count, deadline_s=WAIT_S)).value == 1


async def test_sigkill_in_mid_request_ends_it_at_once(child: ChildProcess) -> None:
    asked = asyncio.create_task(child.request(Hang(spin=True), Echoed, deadline_s=600))
    await child.next_event()
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await asked
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await child.next_event()
        assert "SIGKILL" in (await child.wait_closed()).why
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await child.request(Echo("anyone?"), Echoed, deadline_s=WAIT_S)


async def test_death_with_a_full_queue_of_events_still_ends_everything(tmp_path: Path) -> None:
    child = await start(tmp_path, max_queued_events=2)
    asked = asyncio.create_task(child.request(Echo("flood", 100), Echoed, deadline_s=600))
    await child.next_event()
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineError, match="SIGKILL"):
            await asked
    numbers = []
    with contextlib.suppress(EngineError):
        while True:
            numbers.append((await child.next_event()).number)
    assert numbers == list(range(1, 1 + len(numbers)))
    assert len(numbers) <= 2


async def test_terminate_kills_what_does_not_stop(tmp_path: Path) -> None:
    child = await start(tmp_path)
    grandchild = await child.request(Spawn(), Count, deadline_s=WAIT_S)
    asked = asyncio.create_task(child.request(Hang(spin=True), Echoed, deadline_s=600))
    await child.next_event()
    await child.terminate(deadline_s=0.2)
    with pytest.raises(EngineError, match="told to stop"):
        await asked
    assert is_gone(child.pid)
    assert is_gone(grandchild.value)


@pytest.mark.parametrize("busy", ["idle", "busy"])
async def test_nothing_outlives_a_daemon_that_is_killed(tmp_path: Path, busy: str) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.child.toy_parent", str(tmp_path), busy), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(WAIT_S):
        pids = [int(word) for word in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    gone = [is_gone(pid, deadline_s=5) for pid in pids]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert gone == [True, True]


async def test_a_child_that_dies_at_start_leaves_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exited with status 3") as caught:
        await start(tmp_path, "die")
    assert "the engine room is on fire" in caught.value.__notes__[0]


async def test_a_child_that_says_nothing_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start within 0\.5 s"):
        await start(tmp_path, "mute", deadline_s=0.5)


HELLO = wire.encode_frame(wire.Hello())


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"\x00\x00\x00\x03\xc1\xc1\xc1", "carries garbage"),
        (b"\x00\x00\x00\x02\x91\x01", "carries garbage"),
        (b"\xff\xff\xff\xff", "announces a message of 4294967295 bytes"),
        (wire.encode_frame(wire.Cancel(1)), "unexpected Cancel"),
        (wire.encode_frame(wire.Event(wire.encode_body(Echoed("x")))), "wrong type"),
    ],
)
async def test_a_child_that_breaks_the_protocol_is_ended(tmp_path: Path, sent: bytes, complaint: str) -> None:
    child = await start(tmp_path, "raw", (HELLO + sent).hex())
    async with asyncio.timeout(WAIT_S):
        death = await child.wait_closed()
    assert complaint in death.why
    assert is_gone(child.pid)


async def test_a_child_that_does_not_say_hello_is_ended(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="hello"):
        await start(tmp_path, "raw", wire.encode_frame(wire.Cancel(1)).hex())


async def test_an_exposed_run_time_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(MachineUnfitError, match="not private"):
        await start(tmp_path)


async def test_frames_over_the_bound_never_leave(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="too large"):
        await child.request(Big(wire.MAX_FRAME_BYTES), Echoed, deadline_s=60)
    assert (await child.request(Echo("x" * 3_000_000), Echoed, deadline_s=WAIT_S)).text == "x" * 3_000_000


def test_wire_round_trip_and_bounds() -> None:
    frame = wire.encode_frame(wire.Reply(7, wire.encode_body(Echoed("hi"))))
    assert wire.payload_bytes(frame[:4]) == len(frame) - 4
    envelope = wire.decode_envelope(frame[4:])
    assert isinstance(envelope, wire.Reply)
    assert envelope.request_id == 7
    assert wire.decode_body(envelope.body, Echoed | Count) == Echoed("hi")
    with pytest.raises(EngineError, match="too large"):
        wire.encode_frame(wire.Reply(7, msgspec.Raw(msgspec.msgpack.encode("x" * 100))), max_bytes=50)
    with pytest.raises(EngineError, match="announces"):
        wire.payload_bytes(b"\x00\x00\x00\x33", max_bytes=50)
    with pytest.raises(EngineError, match="wrong type"):
        wire.decode_body(envelope.body, Count)


def test_an_unknown_code_becomes_an_engine_error() -> None:
    error = wire.error_of(wire.Failure(1, "FROM_THE_FUTURE", "what", "why", "do", "trace"))
    assert type(error) is EngineError
    assert error.sentence() == "what because why. do"
