"""The rollout role as a whole, between a child and a coordinator that do what a test tells them to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.compute.messages import (
    Done,
    EngineRate,
    Generate,
    MakePrompts,
    Prompts,
    SlotAdvanced,
    SlotFilled,
    Started,
    StartRollout,
    StopSlots,
)
from node.home import Home
from node.orders import Lease, PiecesReceived, Receipt, SlotWork
from node.pieces import SlotProgress
from node.rollouts import RolloutWork
from node.settings import NodeSettings
from node.state import NodeState
from protocol.errors import EngineError, NoWorkError
from protocol.ids import Digest, LeaseId, SlotKey, TaskKey, Version
from protocol.rollout import Rollout
from protocol.tasks import prompt_digest
from tests.node.fakes import RUN_ID, SPEC, until

PROMPT = (3, 4)
RATES = (EngineRate("transformers", 7.0), EngineRate("vllm", 5.0))


def slot(index: int) -> SlotKey:
    return SlotKey(Version(2), TaskKey("chain_sum", 1, index), 0)


class Child:
    """Its engine works until `say` has finished every slot of a lease."""

    is_closed = False

    def __init__(self) -> None:
        self.events: asyncio.Queue[SlotAdvanced | SlotFilled] = asyncio.Queue()
        self.generating: dict[str, set[str]] = {}
        self.requests: list[Any] = []
        self.ended = asyncio.Event()
        self._news = asyncio.Event()

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        self.requests.append(body)
        match body:
            case MakePrompts(tasks):
                return Prompts((PROMPT,) * len(tasks))
            case StopSlots(lease_id, slots):
                for name in slots:
                    await self.say(SlotFilled(lease_id, name, (), (), (), "abort"))
            case Generate(lease_id, orders):
                self.generating[lease_id] = {order.slot for order in orders}
                while self.generating[lease_id]:
                    self._news.clear()
                    await self._news.wait()
        return Started("fake", choice="why", rates=RATES) if reply is Started else Done()

    async def say(self, event: SlotAdvanced | SlotFilled) -> None:
        if isinstance(event, SlotFilled):
            self.generating[event.lease_id].discard(event.slot)
        await self.events.put(event)
        self._news.set()

    async def finish(self, lease_id: str, key: SlotKey) -> None:
        await self.say(SlotFilled(lease_id, str(key), (2, 1), (-0.5, -0.5), ((2, 2),), "stop"))

    async def next_event(self) -> Any:
        return await self.events.get()

    async def wait_closed(self) -> EngineError:
        await self.ended.wait()
        return EngineError("the child ended")


class Control:
    """Grants `leases` in order, then has no work."""

    rtt_s = 0.0

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.received: list[SlotProgress] = []
        self.answer = PiecesReceived()
        self.taken: list[Rollout] = []
        self.returned: list[tuple[str, bool]] = []
        self.num_asking = self.most_asking = 0
        self.may_grant = asyncio.Event()
        self.may_grant.set()

    async def lease_work(self, *, version: Version, root: Digest, num_slots: int) -> Lease:
        self.num_asking += 1
        self.most_asking = max(self.most_asking, self.num_asking)
        await self.may_grant.wait()
        self.num_asking -= 1
        if not self.leases:
            raise NoWorkError("none")
        return self.leases.pop(0)

    async def submit(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        self.taken += rollouts
        return [Receipt(rollout.slot, "ACCEPTED", "") for rollout in rollouts]

    async def submit_pieces(self, progress: Sequence[SlotProgress]) -> PiecesReceived:
        self.received += progress
        return self.answer

    async def return_lease(self, lease_id: LeaseId, *, reason: str, is_fault: bool = False) -> None:
        self.returned.append((lease_id, is_fault))


class Bench:
    """A rollout node whose engine is on version 2."""

    def __init__(self, home: Home) -> None:
        self.child, self.control, self.state = Child(), Control(), NodeState()
        (home.path / "model").mkdir(exist_ok=True)
        (home.path / "model" / "config.json").write_text("{}")
        manifest = SimpleNamespace(seal=SimpleNamespace(secret=bytes(32)))

        async def make_ready(version: Version) -> Path:
            return Path("weights")

        versions = SimpleNamespace(
            head=Version(2),
            ready=Version(2),
            model_dir=home.path / "model",
            make_ready=make_ready,
            root=lambda _: Digest("r"),
            manifest=lambda _: manifest,
            canary=lambda _: (),
        )
        node = SimpleNamespace(
            home=home,
            peer_id=home.peer_id,
            run_id=RUN_ID,
            spec=SPEC,
            state=self.state,
            control=self.control,
            versions=versions,
            settings=NodeSettings(),
            session=SimpleNamespace(beat_now=lambda: None),
        )
        self.work = RolloutWork(cast(Any, node), cast(Any, self.child))

    def lease(self, name: str, *indices: int, remaining_s: float = 30.0) -> None:
        works = tuple(SlotWork(slot(index), prompt_digest(PROMPT), ()) for index in indices)
        self.control.leases.append(Lease(LeaseId(name), works, remaining_s))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.work.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench(home: Path) -> Bench:
    return Bench(Home.create(home))


async def test_rates_of_engines_are_shown_and_handed_to_the_next_start(bench: Bench) -> None:
    for _ in range(2):
        async with bench.running():
            await until(lambda: bench.state.engine == "fake")
        assert (bench.state.engine_choice, bench.state.engine_rates) == ("why", RATES)
        bench.state.drop_job()
    first, second = (order for order in bench.child.requests if isinstance(order, StartRollout))
    assert (first.is_first, first.rates) == (True, ())
    assert (second.is_first, second.rates) == (False, RATES)


async def test_leases_are_asked_for_beside_each_other(bench: Bench) -> None:
    bench.lease("a", 1)
    bench.lease("b", 2)
    bench.control.may_grant.clear()
    async with bench.running():
        await until(lambda: bench.control.num_asking == 2)
        bench.control.may_grant.set()
        await until(lambda: len(bench.child.generating) == 2)
    assert bench.control.most_asking == 2
    assert sorted(bench.control.returned) == [("a", False), ("b", False)]  # the role ended


async def test_pieces_of_two_leases_reach_the_coordinator_whose_answer_is_obeyed(bench: Bench) -> None:
    bench.lease("a", 1, 2)
    bench.lease("b", 3, remaining_s=0.01)
    bench.control.answer = PiecesReceived(unwanted=(slot(1),), remaining_s=((LeaseId("b"), 25.0),))
    async with bench.running():
        await until(lambda: len(bench.child.generating) == 2)
        for name, index in (("a", 1), ("b", 3)):
            await bench.child.say(SlotAdvanced(name, str(slot(index)), 0, (2, 3), (-0.5, -0.5), 2))
        await until(lambda: bool(bench.child.generating["a"]) and str(slot(1)) not in bench.child.generating["a"])
        assert StopSlots("a", (str(slot(1)),)) in bench.child.requests
        work = bench.work._leases[LeaseId("b")]
        await until(lambda: bool(work._limit and (work._limit.when() or 0) > asyncio.get_running_loop().time() + 10))
        await bench.child.finish("a", slot(2))
        await bench.child.finish("b", slot(3))
        await until(lambda: len(bench.control.taken) == 2)
        await until(lambda: bench.work.num_leases == 0)
    assert {(item.lease_id, item.slot) for item in bench.control.received} == {("a", slot(1)), ("b", slot(3))}
    assert bench.control.returned == []
    assert bench.state.counts["slots/stopped"] == 1


async def test_single_slots_are_cancelled_and_whole_leases(bench: Bench) -> None:
    bench.lease("a", 1, 2)
    bench.lease("b", 3)
    async with bench.running():
        await until(lambda: len(bench.child.generating) == 2)
        bench.work.cancel((LeaseId("b"),), (slot(2),))
        await until(lambda: bench.work.num_leases == 1)
        await bench.child.finish("a", slot(1))
        await until(lambda: bench.work.num_leases == 0)
    assert [rollout.slot for rollout in bench.control.taken] == [slot(1)]
    assert bench.control.returned == []


async def test_what_the_engine_takes_for_a_lease_is_measured(bench: Bench) -> None:
    bench.lease("a", 1)
    async with bench.running():
        await until(lambda: "a" in bench.child.generating)
        assert bench.work._service_s is None
        await bench.child.finish("a", slot(1))
        await until(lambda: bench.work._service_s is not None)
    assert bench.work._ask_s > 0


async def test_a_child_that_ends_gives_its_leases_back_as_a_fault(bench: Bench) -> None:
    bench.lease("a", 1)
    async with bench.running() as task:
        await until(lambda: "a" in bench.child.generating)
        bench.child.is_closed = True
        bench.child.ended.set()
        with pytest.raises(ExceptionGroup):
            async with asyncio.timeout(10):
                await task
    assert bench.control.returned == [("a", True)]
