"""Parts of gradients from members, strangers and liars, at the gate of a shard's owner. Real TLS on loopback."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from node.compute.messages import AbortRound, RoundDone
from protocol.errors import (
    NotEnrolledError,
    PartConflictError,
    PartRefusedError,
)
from protocol.round import RoundPlan
from protocol.v1 import peer_pb2
from tests.training.trainers import (
    bits,
    calling,
    fetch,
    make_samples,
    num_live,
    part,
    person,
    plan_for,
    push,
    run_all,
    size_of,
    stand_in,
    suspects,
    trainers,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def hole(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, bytes(8)), part(plan, 0, bytes(8), offset=12)]


def backwards(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, bytes(8)), part(plan, 0, bytes(8))]


def odd(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, bytes(7))]


def too_short(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, bytes(4 * size_of(plan, 0) - 4))]


def too_long(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    size = 4 * size_of(plan, 0)
    return [part(plan, 0, bytes(size)), *(part(plan, 0, bytes(4), offset=size) for _ in range(1000))]


def float64(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, np.ones(size_of(plan, 0)).tobytes())]


def not_finite(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    values = np.zeros(size_of(plan, 0), np.float32)
    values[-1] = np.nan
    return [part(plan, 0, values.tobytes())]


def infinite(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, np.full(size_of(plan, 0), -np.inf, np.float32).tobytes())]


def other_shard(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 0, bytes(8)), part(plan, 1, bytes(8), offset=8)]


def not_owned(plan: RoundPlan) -> list[peer_pb2.PushGradientRequest]:
    return [part(plan, 1, bytes(4 * size_of(plan, 1)))]


@pytest.mark.parametrize(
    "bad",
    [hole, backwards, odd, too_short, too_long, float64, not_finite, infinite, other_shard, not_owned],
)
async def test_a_malformed_part_is_refused_and_its_sender_named_at_once(
    tmp_path: Path, model_dir: Path, bad: Callable[[RoundPlan], list[peer_pb2.PushGradientRequest]]
) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats, stand_in(5) as (liar, member):
        before = [bits(item) for item in seats]
        members = [*(item.member for item in seats), member]
        owners = [item.who.peer_id for item in seats]
        plan = plan_for(seats[0].body, members, num_tokens=num_live(batch), owners=owners)
        started = time.monotonic()
        running = asyncio.create_task(run_all(seats, plan, [batch[:2], batch[2:]]))
        async with calling(liar, seats[0].member) as stub:
            with pytest.raises(PartRefusedError):
                await push(stub, bad(plan))
            if bad is not_owned:  # nobody's round is harmed by what belongs nowhere
                await seats[0].job.handle(AbortRound(plan.round_id))
        results = await running
        if bad is not not_owned:
            assert [suspects(result) for result in results] == [liar.peer_id] * 2
        assert time.monotonic() - started < 5.0
        assert [bits(item) for item in seats] == before


async def test_strangers_and_second_parts_are_refused_and_the_round_goes_on(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats, stand_in(5) as (slow, member):
        members = [*(item.member for item in seats), member]
        owners = [item.who.peer_id for item in seats]
        plan = plan_for(seats[0].body, members, num_tokens=num_live(batch), owners=owners)
        running = asyncio.create_task(run_all(seats, plan, [batch[:2], batch[2:]]))
        async with calling(person(9), seats[0].member) as stub:
            with pytest.raises(NotEnrolledError):
                await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
            for content in (peer_pb2.SHARD_CONTENT_AVERAGE, peer_pb2.SHARD_CONTENT_STATE):
                with pytest.raises(NotEnrolledError):
                    await fetch(stub, plan, 0, content)
        for index in (0, 1):
            async with calling(slow, seats[index].member) as stub:
                await push(stub, [part(plan, index, bytes(4 * size_of(plan, index)))])
                with pytest.raises(PartConflictError):
                    await push(stub, [part(plan, index, bytes(4 * size_of(plan, index)))])
        results = await running
        assert all(isinstance(result, RoundDone) for result in results), results
        async with calling(slow, seats[0].member) as stub:
            with pytest.raises(PartConflictError):  # after the round, too
                await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
            state = await fetch(stub, plan, 0, peer_pb2.SHARD_CONTENT_STATE)
            assert len(state) == 3 * 4 * size_of(plan, 0)
            with pytest.raises(PartRefusedError):
                await fetch(stub, plan, 1, peer_pb2.SHARD_CONTENT_STATE)
            with pytest.raises(PartRefusedError):
                await fetch(stub, plan, 0, peer_pb2.SHARD_CONTENT_UNSPECIFIED)


async def test_a_broken_part_may_be_sent_again(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only], stand_in(5) as (shaky, member):
        plan = plan_for(only.body, [only.member, member], num_tokens=num_live(batch), owners=[only.who.peer_id])
        running = asyncio.create_task(only.run(plan, batch))
        half = 4 * (size_of(plan, 0) // 2)
        async with calling(shaky, only.member) as stub:
            call = stub.PushGradient(timeout=10)
            await call.write(part(plan, 0, bytes(half)))
            call.cancel()
        async with calling(shaky, only.member) as stub:
            await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
        assert isinstance(await running, RoundDone)


async def test_the_second_attempt_takes_the_place_of_the_first(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only], stand_in(5) as (shaky, member):
        plan = plan_for(only.body, [only.member, member], num_tokens=num_live(batch), owners=[only.who.peer_id])
        running = asyncio.create_task(only.run(plan, batch))
        half = 4 * (size_of(plan, 0) // 2)
        async with calling(shaky, only.member) as stub:
            first = stub.PushGradient(timeout=10)
            await first.write(part(plan, 0, bytes(half)))
            await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
            assert isinstance(await running, RoundDone)
            await first.write(part(plan, 0, bytes(half), offset=half))
            await first.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first
            assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
