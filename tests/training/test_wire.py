"""The wire of a round: bfloat16 is torch's, half the bytes, the same bits for all, and nobody else's fault."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.compute.messages import Commit, RoundDone, RunRound
from node.training.optimizer import BLOCK_ELEMENTS, Vector, adamw_step
from node.training.peer_service import TrainerPeer
from node.training.shards import check_average, reduce_parts
from node.training.wire import MESSAGE_BYTES, landing, messages_of, pack, round_in_place, unpack, unpack_landed
from protocol.errors import EngineError, PartRefusedError, RoundStaleError
from protocol.manifest import Body
from protocol.run import Wire
from protocol.v1 import peer_pb2
from tests.training.trainers import (
    Seat,
    bits,
    calling,
    make_samples,
    num_live,
    part,
    plan_for,
    push,
    run_all,
    size_of,
    stand_in,
    suspects,
    trainers,
    write_model,
)

NEAR_MAX = np.float32(3.4e38)
"""Finite as float32, beyond the largest bfloat16 (3.39e38) by more than half a step."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def rounded(values: Vector) -> Vector:
    copy = values.copy()
    round_in_place(copy, "bf16")
    return copy


def by_torch(values: Vector) -> Vector:
    return torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()


def assert_same_bits(found: Vector, expected: Vector) -> None:
    """Equal bit for bit, but for the kind of NaN, which torch makes differently from machine to machine."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("tail", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_rounds_as_in_torch(tail: int) -> None:
    """Both signs, denormals, ties to both sides, infinities and NaN of every payload."""
    values = ((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(tail)).view(np.float32)
    assert_same_bits(rounded(values), by_torch(values))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_value_rounds_as_in_torch_and_travels_unchanged(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    ready = rounded(values)
    assert_same_bits(ready, by_torch(values))
    assert_same_bits(unpack(b"".join(messages_of(pack(ready, "bf16"))), "bf16"), ready)
    assert_same_bits(unpack(b"".join(messages_of(pack(values, "f32"))), "f32"), values)


@pytest.mark.parametrize(("wire", "item_bytes"), [("f32", 4), ("bf16", 2)])
@pytest.mark.parametrize("size", [0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 5 * BLOCK_ELEMENTS + 3])
def test_what_is_sent_lands_in_its_own_memory(wire: Wire, item_bytes: int, size: int) -> None:
    sent = np.random.default_rng(size).normal(size=size).astype(np.float32)
    round_in_place(sent, wire)
    messages = list(messages_of(pack(sent, wire)))
    assert max(map(len, messages)) <= MESSAGE_BYTES
    into = np.full(size, np.nan, np.float32)
    place = landing(into, wire)
    assert len(place) == item_bytes * size
    place[:] = b"".join(messages)
    unpack_landed(into, wire)
    np.testing.assert_array_equal(into, sent)


def test_rounding_and_unpacking_need_no_more_memory_than_a_few_blocks() -> None:
    values = np.ones(64 * BLOCK_ELEMENTS, np.float32)
    tracemalloc.start()
    try:
        round_in_place(values, "bf16")
        unpack_landed(values, "bf16")
        assert tracemalloc.get_traced_memory()[1] < 4 * 4 * BLOCK_ELEMENTS
        pack(values, "bf16").tobytes()
        assert tracemalloc.get_traced_memory()[1] > 4 * 4 * BLOCK_ELEMENTS, "the measure sees a whole copy"
    finally:
        tracemalloc.stop()


def test_an_average_is_rounded_once_and_has_the_norm_of_what_is_sent() -> None:
    parts = [rounded(np.random.default_rng(seed).normal(size=1000).astype(np.float32)) for seed in range(3)]
    average = reduce_parts(parts, divisor=7, wire="bf16")
    exact = (sum(one.astype(np.float64) for one in parts) / 7).astype(np.float32)
    assert_same_bits(average.gradient_S, by_torch(exact))
    check_average(average)
    with pytest.raises(PartRefusedError, match="norm"):
        check_average(replace(average, gradient_S=exact))
    large = np.full(2, 2.0**127, np.float32)
    assert np.isfinite(reduce_parts([large, large * np.float32(0.9990)], divisor=1).gradient_S).all()
    with pytest.raises(EngineError, match="range of bf16"):
        reduce_parts([large, large * np.float32(0.9990)], divisor=1, wire="bf16")


def infinite(size: int) -> bytes:
    return pack(np.full(size, -np.inf, np.float32), "bf16").tobytes()


@pytest.mark.parametrize(
    ("wire", "data_of"),
    [
        ("bf16", lambda size: bytes(4 * size)),
        ("bf16", lambda size: bytes(2 * size - 2)),
        ("bf16", lambda size: bytes(2 * size - 1)),
        ("bf16", infinite),
        ("f32", lambda size: bytes(2 * size)),
    ],
)
async def test_who_sends_what_the_plan_does_not_say_is_named(
    tmp_path: Path, model_dir: Path, wire: Wire, data_of: Any
) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats, stand_in(5) as (liar, member):
        members, owners = [*(item.member for item in seats), member], [item.who.peer_id for item in seats]
        plan = replace(plan_for(seats[0].body, members, num_tokens=num_live(batch), owners=owners), wire=wire)
        running = asyncio.create_task(run_all(seats, plan, [batch[:2], batch[2:]]))
        async with calling(liar, seats[0].member) as stub:
            with pytest.raises(PartRefusedError):
                await push(stub, [part(plan, 0, data_of(size_of(plan, 0)))])
        assert [suspects(result) for result in await running] == [liar.peer_id] * 2


@pytest.mark.parametrize("wire", ["f32", "bf16"])
async def test_a_gradient_that_rounds_to_infinity_names_its_trainer(
    tmp_path: Path, model_dir: Path, wire: Wire
) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats:
        trainer = seats[1].job._trainer
        honest = trainer.gradient

        def huge(*args: Any, **kwargs: Any) -> Any:
            share = honest(*args, **kwargs)
            share.vector_P[5] = NEAR_MAX
            return share

        trainer.gradient = huge  # type: ignore[method-assign]
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, replace(plan, wire=wire), [batch[:2], batch[2:]])
        if wire == "f32":
            assert all(isinstance(result, RoundDone) for result in results), results
        else:
            assert [suspects(result) for result in results] == [seats[1].who.peer_id] * 2


class Watched:
    """What the members of a round compute and step from."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.parts: dict[int, Vector] = {}
        self.averages: list[Vector] = []
        for index, item in enumerate(seats):
            self._watch(index, item)

    def _watch(self, index: int, item: Seat) -> None:
        heavy, trainer = item.job._heavy, item.job._trainer
        gradient = trainer.gradient

        async def watched(function: Any, *args: Any, **kwargs: Any) -> Any:
            if function is adamw_step:
                self.averages.append(args[1].copy())
            return await heavy(function, *args, **kwargs)

        def kept(*args: Any, **kwargs: Any) -> Any:
            share = gradient(*args, **kwargs)
            self.parts.setdefault(index, share.vector_P.copy())
            return share

        item.job._heavy = watched  # type: ignore[method-assign, assignment]
        trainer.gradient = kept  # type: ignore[method-assign]


async def test_three_members_step_from_the_same_rounded_bytes_whoever_owns_them(
    tmp_path: Path, model_dir: Path
) -> None:
    batch = make_samples(9)
    divisor = num_live(batch)
    shares = [batch[:2], batch[2:5], batch[5:]]
    async with trainers(3, tmp_path, model_dir) as seats:
        watched = Watched(seats)
        members = [item.member for item in seats]
        for attempt, owners in enumerate([members, members[::-1], members[:1], members[2:]]):
            plan = plan_for(
                seats[0].body, members, num_tokens=divisor, attempt=attempt, owners=[owner.peer_id for owner in owners]
            )
            results = await run_all(seats, replace(plan, wire="bf16"), shares)
            assert all(isinstance(result, RoundDone) for result in results), results
            assert len({result.body for result in results if isinstance(result, RoundDone)}) == 1
            assert [r.metrics["num_shards_replaced"] for r in results if isinstance(r, RoundDone)] == [0.0] * 3
        parts, averages = [watched.parts[index] for index in range(3)], watched.averages
        assert len({average.tobytes() for average in averages}) == 1
        assert len(averages) == 12
        by_hand = sum(by_torch(one).astype(np.float64) for one in parts) / divisor
        assert_same_bits(averages[0], by_torch(by_hand.astype(np.float32)))
        exact = sum(one.astype(np.float64) for one in parts) / divisor
        bound = 1.01 * 2.0**-8 * (sum(np.abs(one).astype(np.float64) for one in parts) / divisor + np.abs(exact))
        assert (np.abs(averages[0] - exact) <= bound + 1e-38).all()
        assert (averages[0] != exact).any()
        assert isinstance(results[0], RoundDone)
        body = Body.from_bytes(results[0].body)
        for item in seats:
            await item.job.handle(Commit(body.version, body.root))
        assert len({bits(item) for item in seats}) == 1
        assert (seats[0].state.weights_P.view(np.uint32) & 0xFFFF).any(), "what settles the state is float32"


@pytest.mark.parametrize(("wire", "item_bytes"), [("f32", 4), ("bf16", 2)])
async def test_parts_and_averages_take_half_the_bytes(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, wire: Wire, item_bytes: int
) -> None:
    num_bytes = {"parts": 0, "averages": 0}
    push_gradient, fetch_shard = TrainerPeer.PushGradient, TrainerPeer.FetchShard

    async def counted_push(self: TrainerPeer, requests: AsyncIterator[Any], context: Any) -> Any:
        async def counted() -> AsyncIterator[Any]:
            async for request in requests:
                num_bytes["parts"] += len(request.data)
                yield request

        return await push_gradient(self, counted(), context)

    async def counted_fetch(self: TrainerPeer, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in fetch_shard(self, request, context):
            if request.content == peer_pb2.SHARD_CONTENT_AVERAGE:
                num_bytes["averages"] += len(response.data)
            yield response

    monkeypatch.setattr(TrainerPeer, "PushGradient", counted_push)
    monkeypatch.setattr(TrainerPeer, "FetchShard", counted_fetch)
    batch = make_samples(6)
    async with trainers(3, tmp_path, model_dir) as seats:
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, replace(plan, wire=wire), [batch[:2], batch[2:4], batch[4:]])
        assert all(isinstance(result, RoundDone) for result in results), results
    num_elements = plan.shards[-1].stop
    assert num_bytes == {"parts": 2 * num_elements * item_bytes, "averages": 2 * num_elements * item_bytes}


async def test_members_with_different_plans_do_not_average(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats:
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch), round_s=5.0)
        runs = seats[0].run(plan, batch[:2]), seats[1].run(replace(plan, wire="bf16"), batch[2:])
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(result, RoundStaleError) and result.why for result in results), results


async def test_a_plan_with_another_wire_is_refused(tmp_path: Path, model_dir: Path) -> None:
    async with trainers(1, tmp_path, model_dir) as [only]:
        plan = plan_for(only.body, [only.member], num_tokens=7)
        strange = msgspec.msgpack.encode(replace(plan, wire="f8"))  # type: ignore[arg-type]
        with pytest.raises(RoundStaleError, match="cannot be read"):
            await only.job.handle(RunRound(strange, (), 10.0, ""))
