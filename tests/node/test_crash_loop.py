"""A rollout node whose engine is killed again and again: real child processes, a coordinator that grants leases."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from node import rollouts, work
from node.compute.messages import ChildEvent
from node.home import Home
from node.orders import Lease, PiecesReceived, SlotWork
from node.restarts import Restarts
from node.settings import NodeSettings
from node.state import NodeState
from node.work import Work
from protocol.child import ChildProcess
from protocol.errors import EngineError, EngineUntrustedError, NoWorkError, WeightsUnfitError
from protocol.ids import Digest, LeaseId, SlotKey, TaskKey, Version
from protocol.run import SamplingContract
from protocol.tasks import prompt_digest
from tests.engine.conftest import build_tiny_model
from tests.node.fakes import RUN_ID, SPEC

PROMPT = (3, 4)
CONTRACT = SamplingContract(1.0, 400, (), 128)
DEADLINE_S = 90.0


class Control:
    """Grants a lease of one long slot whenever it is asked and none is out."""

    rtt_s = 0.0

    def __init__(self) -> None:
        self.granted: list[str] = []
        self.returned: list[tuple[str, bool]] = []

    async def lease_work(self, *, version: Version, root: Digest, num_slots: int) -> Lease:
        if len(self.granted) > len(self.returned):
            raise NoWorkError("one is out")
        name = f"lease {len(self.granted)}"
        self.granted.append(name)
        slot = SlotKey(Version(0), TaskKey("chain_sum", 1, len(self.granted)), 0)
        return Lease(LeaseId(name), (SlotWork(slot, prompt_digest(PROMPT), PROMPT),), 300.0)

    async def return_lease(self, lease_id: LeaseId, *, reason: str, is_fault: bool = False) -> None:
        self.returned.append((lease_id, is_fault))

    async def submit_pieces(self, progress: Any) -> PiecesReceived:
        return PiecesReceived()

    async def submit(self, lease_id: LeaseId, rollouts: Any) -> list[Any]:
        await asyncio.Event().wait()  # no lease ends well here
        return []


class Bench:
    """A node with real children; `children` are those that it started, in order."""

    def __init__(self, home: Home, model: Any) -> None:
        self.home, self.control, self.state = home, Control(), NodeState(role="rollout")
        self.state.spec = replace(SPEC, sampling=CONTRACT, piece_tokens=4, piece_s=0.1)
        self.children: list[ChildProcess] = []
        self.orders: list[Any] = []
        manifest = SimpleNamespace(seal=SimpleNamespace(secret=bytes(32)))

        async def make_ready(version: Version) -> Path:
            return cast(Path, model.files["A"])

        async def make_model_dir(version: Version) -> Path:
            return cast(Path, model.folder)

        versions = SimpleNamespace(
            head=Version(0),
            ready=Version(0),
            held=[Version(0)],
            model_dir=model.folder,
            make_ready=make_ready,
            make_model_dir=make_model_dir,
            root=lambda _: Digest("r"),
            manifest=lambda _: manifest,
            canary=lambda _: (),
        )
        self.node: Any = SimpleNamespace(
            home=home,
            peer_id=home.peer_id,
            run_id=RUN_ID,
            spec=self.state.spec,
            state=self.state,
            control=self.control,
            versions=versions,
            settings=NodeSettings(engine="transformers"),
            session=SimpleNamespace(beat_now=lambda: None, introduce_again=lambda: None),
            start_compute=self.start_compute,
        )

    async def start_compute(self) -> ChildProcess:
        child = await ChildProcess.start(
            "node.compute.worker",
            run_dir=self.home.runtime_folder(),
            log_path=self.home.path / "logs" / "compute.log",
            deadline_s=DEADLINE_S,
            env={"OMP_NUM_THREADS": "1"},
            events=ChildEvent,
        )
        self.children.append(child)
        return child

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.state.wait_changed(self.state.ticks, timeout_s=0.05)

    def is_generating(self, num_children: int) -> bool:
        return len(self.children) == num_children and len(self.control.granted) == num_children


@pytest_asyncio.fixture
async def bench(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async def measure(node: Any, model_dir: Path) -> None: ...

    monkeypatch.setattr(work, "measure", measure)
    yield Bench(Home.create(home), build_tiny_model(tmp_path / "tiny" / "model", tied=True))


@pytest.mark.slow  # four engines are started
@pytest.mark.timeout(400)
async def test_an_engine_killed_three_times_gives_its_work_back_takes_less_and_then_pauses(bench: Bench) -> None:
    restarts = Restarts(max_failures=3, pause_s=2.0, max_wait_s=0.1)
    working = asyncio.create_task(Work(bench.node, restarts).run())
    seats = []
    for number in (1, 2, 3):
        await bench.until(lambda number=number: bench.is_generating(number))
        seats.append(bench.state.num_seats)
        os.kill(bench.children[-1].pid, signal.SIGKILL)
        await bench.until(lambda number=number: bench.state.counts["jobs failed"] == number)
        assert bench.state.num_seats == 0
        assert "signal 9" in bench.state.trouble or "SIGKILL" in bench.state.trouble
    assert seats == [64, 32, 16]
    assert bench.state.activity == "stopped trying: ENGINE 3 times in 10 min, again in 0 min"
    assert bench.control.returned == [(name, True) for name in bench.control.granted]
    assert len(bench.children) == 3
    await bench.until(lambda: bench.is_generating(4))  # after the pause
    assert bench.state.num_seats == 8
    assert bench.state.restraint == 3
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert all(child.is_closed for child in bench.children)


async def test_a_model_with_code_of_its_own_is_refused_at_once_and_the_status_says_so(bench: Bench) -> None:
    config = bench.node.versions.model_dir / "config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoConfig": "evil.Evil"},', 1))
    working = asyncio.create_task(Work(bench.node).run())
    await bench.until(lambda: bench.state.activity.startswith("stopped trying"))
    assert bench.state.activity == "stopped trying: MODEL_REFUSED, again in 15 min"
    assert "trust_remote_code" in bench.state.trouble
    assert bench.control.granted == []
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert len(bench.children) == 1


class Silent:
    """A child whose engine never says anything more; `fates` are the answers to `Load`, in order."""

    is_closed = False

    def __init__(self, *fates: Exception | None) -> None:
        self.fates, self.requests = list(fates), list[Any]()

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        self.requests.append(body)
        match type(body).__name__:
            case "StartRollout":
                return reply("fake")
            case "MakePrompts":
                return reply((PROMPT,) * len(body.tasks))
            case "Generate":
                await asyncio.Event().wait()
            case "Load" if self.fates and (fate := self.fates.pop(0)) is not None:
                raise fate
        return reply()

    async def next_event(self) -> Any:
        await asyncio.Event().wait()

    async def wait_closed(self) -> EngineError:
        await asyncio.Event().wait()
        return EngineError("never")


async def test_an_engine_that_hangs_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "HANG_S", 0.3)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20):
            await rollouts.RolloutWork(bench.node, cast(Any, Silent())).run()
    assert work.first_of(cast(Any, caught.value)).sentence().startswith("the engine hangs")
    assert bench.control.returned == [("lease 0", True)]


async def test_without_pieces_silence_is_no_sign(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same silence where no pieces are asked for."""
    monkeypatch.setattr(rollouts, "HANG_S", 0.3)
    bench.node.spec = replace(bench.node.spec, piece_tokens=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await rollouts.RolloutWork(bench.node, cast(Any, Silent())).run()


@pytest.mark.parametrize(
    ("fates", "error", "num_loads", "num_made_anew"),
    [
        ((WeightsUnfitError("no"), None), None, 2, 1),
        ((WeightsUnfitError("no"), WeightsUnfitError("no")), WeightsUnfitError, 2, 1),
        ((EngineUntrustedError("no"),), EngineUntrustedError, 1, 1),
    ],
)
async def test_a_weight_file_that_does_not_do_is_made_anew(
    bench: Bench, fates: tuple[Exception, ...], error: type[Exception] | None, num_loads: int, num_made_anew: int
) -> None:
    versions, child, forgotten = bench.node.versions, Silent(*fates), list[Version]()
    versions.ready = versions.head = Version(1)
    versions.weights_path = lambda version: Path(f"{version}")
    versions.forget_weights = forgotten.append
    versions.canary = lambda version: (-1.0,) * 28
    rollout = rollouts.RolloutWork(bench.node, cast(Any, child))
    if error:
        with pytest.raises(error):
            await rollout._load(Version(1))
    else:
        await rollout._load(Version(1))
        assert bench.state.loaded == (1, "r")
    assert [request.canary for request in child.requests] == [(-1.0,) * 28] * num_loads
    assert len(forgotten) == num_made_anew
