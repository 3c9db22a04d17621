"""The rollout job of the compute child, with an engine that does what a test tells it to."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from node.compute.messages import Done, Generate, SlotAdvanced, SlotFilled, SlotOrder, StartRollout, StopSlots
from node.rollout.engine import Chunk, Sample, SampleRequest, Segment
from node.rollout.worker import RolloutJob
from protocol.canary import Probe
from protocol.errors import EngineError
from protocol.ids import Version
from protocol.run import EnvironmentSpec, SamplingContract

ORDER = StartRollout(
    engine="transformers",
    model_dir="",
    version=0,
    weights="",
    environment=EnvironmentSpec("chain_sum"),
    contract=SamplingContract(0.7, 8, (1,), 64),
    piece_tokens=2,
    piece_s=0.5,
)


class Engine:
    """Gives each request a chunk of two tokens and then a sample of three, unless it was stopped before."""

    version = Version(4)
    vocab_size, dtype = 64, "float32"

    def __init__(self) -> None:
        self.found: list[tuple[float, ...]] = []
        self.requests: list[SampleRequest] = []
        self.chunking: tuple[int, float] | None = None
        self.stopped: set[str] = set()

    def check(self, request: SampleRequest) -> None:
        if len(request.prompt_ids) > 5:
            raise EngineError("too long")

    async def generate(
        self, requests: Sequence[SampleRequest], *, chunk_tokens: int = 0, chunk_s: float = 1.0
    ) -> AsyncIterator[Chunk | Sample]:
        self.requests, self.chunking = [*requests], (chunk_tokens, chunk_s)
        for request in requests:
            yield Chunk(request.key, request.first_position, (2, 3), (-1.0, -2.0), self.version)
            await asyncio.sleep(0)
            reason: Any = "abort" if request.key in self.stopped else "stop"
            segments = (Segment(self.version, 3),)
            yield Sample(request.key, (2, 3, 1), (-1.0, -2.0, -3.0), segments, reason)

    async def start(self, model_dir: Path, version: Version, weights: Path) -> None: ...

    async def stop(self, keys: Collection[str]) -> None:
        self.stopped |= {*keys}

    async def load(self, version: Version, weights: Path, *, probe: Probe | None = None) -> tuple[float, ...]:
        return self.found.pop(0) if self.found else ()

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        return ()

    async def close(self) -> None: ...


async def done(job: RolloutJob, request: Generate | StopSlots, events: list[msgspec.Struct]) -> None:
    async def emit(event: msgspec.Struct) -> None:
        events.append(event)

    assert await job.handle(request, emit) == Done()


async def test_a_slot_leaves_by_pieces_and_then_whole() -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    await done(RolloutJob(engine, ORDER), Generate("ff", (SlotOrder("s1", (9, 9), seed=3),)), events)
    assert events == [
        SlotAdvanced("ff", "s1", 0, (2, 3), (-1.0, -2.0), 4),
        SlotFilled("ff", "s1", (2, 3, 1), (-1.0, -2.0, -3.0), ((4, 3),), "stop"),
    ]
    assert engine.chunking == (2, 0.5)


async def test_the_engine_goes_on_after_the_prefix() -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    order = SlotOrder("s1", (9, 9), seed=3, prefix_ids=(5, 6, 7))
    await done(RolloutJob(engine, ORDER), Generate("ff", (order,)), events)
    [request] = engine.requests
    assert (request.prompt_ids, request.first_position, request.max_new_tokens) == ((9, 9, 5, 6, 7), 3, 5)
    assert (request.seed, request.temperature, request.stop_ids) == (3, 0.7, (1,))
    assert cast(SlotAdvanced, events[0]).start == 3
    assert cast(SlotFilled, events[1]).token_ids == (2, 3, 1)


async def test_a_slot_that_the_engine_cannot_take_is_left_out_alone() -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    orders = (SlotOrder("long", (9,) * 6, seed=3), SlotOrder("s1", (9,), seed=3))
    await done(RolloutJob(engine, ORDER), Generate("ff", orders), events)
    assert events[0] == SlotFilled("ff", "long", (), (), (), "refused")
    assert cast(SlotFilled, events[-1]).slot == "s1"
    assert len(engine.requests) == 1


async def test_stopping_a_slot_of_one_lease_leaves_that_of_another() -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    job = RolloutJob(engine, ORDER)
    await done(job, StopSlots("old", ("s1",)), events)
    for lease_id in ("old", "new"):
        await done(job, Generate(lease_id, (SlotOrder("s1", (9,), seed=3),)), events)
    filled = [event for event in events if isinstance(event, SlotFilled)]
    assert [(event.lease_id, event.slot, event.finish_reason) for event in filled] == [
        ("old", "s1", "abort"),
        ("new", "s1", "stop"),
    ]
