"""Three real DHT nodes on loopback, each in its own child, and an attacker among them.

Every forgery is a negative control twice over: the attacker speaks the protocol well enough to get an honest
record stored, and what it forges must neither be stored, nor read, nor keep an owner from writing.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from protocol.child import ChildProcess
from protocol.directory.client import Directory
from protocol.directory.layout import NUM_BUCKETS, bucket_key, bucket_of, expiration_s
from protocol.errors import EngineError, RecordRefusedError, UsageError
from protocol.ids import PeerId, Version
from protocol.keys import Identity
from protocol.record import OpenedRecord
from tests.child.processes import is_gone
from tests.directory.attacker import Answered, Join, Store
from tests.directory.swarm import COORDINATOR, RUN_ID, STRANGER, now_ms, record_of, signed, stamp_of, start_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 20.0
IDENTITIES = [Identity.from_seed(bytes([n]) * 32) for n in (11, 12, 13)]
MALLORY = Identity.from_seed(b"m" * 32)
pack = msgspec.msgpack.encode


@dataclass
class Swarm:
    nodes: list[Directory]
    attacker: ChildProcess
    folder: Path

    async def attack(self, request: Store) -> Answered:
        return await self.attacker.request(request, Answered, deadline_s=WAIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder = tmp_path_factory.mktemp("dht")

    async def start(name: str, identity: Identity, *bootstraps: str) -> Directory:
        return await Directory.start(start_of(identity, folder / name, *bootstraps), log_path=folder / f"{name}.log")

    async def start_attacker(bootstrap: str) -> ChildProcess:
        plan = start_of(MALLORY, folder / "m")
        child = await ChildProcess.start(
            "tests.directory.attacker",
            run_dir=Path(plan.run_dir),
            log_path=folder / "m.log",
            deadline_s=WAIT_S,
            env={"OMP_NUM_THREADS": "1"},
        )
        await child.request(Join(plan.identity_path, plan.run_dir, bootstrap), Answered, deadline_s=60)
        return child

    first = await start("a", IDENTITIES[0])
    bootstrap = first.multiaddrs[0]
    async with asyncio.TaskGroup() as tasks:
        second = tasks.create_task(start("b", IDENTITIES[1], bootstrap))
        third = tasks.create_task(start("c", IDENTITIES[2], bootstrap))
        mallory = tasks.create_task(start_attacker(bootstrap))
    nodes = [first, second.result(), third.result()]
    yield Swarm(nodes, mallory.result(), folder)
    async with asyncio.TaskGroup() as stops:
        for child in [*nodes, mallory.result()]:
            stops.create_task(child.terminate())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(base_swarm: Swarm) -> AsyncIterator[Swarm]:
    for node, identity in zip(base_swarm.nodes, IDENTITIES, strict=True):
        await node.publish(signed(identity, versions=(3, 4))[0])
    yield base_swarm


def peers_in(records: Sequence[OpenedRecord]) -> set[PeerId]:
    return {opened.record.peer_id for opened in records}


async def until(
    reader: Directory, holds: Callable[[Sequence[OpenedRecord]], bool], *, deadline_s: float = WAIT_S
) -> Sequence[OpenedRecord]:
    """Reads again and again until it holds; at the deadline the last reading fails the test."""
    end_s = time.monotonic() + deadline_s
    while True:
        records = await reader.list_records()
        if holds(records):
            return records
        assert time.monotonic() < end_s, records


def p2pd_of(pid: int) -> int:
    """The process id of the child's network daemon."""
    (daemon,) = [process for process in psutil.Process(pid).children() if process.name() == "p2pd"]
    return daemon.pid


ALL = {identity.peer_id for identity in IDENTITIES}


async def test_every_node_lists_every_node(swarm: Swarm) -> None:
    assert [node.peer_id for node in swarm.nodes] == [identity.peer_id for identity in IDENTITIES]
    for node in swarm.nodes:
        records = await until(node, lambda records: peers_in(records) == ALL)
        assert {record.record.decode_tokens_per_s for record in records} == {12.5}
        assert {record.membership.role for record in records} == {"auto"}
    status = await swarm.nodes[0].status()
    assert status.num_neighbours == 3
    assert status.multiaddrs[0].endswith(f"/p2p/{IDENTITIES[0].peer_id}")


async def test_holders_of_a_version_are_found(swarm: Swarm) -> None:
    await swarm.nodes[1].publish(signed(IDENTITIES[1], versions=(4, 5))[0])
    newer = IDENTITIES[1].peer_id
    await until(
        swarm.nodes[2], lambda records: {r.record.peer_id for r in records if 5 in r.record.versions} == {newer}
    )
    assert peers_in(await swarm.nodes[2].find_holders(Version(5))) == {newer}
    assert peers_in(await swarm.nodes[2].find_holders(Version(4))) == ALL
    assert await swarm.nodes[2].find_holders(Version(6)) == ()


async def test_a_record_that_nobody_would_take_is_refused_at_home(swarm: Swarm) -> None:
    good, _ = signed(IDENTITIES[0])
    for raw in (good[:-1], signed(IDENTITIES[1])[0], signed(IDENTITIES[0], stamp=b"")[0]):
        with pytest.raises(RecordRefusedError):
            await swarm.nodes[0].publish(raw)


def forgeries() -> dict[str, Store]:
    """What an attacker asks others to store in the place of the first node's record."""
    victim = IDENTITIES[0]
    raw, record = signed(victim)
    key, until_s = bucket_key(RUN_ID, bucket_of(victim.peer_id)), expiration_s(record.expires_ms)
    subkey = pack(victim.peer_id)
    mine, my_record = signed(MALLORY)
    unstamped, unstamped_record = signed(STRANGER, stamp=stamp_of(STRANGER, at_ms=now_ms(), by=STRANGER))
    decade_s = until_s + 10 * 365.25 * 86400
    long_body = pack(record_of(victim, at_ms=now_ms(), lifetime_ms=int(10 * 365.25 * 86_400_000)))
    return {
        "bad signature": Store(key, subkey, pack(bytes(64) + raw[64:]), until_s),
        "own record under another's sub-key": Store(key, subkey, pack(mine), expiration_s(my_record.expires_ms)),
        "too large": Store(key, subkey, pack(raw + bytes(1024)), until_s),
        "for ever": Store(key, subkey, pack(raw), math.inf),
        "not a number": Store(key, subkey, pack(raw), math.nan),
        "ten years": Store(key, subkey, pack(raw), decade_s),
        "ten years, signed": Store(key, subkey, pack(bytes(64) + long_body), decade_s),
        "prolonged": Store(key, subkey, pack(raw), until_s + 100),
        "plain value": Store(key, pack(None), pack(raw), until_s + 100),
        "plain value for ever": Store(key, pack(None), pack(b"zap"), math.inf),
        "plain value in the cache": Store(key, pack(None), pack(b"zap"), math.inf, in_cache=True),
        "dictionary that is none": Store(key, b"", pack({"a": 1}), until_s),
        "stranger": Store(
            bucket_key(RUN_ID, bucket_of(STRANGER.peer_id)),
            pack(STRANGER.peer_id),
            pack(unstamped),
            expiration_s(unstamped_record.expires_ms),
        ),
        "wrong bucket": Store(
            bucket_key(RUN_ID, (bucket_of(MALLORY.peer_id) + 1) % NUM_BUCKETS),
            pack(MALLORY.peer_id),
            pack(mine),
            expiration_s(my_record.expires_ms),
        ),
        "a key of its own": Store("anything", pack(MALLORY.peer_id), pack(mine), expiration_s(my_record.expires_ms)),
    }


async def test_the_attacker_is_able_to_store_what_is_true(swarm: Swarm) -> None:
    """Without this the refusals below would prove nothing."""
    raw, record = signed(MALLORY, lifetime_ms=2_000)
    key = bucket_key(RUN_ID, bucket_of(MALLORY.peer_id))
    answer = await swarm.attack(Store(key, pack(MALLORY.peer_id), pack(raw), expiration_s(record.expires_ms)))
    assert answer == Answered(3, 0)
    await until(swarm.nodes[0], lambda records: peers_in(records) == ALL | {MALLORY.peer_id})
    await until(swarm.nodes[0], lambda records: peers_in(records) == ALL)


@pytest.mark.parametrize("name", forgeries().keys())
async def test_a_forgery_is_neither_stored_nor_read_nor_in_the_way(swarm: Swarm, name: str) -> None:
    try:
        assert (await swarm.attack(forgeries()[name])).num_taken == 0
    except EngineError:  # the stores answered with an error
        assert name == "dictionary that is none"
    raw, record = signed(IDENTITIES[0], versions=(7,))
    await swarm.nodes[0].publish(raw)
    for reader in swarm.nodes:
        records = await until(reader, lambda records: record in [opened.record for opened in records])
        assert peers_in(records) == ALL


async def test_replaying_an_old_record_does_not_remove_the_new(swarm: Swarm) -> None:
    victim = IDENTITIES[0]
    key, subkey = bucket_key(RUN_ID, bucket_of(victim.peer_id)), pack(victim.peer_id)
    new, record = signed(victim, versions=(8,))
    await swarm.nodes[0].publish(new)
    old, old_record = signed(victim, lifetime_ms=1_000)
    answer = await swarm.attack(Store(key, subkey, pack(old), expiration_s(old_record.expires_ms)))
    assert answer.num_taken == 0
    # The marker outlives the replayed record: once it is gone, the replayed one has run out everywhere.
    marker, marker_record = signed(MALLORY, lifetime_ms=1_500)
    marker_key = bucket_key(RUN_ID, bucket_of(MALLORY.peer_id))
    await swarm.attack(Store(marker_key, pack(MALLORY.peer_id), pack(marker), expiration_s(marker_record.expires_ms)))
    for reader in swarm.nodes:
        records = await until(reader, lambda records: MALLORY.peer_id not in peers_in(records))
        assert record in [opened.record for opened in records]


async def test_records_follow_the_corrected_clock(swarm: Swarm) -> None:
    hour_ms = 3_600_000
    here, there = swarm.nodes[1], now_ms() + hour_ms
    await here.set_clock_offset(hour_ms)
    with pytest.raises(RecordRefusedError):
        await here.publish(signed(IDENTITIES[1])[0])
    assert await here.list_records() == ()
    await here.publish(signed(IDENTITIES[1], at_ms=there)[0])
    assert peers_in(await here.list_records()) == {IDENTITIES[1].peer_id}
    await here.set_clock_offset(0)
    with pytest.raises(RecordRefusedError):
        await here.publish(signed(IDENTITIES[1], at_ms=there)[0])


async def test_bootstraps_that_are_none_and_bootstraps_that_are_away(swarm: Swarm) -> None:
    with pytest.raises(UsageError, match="not the address of a bootstrap"):
        await swarm.nodes[1].set_bootstraps(["/ip4/127.0.0.1/tcp/1"])
    await swarm.nodes[1].set_bootstraps([f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER.peer_id}"])
    await swarm.nodes[1].set_bootstraps([*swarm.nodes[0].multiaddrs, *swarm.nodes[1].multiaddrs])


async def test_a_bootstrap_of_its_own_serves_until_stdin_closes(swarm: Swarm) -> None:
    plan = start_of(STRANGER, swarm.folder / "standalone")
    bootstrap = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node.directory.worker", "--standalone", "--run-id", RUN_ID),
        *("--coordinator-key", COORDINATOR.public_bytes.hex(), "--identity", plan.identity_path),
        *("--bootstrap", swarm.nodes[0].multiaddrs[0]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert bootstrap.stdin is not None
    assert bootstrap.stdout is not None
    try:
        async with asyncio.timeout(60):
            said = json.loads(await bootstrap.stdout.readline())
        assert said["peer_id"] == STRANGER.peer_id
        assert said["multiaddrs"][0].endswith(STRANGER.peer_id)
        daemon = p2pd_of(bootstrap.pid)
        await swarm.nodes[1].set_bootstraps(said["multiaddrs"])
        assert (await swarm.nodes[1].status()).num_neighbours >= 3
        bootstrap.stdin.close()
        async with asyncio.timeout(WAIT_S):
            assert await bootstrap.wait() == 0
        assert is_gone(daemon)
    finally:
        with contextlib.suppress(ProcessLookupError):
            bootstrap.kill()
        await bootstrap.wait()


async def test_a_killed_daemon_leaves_no_process_and_its_record_expires(swarm: Swarm) -> None:
    seed, survivor = b"l" * 32, swarm.nodes[1]
    lonely = Identity.from_seed(seed).peer_id
    plan = start_of(Identity.from_seed(seed), swarm.folder / "lonely", swarm.nodes[0].multiaddrs[0])
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.directory.lonely_parent", msgspec.json.encode(plan).decode(), seed.hex()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        pid, expires_ms = (int(word) for word in (await parent.stdout.readline()).split())
    daemon = p2pd_of(pid)
    await until(survivor, lambda records: lonely in peers_in(records))
    parent.kill()
    await parent.wait()
    gone = [is_gone(pid, deadline_s=5), is_gone(daemon, deadline_s=5)]
    for process in (pid, daemon):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert gone == [True, True]
    assert lonely in peers_in(await survivor.list_records())
    await until(survivor, lambda records: lonely not in peers_in(records))
    assert expires_ms <= now_ms() < expires_ms + 5_000


async def test_a_killed_child_takes_its_p2pd_along_and_leaves_its_record(swarm: Swarm) -> None:
    dead, survivor = swarm.nodes[2], swarm.nodes[0]
    raw, record = signed(IDENTITIES[2])
    await dead.publish(raw)
    daemon = p2pd_of(dead.pid)
    os.kill(dead.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert "SIGKILL" in (await dead.wait_closed()).why
    assert is_gone(daemon)
    with pytest.raises(EngineError, match="SIGKILL"):
        await dead.list_records()
    assert record in [opened.record for opened in await survivor.list_records()]
