"""The daemon as its owner meets it: a real one, without a coordinator or with a scripted one, asked on its socket."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from node.daemon import Daemon, run_daemon
from node.home import Home
from node.settings import LimitSettings, NodeSettings
from node.weights.content import body_of
from node.work import Work
from protocol.errors import (
    ChunkMissingError,
    DaemonNotRunningError,
    NotJoinedError,
    UsageError,
    VersionFromFutureError,
    VersionPastError,
)
from protocol.ids import Version
from protocol.local_socket import ask
from protocol.manifest import Manifest, Seal, sign_manifest
from protocol.v1 import control_pb2
from tests.node.fakes import COORDINATOR, RUN_ID, Control, joined_home, serving, welcome
from tests.node.test_versions import make_body, signed

DEADLINE_S = 20.0
QUIET = NodeSettings(name="Fox & Lagoon", directory=False)


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


@contextlib.asynccontextmanager
async def daemon_of(home: Home, *addresses: str, settings: NodeSettings = QUIET) -> AsyncIterator[Daemon]:
    """A daemon that runs in this process until the block ends, and then ends by `stop`."""
    daemon = Daemon(home, joined_home(home, *addresses), settings)
    task = asyncio.create_task(daemon.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await daemon.answers.wait()
        yield daemon
    finally:
        daemon.stop()
        async with asyncio.timeout(DEADLINE_S):
            await task


async def status_when(daemon: Daemon, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first status for which `wanted` holds."""
    node = daemon.node
    async with asyncio.timeout(DEADLINE_S):
        while not wanted(answer := await ask(node.home.socket, "status")):
            await node.state.wait_changed(node.state.ticks, timeout_s=0.05)
    return answer


async def test_status_without_a_coordinator_says_why(node_home: Home) -> None:
    async with daemon_of(node_home, "127.0.0.1:9") as daemon:
        answer = await status_when(daemon, lambda found: found["coordinator"]["trouble"])
        assert answer["schema"] == 1
        assert answer["peer_id"] == node_home.peer_id
        assert answer["coordinator"]["is_up"] is False
        assert answer["activity"] == "waiting for the coordinator"
        assert (answer["role"], answer["version"], answer["head"]) == ("idle", None, None)
    assert not node_home.socket.exists()


async def test_status_with_a_coordinator_and_a_role(node_home: Home) -> None:
    role = control_pb2.RoleAssigned(role="rollout", reason="a test")
    service = Control(script=[welcome(), control_pb2.SessionResponse(role_assigned=role)])
    async with serving(service) as address, daemon_of(node_home, address) as daemon:
        answer = await status_when(daemon, lambda found: found["role"] == "rollout")
        assert (answer["run"], answer["role_reason"]) == ("test", "a test")
        assert answer["coordinator"]["is_up"] is True
        assert answer["activity"] == "WAITING_FOR_BASE"
        assert service.hellos[0].name == "fox---lagoon"
        assert service.hellos[0].endpoint == daemon.node.state.endpoint
        async with asyncio.timeout(DEADLINE_S):
            beat = await service.heartbeats.get()
        assert (beat.version, beat.root) == (-1, "")


async def test_bootstraps_that_appear_later_are_remembered(node_home: Home) -> None:
    greeting = welcome()
    greeting.welcome.dht_bootstraps.append("/ip4/127.0.0.1/tcp/4001")
    async with serving(Control(script=[greeting])) as address, daemon_of(node_home, address) as daemon:
        await status_when(daemon, lambda found: found["coordinator"]["is_up"])
        assert daemon.node.joined.bootstraps == ("/ip4/127.0.0.1/tcp/4001",)


async def test_pause_resume_and_unknown_requests(node_home: Home) -> None:
    async with daemon_of(node_home, "127.0.0.1:9"):
        await ask(node_home.socket, "pause")
        assert (await ask(node_home.socket, "status"))["paused"] == "by its owner"
        await ask(node_home.socket, "resume")
        assert (await ask(node_home.socket, "status"))["paused"] == ""
        assert (await ask(node_home.socket, "peers"))["peers"] == []
        with pytest.raises(UsageError):
            await ask(node_home.socket, "fetch", version="seven")
        with pytest.raises(ChunkMissingError):
            await ask(node_home.socket, "fetch", version=7)


@pytest.mark.parametrize("verb", ["fetch", "export"])
async def test_a_version_past_its_retention_is_called_so(node_home: Home, tmp_path: Path, verb: str) -> None:
    async with daemon_of(node_home, "127.0.0.1:9") as daemon:
        versions, before, parent = daemon.node.versions, None, None
        for number in range(9):
            body = make_body(number, float(number), versions.blobs, parent)
            before, parent = signed(body, before), body.root
            versions.learn(before)
        await versions.retire(keep_from=Version(7), now_s=4e9)
        assert versions.check_held(Version(8))
        with pytest.raises(VersionPastError, match="held now: 8"):
            await ask(node_home.socket, verb, version=3, folder=str(tmp_path / "out"))
        with pytest.raises(VersionFromFutureError, match="heard of is 8"):
            await ask(node_home.socket, verb, version=9, folder=str(tmp_path / "out"))


async def test_down_ends_the_daemon(node_home: Home) -> None:
    async with daemon_of(node_home, "127.0.0.1:9") as daemon:
        await ask(node_home.socket, "down")
        assert daemon._stop.is_set()
    with pytest.raises(DaemonNotRunningError):
        await ask(node_home.socket, "status")


async def test_a_home_that_never_joined_runs_no_daemon(node_home: Home) -> None:
    with pytest.raises(NotJoinedError, match="join-swarm"):
        await run_daemon(node_home, QUIET)


async def test_pause_is_heard_by_the_coordinator_and_seen_in_the_status(node_home: Home) -> None:
    service = Control(script=[welcome()])
    async with serving(service) as address, daemon_of(node_home, address) as daemon:
        await status_when(daemon, lambda found: found["coordinator"]["is_up"])
        await ask(node_home.socket, "pause")
        answer = await status_when(daemon, lambda found: found["activity"] == "paused: by its owner")
        assert answer["paused"] == "by its owner"
        async with asyncio.timeout(DEADLINE_S):
            while (beat := await service.heartbeats.get()).activity != "paused: by its owner":
                assert beat.activity
        assert beat.unwilling == "paused: by its owner"
        await ask(node_home.socket, "resume")
        await status_when(daemon, lambda found: found["activity"] == "WAITING_FOR_BASE")
        async with asyncio.timeout(DEADLINE_S):
            while (await service.heartbeats.get()).unwilling:
                pass


async def test_limits_stand_in_the_status_with_what_is_not_available(node_home: Home) -> None:
    limits = LimitSettings(hours="00:00-00:01, 00:01-00:02", power_cap_w=150, download_mbit_per_s=8)
    settings = NodeSettings(directory=False, limits=limits)
    async with daemon_of(node_home, "127.0.0.1:9", settings=settings) as daemon:
        daemon._owner._now = lambda: datetime(2026, 3, 5, 12)
        answer = await status_when(daemon, lambda found: found["limits"]["not_available"])
        assert answer["limits"]["set"] == {
            "hours": "00:00-00:01, 00:01-00:02",
            "power_cap_w": 150,
            "download_mbit_per_s": 8,
        }
        assert answer["limits"]["not_available"][0].startswith("power_cap_w: ")
        answer = await status_when(daemon, lambda found: "outside" in found["activity"])
        assert answer["activity"] == "paused: outside its hours (00:00-00:01, 00:01-00:02)"
        assert answer["limits"]["reason"] == answer["paused"] == "outside its hours (00:00-00:01, 00:01-00:02)"


async def test_finish_ends_a_daemon_without_work_at_once_and_one_with_work_at_its_deadline(
    node_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(node_home, joined_home(node_home, "127.0.0.1:9"), QUIET)
    monkeypatch.setattr(Work, "has_work", property(lambda _: True))
    task = asyncio.create_task(daemon.run())
    async with asyncio.timeout(DEADLINE_S):
        await daemon.answers.wait()
        with pytest.raises(UsageError, match="not a number"):
            await ask(node_home.socket, "finish", finish_within_s="soon")
        await ask(node_home.socket, "finish", finish_within_s=600)
        answer = await status_when(daemon, lambda found: found["finishing"])
        assert 590 < answer["finish_in_s"] <= 600
        assert answer["has_work"]
        assert not task.done()
        begun_s = time.monotonic()
        await ask(node_home.socket, "finish", finish_within_s=0.2)
        await task
        assert time.monotonic() - begun_s >= 0.15
        assert not daemon.was_interrupted, "so that its exit code is 0"
    monkeypatch.undo()
    daemon = Daemon(node_home, joined_home(node_home, "127.0.0.1:9"), QUIET)
    task = asyncio.create_task(daemon.run())
    async with asyncio.timeout(DEADLINE_S):
        await daemon.answers.wait()
        await ask(node_home.socket, "finish")
        await task


async def test_export_writes_a_held_version_and_says_why_it_cannot(node_home: Home, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    weights = {"w": np.arange(700, dtype=np.float32)}
    async with daemon_of(node_home, "127.0.0.1:9") as daemon:
        versions = daemon.node.versions
        body = body_of(weights, versions.blobs, model_dir=tmp_path / "model", run_id=RUN_ID, chunk_bytes=1024)
        versions.learn(sign_manifest(COORDINATOR, Manifest(body, Seal(bytes(32), None, 1))))
        assert versions.check_held(Version(0))
        out = tmp_path / "out"
        answer = await ask(node_home.socket, "export", version=0, folder=str(out))
        assert (answer["root"], answer["num_bytes"], answer["folder"]) == (body.root, 2800, str(out))
        assert load_file(out / "model.safetensors")["w"].tolist() == weights["w"].tolist()
        assert (out / "config.json").read_text() == "{}"
        with pytest.raises(UsageError, match="not an empty folder"):
            await ask(node_home.socket, "export", version=0, folder=str(out))
        with pytest.raises(UsageError, match="not an absolute path"):
            await ask(node_home.socket, "export", version=0, folder="out2")
        with pytest.raises(UsageError, match="not a version"):
            await ask(node_home.socket, "export", version=-1, folder=str(tmp_path / "out3"))
        with pytest.raises(VersionFromFutureError):
            await ask(node_home.socket, "export", version=7, folder=str(tmp_path / "out4"))
