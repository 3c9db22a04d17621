"""The daemon's socket: answers and errors come back as they were, and a bad caller harms only itself."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol import local_socket
from protocol.errors import (
    DaemonNotRunningError,
    HexcombError,
    UnreachableError,
    UsageError,
    VersionTooOldError,
)
from protocol.local_socket import MAX_LINE_BYTES, answering, ask

DEADLINE_S = 10.0


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"said": request}


async def refuse(request: dict[str, Any]) -> dict[str, Any]:
    raise VersionTooOldError("v3 is too old", why="v9 is out", remedy="Fetch v9.")


async def break_down(request: dict[str, Any]) -> dict[str, Any]:
    return {"missing": request["no such field"]}


async def time_out(request: dict[str, Any]) -> dict[str, Any]:
    raise TimeoutError("something else was slow")


async def hang(request: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def unspeakable(request: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": b"\xff"}


VERBS = {
    "echo": echo,
    "refuse": refuse,
    "break": break_down,
    "time_out": time_out,
    "hang": hang,
    "unspeakable": unspeakable,
}


@pytest.fixture
async def path(home: Path) -> AsyncIterator[Path]:
    async with answering(home / "d.sock", VERBS):
        yield home / "d.sock"


async def raw(path: Path, data: bytes) -> bytes:
    """All that comes back for raw bytes."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read()
        except (ConnectionResetError, BrokenPipeError):
            return b""
        finally:
            writer.close()


async def test_an_answer_and_an_error_come_back_as_they_were(path: Path) -> None:
    answer = await ask(path, "echo", number=7, text="größe \U0001f98a\n")
    assert answer == {"schema": 1, "said": {"verb": "echo", "number": 7, "text": "größe \U0001f98a\n"}}
    with pytest.raises(VersionTooOldError) as caught:
        await ask(path, "refuse")
    assert (caught.value.what, caught.value.why, caught.value.remedy) == ("v3 is too old", "v9 is out", "Fetch v9.")


async def test_the_socket_is_its_owners_and_goes_with_the_block(home: Path) -> None:
    path = home / "d.sock"
    path.write_text("left behind by one that was killed")
    before = os.umask(0)
    try:
        async with answering(path, VERBS):
            assert path.is_socket()
            assert path.stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
    assert not path.exists()


async def test_nobody_there_is_told_with_a_remedy(home: Path) -> None:
    (home / "plain").write_text("")
    for path in (home / "none.sock", home / "plain", home / "no" / "folder.sock", home / ("x" * 200)):
        with pytest.raises(DaemonNotRunningError, match="--home"):
            await ask(path, "echo", who="daemon")


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{\n",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"verb": "no such verb"}\n',
        b'{"verb": ["echo"]}\n',
        b'{"verb": null}\n',
        b'{"other": 1}\n',
        b'["echo"]\n',
        b'"echo"\n',
        b"7\n",
        b"null\n",
    ],
    ids=lambda line: ascii(line[:24]),
)
async def test_a_line_that_is_no_request_is_a_usage_error(path: Path, line: bytes) -> None:
    answer = json.loads(await raw(path, line))
    assert (answer["schema"], answer["error"]["code"]) == (1, "USAGE")
    assert (await ask(path, "echo"))["said"] == {"verb": "echo"}


async def test_a_line_without_end_is_refused_at_its_limit(path: Path) -> None:
    answer = await raw(path, b"x" * (MAX_LINE_BYTES + 65_536) + b"\n")
    assert answer == b"" or json.loads(answer)["error"]["code"] == "USAGE"
    assert (await ask(path, "echo"))["schema"] == 1


@pytest.mark.parametrize(("verb", "name"), [("break", "KeyError"), ("time_out", "TimeoutError")])
async def test_a_fault_of_a_verb_is_told_and_the_next_caller_is_answered(path: Path, verb: str, name: str) -> None:
    with pytest.raises(HexcombError, match=name) as caught:
        await ask(path, verb, deadline_s=DEADLINE_S)
    assert caught.value.code == "INTERNAL"
    assert (await ask(path, "echo"))["schema"] == 1


async def test_a_verb_that_takes_too_long_is_unreachable_and_holds_nobody_else(path: Path) -> None:
    waiting = asyncio.create_task(ask(path, "hang", deadline_s=0.3))
    assert (await ask(path, "echo"))["schema"] == 1
    with pytest.raises(UnreachableError, match="did not answer `hang` within"):
        await waiting


async def test_a_caller_that_says_nothing_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "LINE_DEADLINE_S", 0.1)
    assert await raw(path, b"") == b""
    assert await raw(path, b'{"verb": "echo"') == b""


async def test_a_daemon_that_ends_in_mid_answer_is_not_running(home: Path) -> None:
    for words in (b"", b'{"schema": 1, "sa'):

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes = words) -> None:
            await reader.readline()
            writer.write(words)
            writer.close()

        async with await asyncio.start_unix_server(die, home / "d.sock"):
            with pytest.raises(DaemonNotRunningError):
                await ask(home / "d.sock", "echo")


async def test_an_error_of_a_later_release_is_still_an_error(home: Path) -> None:
    error = {"code": "FROM_LATER", "what": "no", "why": "later", "remedy": "Update."}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(json.dumps({"schema": 1, "error": error}).encode() + b"\n")
        writer.close()

    async with await asyncio.start_unix_server(answer, home / "d.sock"):
        with pytest.raises(HexcombError, match=r"because later\. Update") as caught:
            await ask(home / "d.sock", "echo")
    assert not isinstance(caught.value, UsageError)


async def test_servers_that_start_together_leave_the_mask_as_it_was(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        async with contextlib.AsyncExitStack() as stack:
            servers = (answering(tmp_path / str(number), {}) for number in range(8))
            await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
            modes = {stat.S_IMODE((tmp_path / str(number)).stat().st_mode) for number in range(8)}
        assert (os.umask(0o022), modes) == (0o022, {0o600})
    finally:
        os.umask(before)
