"""The rollout job of the compute child, with an engine that does what a test tells it to."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from node.compute.messages import (
    Done,
    Generate,
    Load,
    Loaded,
    SlotAdvanced,
    SlotFilled,
    SlotOrder,
    StartRollout,
    StopSlots,
)
from node.rollout.engine import Chunk, Sample, SampleRequest, Segment
from node.rollout.worker import RolloutJob, limits_of
from protocol.canary import Probe
from protocol.errors import EngineError, EngineUntrustedError, WeightsUnfitError
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
        self.found: list[tuple[float, ...] | Exception] = []
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
        found = self.found.pop(0) if self.found else ()
        if isinstance(found, Exception):
            raise found
        return found

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


async def load(job: RolloutJob, canary: tuple[float, ...]) -> msgspec.Struct:
    async def emit(event: msgspec.Struct) -> None: ...

    return await job.handle(Load(5, "weights", canary), emit)


async def test_a_load_that_agrees_with_its_canary_says_how_well() -> None:
    engine = Engine()
    engine.found = [(-1.0, -2.0), (-1.0, -2.0)]
    job = RolloutJob(engine, ORDER)
    assert await load(job, (-1.0, -2.0005)) == Loaded(pytest.approx(0.0005))
    assert await load(job, ()) == Loaded(None)


@pytest.mark.parametrize("second", [(-3.0, -2.0), EngineError("lost"), WeightsUnfitError("changed meanwhile")])
async def test_an_engine_found_wrong_samples_no_more_until_it_is_found_right(second: Any) -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    engine.found = [(-1.5, -2.0), second]
    job = RolloutJob(engine, ORDER)
    with pytest.raises(EngineError):
        await load(job, (-1.0, -2.0))
    with pytest.raises(EngineUntrustedError):
        await done(job, Generate("ff", (SlotOrder("s1", (9,), seed=3),)), events)
    with pytest.raises(EngineUntrustedError):
        await load(job, ())
    assert events == []


async def test_a_second_load_may_put_it_right() -> None:
    engine, events = Engine(), list[msgspec.Struct]()
    engine.found = [(-1.5, -2.0), (-1.0, -2.0)]
    job = RolloutJob(engine, ORDER)
    assert await load(job, (-1.0, -2.0)) == Loaded(0.0)
    await done(job, Generate("ff", (SlotOrder("s1", (9,), seed=3),)), events)
    assert len(events) == 2


@pytest.mark.parametrize(
    ("restraint", "max_num_seqs", "max_len", "share"),
    [(0, 64, 4104, 1.0), (1, 32, 4104, 1.0), (2, 16, 2056, 0.5), (4, 4, 520, 0.125)],
)
def test_each_step_of_restraint_takes_less(
    tmp_path: Path, restraint: int, max_num_seqs: int, max_len: int, share: float
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    order = msgspec.structs.replace(ORDER, model_dir=str(tmp_path), restraint=restraint)
    num_seqs, longest, limits = limits_of(order)
    assert (num_seqs, longest, limits.cache_share) == (max_num_seqs, max_len, share)
    assert (limits.expected_tokens, limits.trust_remote_code) == (520, False)
