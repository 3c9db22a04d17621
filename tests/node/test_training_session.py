"""A trainer whose owner wants it to stop: its round ends first, and it begins no other."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from node.state import NodeState
from node.trainer_orders import TrainerOrders
from node.training_session import TrainingSession
from protocol.ids import Digest, RoundId, Version
from protocol.round import RoundPlan
from tests.node.fakes import RUN_ID, until


class Bench:
    """A trainer on version 3, whose child never answers."""

    def __init__(self) -> None:
        self.state = NodeState(loaded=(Version(3), Digest("r")), role="trainer")
        self.orders = TrainerOrders()
        self.failed: list[tuple[str, tuple[str, ...], str]] = []
        self.fetched: list[str] = []
        self.versions = SimpleNamespace(head=Version(3), root=lambda _: Digest("r"))
        leaf = object()
        control = SimpleNamespace(fail_round=self._fail, fetch_batch=self._fetch)
        node = SimpleNamespace(
            state=self.state, versions=self.versions, control=control, leaf=leaf, peer_id="me", session=None
        )
        child = SimpleNamespace(is_closed=False, request=self._request)
        self.session = TrainingSession(cast(Any, node), cast(Any, child), self.orders)

    async def _fail(self, round_id: str, *, suspects: tuple[str, ...], reason: str) -> None:
        self.failed.append((round_id, tuple(suspects), reason))

    async def _fetch(self, round_id: str) -> Any:
        self.fetched.append(round_id)
        await asyncio.Event().wait()

    async def _request(self, *_: Any, **__: Any) -> Any:
        return None

    def plan(self, attempt: int, *, base: int = 3, lasts_ms: int = 60_000) -> RoundPlan:
        deadline_ms = self.state.now_ms() + lasts_ms
        plan = RoundPlan(RUN_ID, RoundId(f"{base}.{attempt}"), Version(base), Digest("r"), (), (), 1, deadline_ms)
        self.orders.note_plan(plan, b"plan")
        return plan


async def test_a_round_that_comes_too_late_is_declined_at_once() -> None:
    bench = Bench()
    bench.state.paused = "by its owner"
    bench.plan(0)
    assert not bench.session.has_work
    assert await bench.session._step()
    assert bench.fetched == []
    assert [(round_id, suspects) for round_id, suspects, _ in bench.failed] == [("3.0", ())]
    assert "paused: by its owner" in bench.failed[0][2]
    assert not await bench.session._step(), "it is declined once"


async def test_willing_trainers_take_it() -> None:
    """The negative control of the test above."""
    bench = Bench()
    bench.plan(0)
    step = asyncio.create_task(bench.session._step())
    await until(lambda: bench.fetched == ["3.0"])
    assert bench.failed == []
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)


async def test_a_begun_round_counts_until_it_is_committed_aborted_or_over() -> None:
    bench = Bench()
    plan = bench.plan(0)
    step = asyncio.create_task(bench.session._step())
    await until(lambda: bench.fetched == ["3.0"])
    bench.state.paused = "by its owner"
    bench.state.changed()
    assert bench.session.has_work
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert bench.session.has_work, "others may still want what it made"
    bench.versions.head = Version(4)
    assert not bench.session.has_work
    bench.versions.head = Version(3)
    assert bench.session.has_work
    bench.orders.note_abort(plan.round_id)
    assert not bench.session.has_work


async def test_a_round_whose_time_is_over_holds_nobody() -> None:
    bench = Bench()
    bench.session._begun = bench.plan(0, lasts_ms=-1)
    assert not bench.session.has_work
