"""A coordinator with a crowd in its own process, and what that costs: `python -m tests.bench.crowded FOLDER`.

Core, authority, journal, piece store, grading child and status page are the product's own, as are the connections of
the other process that `scale` starts. One simulated node trains, so that versions come and go. Writes
FOLDER/coordinator.json when connections may come; prints `measuring` when the window begins, and `Measured` as JSON.
"""

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from coordinator import server
from coordinator.batches import share_messages
from coordinator.control_service import ControlService
from coordinator.core.events import Capability, CapabilityLearned, NodeSeen, Presence, VersionAttested
from coordinator.grader import Grader
from coordinator.home import CoordinatorHome
from coordinator.office import Office
from coordinator.settings import parse_run_file
from protocol.ids import Digest, RoundId, RunId, Version
from protocol.manifest import Body, digest_of
from protocol.run import EnvironmentSpec
from tests.bench.crowd import (
    HEARTBEAT_S,
    LEASES_A_NODE,
    MAX_PIECES,
    PIECE_S,
    PIECE_TOKENS,
    Crowd,
    EmptyDesk,
    Node,
    RealDesk,
)
from tests.bench.served import announce, enrol, identity_of, run_content
from tests.coordinator.office import LonelyCoordinator, write_base

NUM_NODES, NUM_CONNECTIONS = 10_000, 500
NUM_WARM_LEASES, NUM_LEASES = 150_000, 100_000
MIN_WINDOW_S, MAX_WINDOW_S = 30.0, 1500.0
START_DEADLINE_S = 300.0
REHEARSAL_S = 10.0
BATCH = {"groups": 1500, "group_size": 8, "max_lag": 10, "max_concurrent_groups": 32_768}
LEASE_S = 240.0
SAMPLE_S = 0.1
STARTED_S = time.monotonic()
NEW = Presence(Version(-1), Digest(""), (), "", "", "joining", 0.0, "")


@dataclass(frozen=True, slots=True)
class Measured:
    """What happened in the window. CPU is that of this process, the crowd's own work included; `crowd_share` is that
    work in cores, as the rehearsal had it; lateness is how long the event loop kept a timer waiting; `yardsticks_s` are
    of before and after."""

    seconds: float
    cpu_s: float
    crowd_share: float
    growth_mb: float
    rss_mb: float
    num_open: float
    num_leases: int
    num_pieces: int
    num_beats: int
    num_accepted: int
    bad: dict[str, int]
    num_late: int
    num_versions: int
    lateness_p99_s: float
    heartbeats_planned: float
    pieces_planned: float
    yardsticks_s: tuple[float, float]


class Town(LonelyCoordinator):
    """A coordinator that lets its services be seen."""

    service: ControlService

    async def run(self, grader: Grader, stop: asyncio.Event) -> None:
        def keep(*arguments: Any) -> ControlService:
            self.service = ControlService(*arguments)
            return self.service

        server.ControlService = keep  # type: ignore[misc, assignment]
        await super().run(grader, stop)

    @property
    def office(self) -> Office:
        return self.service._office


def new_nodes(numbers: range) -> list[Node]:
    """Nodes that have no work yet."""
    return [Node(identity_of(number), NEW) for number in numbers]


def yardstick_s() -> float:
    """What this machine takes for a loop of Python that is always the same: two runs whose yardsticks differ cannot
    be compared in cores."""
    began_s, total = time.process_time(), 0
    for number in range(2_000_000):
        total += number * number % 7
    return time.process_time() - began_s


async def rehearse(numbers: range) -> float:
    """What the nodes alone cost, in cores."""
    crowd = Crowd(new_nodes(numbers), EmptyDesk(), RunId("ab" * 16))
    running = asyncio.create_task(crowd.run())
    await asyncio.sleep(PIECE_S + 1.0)  # all have work by then
    cpu_s, began_s = time.process_time(), time.monotonic()
    await asyncio.sleep(REHEARSAL_S)
    share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    running.cancel()
    return share


async def train(town: Town, crowd: Crowd) -> None:
    """One node that trains: it fetches each batch, and says at once that it made the next version."""
    authority, peer_id = town.authority, identity_of(0).peer_id
    body: Body | None = None
    while True:
        state = authority.core.state
        assert state.head is not None
        crowd.head = head = (state.head.version, state.head.root)
        await authority.submit(NodeSeen(peer_id, Presence(*head, (head[0],), "", "127.0.0.1:1", "training", 0.0, "")))
        if state.round is not None:
            round_id = RoundId(state.round.round_id)
            async for message in share_messages(authority, town.office.grader, round_id, peer_id):
                message.SerializeToString()
            body = next_body(state.head_body, parent=head[1])
            await authority.submit(VersionAttested(peer_id, round_id, body, {"loss": 1.0}))
        await asyncio.sleep(0.5)


def next_body(before: Body | None, *, parent: Digest) -> Body:
    """A body that follows another."""
    assert before is not None
    version = Version(before.version + 1)
    fields = {name: getattr(before, name) for name in Body.__slots__}
    changes = {
        "version": version,
        "parent": parent,
        "chunks": (digest_of(b"%d" % version),),
        "optimizer": digest_of(b"o"),
    }
    return Body(**{**fields, **changes})


async def settle_in(town: Town, nodes: list[Node]) -> None:
    """All nodes say hello and what they can do; returns when the last has its role."""
    submit, state = town.authority.submit, town.authority.core.state
    peers = [identity_of(0).peer_id, *(node.identity.peer_id for node in nodes)]
    for number, peer_id in enumerate(peers):
        await submit(NodeSeen(peer_id, NEW))
        able = Capability(0.0 if number == 0 else 40.0, 100.0 if number == 0 else 0.0, 1 << 30, "cpu")
        await submit(CapabilityLearned(peer_id, able))
    async with asyncio.timeout(START_DEADLINE_S):
        while not all(peer_id in state.roles for peer_id in peers):  # noqa: ASYNC110 - the core tells nobody
            await asyncio.sleep(SAMPLE_S)


async def granted(town: Town, crowd: Crowd, number: int, *, lateness_s: list[float], opened: list[int]) -> None:
    """Waits until so many leases were granted, and looks at the loop and the book meanwhile."""
    claims = town.authority.core.state.claims
    async with asyncio.timeout(MAX_WINDOW_S):
        while claims["granted"] < number:
            due_s = time.monotonic() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            lateness_s.append(time.monotonic() - due_s)
            opened.append(claims["open"])
            if len(opened) % 100 == 0:
                tally, version = town.authority.core.state.tally, town.authority.core.state.versions[-1].version
                tell(
                    f"{claims['granted']} granted, {claims['open']} open, {crowd.tally.num_pieces} pieces, "
                    f"{tally['accepted']} accepted, {tally['scored']} scored, version {version}, "
                    f"{lateness_s[-1]:.2f} s late"
                )


async def measure(town: Town, crowd: Crowd, *, crowd_share: float, yardstick_before_s: float) -> Measured:
    """The window."""
    process, claims = psutil.Process(), town.authority.core.state.claims
    await granted(town, crowd, NUM_NODES * LEASES_A_NODE + NUM_WARM_LEASES, lateness_s=[], opened=[])
    tell(f"{claims['open']} leases are open")
    gc.collect()
    lateness_s, opened = list[float](), list[int]()
    crowd.tally = tally = type(crowd.tally)()
    rss, head = process.memory_info().rss, crowd.head[0]
    print("measuring", flush=True)
    cpu_s, began_s, before = time.process_time(), time.monotonic(), claims["granted"]
    await granted(town, crowd, before + NUM_LEASES, lateness_s=lateness_s, opened=opened)
    await asyncio.sleep(max(0.0, MIN_WINDOW_S - (time.monotonic() - began_s)))
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    gc.collect()
    end = process.memory_info().rss
    return Measured(
        seconds=seconds,
        cpu_s=cpu_s,
        crowd_share=crowd_share,
        growth_mb=(end - rss) / 1e6,
        rss_mb=end / 1e6,
        num_open=sum(opened) / len(opened),
        num_leases=claims["granted"] - before,
        num_pieces=tally.num_pieces,
        num_beats=tally.num_beats,
        num_accepted=tally.num_accepted,
        bad=dict(tally.bad),
        num_late=tally.num_late,
        num_versions=crowd.head[0] - head,
        lateness_p99_s=sorted(lateness_s)[int(0.99 * len(lateness_s))],
        heartbeats_planned=seconds * NUM_NODES / HEARTBEAT_S,
        pieces_planned=seconds * NUM_NODES * LEASES_A_NODE / PIECE_S,
        yardsticks_s=(yardstick_before_s, yardstick_s()),
    )


def tell(what: str) -> None:
    """For whoever watches."""
    print(f"{time.monotonic() - STARTED_S:.0f} s: {what}", file=sys.stderr, flush=True)


async def run(folder: Path) -> None:
    """The coordinator, the crowd, the window."""
    numbers = range(NUM_CONNECTIONS + 1, NUM_CONNECTIONS + 1 + NUM_NODES)
    before_s, crowd_share = yardstick_s(), await rehearse(numbers)
    gc.collect()
    server.raise_file_limit()
    server.tune_interpreter()
    base, home, stop = write_base(folder / "base"), CoordinatorHome.ensure(folder / "home"), asyncio.Event()
    content = run_content(base, group_size=8, heartbeat_s=HEARTBEAT_S)
    content |= {"batch": BATCH, "sampling": {"max_new_tokens": PIECE_TOKENS * MAX_PIECES}}
    content["limits"] |= {"lease_s": LEASE_S, "piece_s": PIECE_S, "piece_tokens": PIECE_TOKENS}
    town = Town(home, parse_run_file(content))
    grader = Grader(
        EnvironmentSpec("flat"),
        model_dir=base,
        run_dir=home.runtime_folder,
        log_path=folder / "grader.log",
        worker="tests.bench.flat_grader",
    )
    async with grader, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(town.run(grader, stop))
        while town.ready and not running.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        leaves = await enrol(town, home, NUM_CONNECTIONS + NUM_NODES, num_leaves=NUM_CONNECTIONS + 1)
        tell("all are enrolled")
        nodes = new_nodes(numbers)
        await settle_in(town, nodes)
        crowd = Crowd(nodes, RealDesk(town.service), home.run_id)
        others = [tasks.create_task(train(town, crowd))]
        tell("all have their roles")
        await asyncio.sleep(1.0)
        head = crowd.head
        announce(folder / "coordinator.json", town.addresses, home, leaves, head[0], head[1])
        others.append(tasks.create_task(crowd.run()))
        measured = await measure(town, crowd, crowd_share=crowd_share, yardstick_before_s=before_s)
        print(json.dumps(asdict(measured)), flush=True)
        for task in others:
            task.cancel()
        stop.set()


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1])))
