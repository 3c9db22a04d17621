"""One lease: only slots whose prompt holds are generated, what finishes is signed and handed in, the rest goes back."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.compute.messages import Done, Generate, MakePrompts, Prompts, SlotFilled
from node.home import Home
from node.leases import LeaseWork
from node.orders import Lease, Receipt, SlotWork
from node.state import NodeState
from protocol.errors import EngineError, HexcombError, LeaseUnknownError, UnreachableError, UsageError
from protocol.ids import LeaseId, SlotKey, TaskKey, Version
from protocol.rollout import Rollout, check_rollout, verify_pieces
from protocol.seeds import slot_seed
from protocol.tasks import prompt_digest
from tests.node.fakes import RUN_ID, SPEC

SECRET = bytes(32)
PROMPTS = {7: (3, 4, 5), 8: (6,)}


def slot(index: int, sample: int = 0) -> SlotKey:
    return SlotKey(Version(2), TaskKey("chain_sum", 1, index), sample)


def work(index: int, sample: int = 0, *, given: tuple[int, ...] = (), digest: str | None = None) -> SlotWork:
    right = prompt_digest(PROMPTS[index])
    return SlotWork(slot(index, sample), cast(Any, digest or right), given)


class Child:
    """Generates at once: token 2 and then the stop id, the first under v1, the second under v2."""

    def __init__(self, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        self.made, self.is_closed, self.generated = made, False, list[Generate]()
        self.finish_reason, self.failure = "stop", cast("HexcombError | None", None)
        self.deliver: Callable[[SlotFilled], None] = lambda _: None

    async def request(self, body: Any, reply: Any, *, deadline_s: float) -> Any:
        if isinstance(body, MakePrompts):
            if isinstance(self.made, HexcombError):
                raise self.made
            return Prompts(tuple(self.made[index] for _, _, index in body.tasks))
        self.generated.append(body)
        for order in body.orders:
            if self.failure is not None:
                raise self.failure
            segments = ((1, 1), (2, 1))
            self.deliver(SlotFilled(body.lease_id, order.slot, (2, 1), (-0.5, -0.25), segments, self.finish_reason))
        return Done()


class Coordinator:
    """Takes rollouts; `troubles` are raised first, one a call."""

    def __init__(self) -> None:
        self.troubles: list[HexcombError] = []
        self.taken: list[Rollout] = []
        self.returned: list[LeaseId] = []
        self.outcome = "ACCEPTED"

    async def submit(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        if self.troubles:
            raise self.troubles.pop(0)
        self.taken += rollouts
        return [Receipt(rollout.slot, self.outcome, "") for rollout in rollouts]

    async def return_lease(self, lease_id: LeaseId, *, reason: str) -> None:
        self.returned.append(lease_id)


class Bench:
    """A lease with what is around it."""

    def __init__(self, home: Home, *works: SlotWork, made: dict[int, tuple[int, ...]] | HexcombError) -> None:
        self.child, self.coordinator = Child(made), Coordinator()
        manifest = SimpleNamespace(seal=SimpleNamespace(secret=SECRET))
        self.node = SimpleNamespace(
            home=home,
            peer_id=home.peer_id,
            run_id=RUN_ID,
            control=self.coordinator,
            state=NodeState(),
            versions=SimpleNamespace(manifest=lambda _: manifest),
        )
        lease = Lease(LeaseId("ff"), works, 30.0)
        self.lease = LeaseWork(cast(Any, self.node), cast(Any, self.child), lease)
        self.child.deliver = self.lease.filled.put_nowait

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.lease.run()


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


async def test_a_lease_is_filled_signed_and_handed_in(node_home: Home) -> None:
    bench = Bench(node_home, work(7), work(7, 1), work(8), made=PROMPTS)
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(7), slot(7, 1), slot(8)]
    for rollout in bench.coordinator.taken:
        verify_pieces(rollout, run_id=RUN_ID)
        check_rollout(rollout, SPEC.sampling)
        assert [(piece.version, piece.start) for piece in rollout.pieces] == [(1, 0), (2, 1)]
    [generated] = bench.child.generated
    assert [order.seed for order in generated.orders] == [
        slot_seed(SECRET, key) for key in (slot(7), slot(7, 1), slot(8))
    ]
    assert (bench.lease.num_taken, bench.coordinator.returned) == (3, [])
    assert bench.node.state.rate.total == 6


@pytest.mark.parametrize("made", [UsageError("no such environment"), {7: (9, 9), 8: (6,)}])
async def test_given_prompts_stand_in_for_an_environment_that_lacks_or_differs(
    node_home: Home, made: dict[int, tuple[int, ...]] | HexcombError
) -> None:
    bench = Bench(node_home, work(7, given=PROMPTS[7]), work(8, given=PROMPTS[8]), made=made)
    await bench.run()
    assert [order.prompt_ids for order in bench.child.generated[0].orders] == [PROMPTS[7], PROMPTS[8]]
    assert bench.lease.num_taken == 2


async def test_a_prompt_that_does_not_have_the_digest_is_left_out(node_home: Home) -> None:
    bench = Bench(node_home, work(7, digest="0" * 64, given=PROMPTS[7]), work(8), made=PROMPTS)
    await bench.run()
    assert [rollout.slot for rollout in bench.coordinator.taken] == [slot(8)]
    assert bench.coordinator.returned == ["ff"]


async def test_samples_that_were_cut_off_are_not_handed_in(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    bench.child.finish_reason = "abort"
    await bench.run()
    assert (bench.coordinator.taken, bench.coordinator.returned) == ([], ["ff"])


async def test_handing_in_outlasts_a_silent_coordinator(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    bench.coordinator.troubles = [UnreachableError("nobody"), UnreachableError("nobody")]
    await bench.run()
    assert (bench.lease.num_taken, bench.coordinator.returned) == (1, [])


async def test_a_lease_that_is_over_is_not_given_back(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    bench.coordinator.troubles = [LeaseUnknownError("over")]
    await bench.run()
    assert (bench.lease.num_taken, bench.coordinator.returned) == (0, [])


async def test_refused_rollouts_are_counted_and_the_lease_goes_back(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    bench.coordinator.outcome = "ROLLOUT_CONFLICT"
    await bench.run()
    assert bench.node.state.counts["receipt/ROLLOUT_CONFLICT"] == 1
    assert bench.coordinator.returned == ["ff"]


async def test_a_lost_engine_gives_the_lease_back_and_is_told(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    bench.child.failure = EngineError("the engine is lost")
    with pytest.raises(EngineError, match="lost"):
        await bench.run()
    assert bench.coordinator.returned == ["ff"]


async def test_cancelling_gives_the_lease_back(node_home: Home) -> None:
    bench = Bench(node_home, work(7), made=PROMPTS)
    begun = asyncio.Event()

    async def hang(body: Any, reply: Any, *, deadline_s: float) -> Any:
        begun.set()
        await asyncio.Event().wait()

    bench.child.request = hang  # type: ignore[method-assign]
    task = asyncio.create_task(bench.run())
    async with asyncio.timeout(10):
        await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.coordinator.returned == ["ff"]
