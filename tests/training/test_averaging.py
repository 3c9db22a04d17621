"""Rounds that meet a fault: who is named, how soon, and that nothing in force changes. Real TLS on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from node.compute.messages import Commit, RoundDone, RunRound
from node.training.averaging import one_error
from node.training.open_round import OpenRound, RoundBook, blame
from node.training.optimizer import adamw_step
from node.training.shards import Average, reduce_parts
from protocol.errors import (
    EngineError,
    NotEnrolledError,
    RoundStaleError,
)
from protocol.ids import PeerId, RoundId
from protocol.manifest import Body
from protocol.round import Member, RoundPlan
from protocol.v1 import peer_pb2
from tests.training.trainers import (
    Seat,
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


async def test_a_dead_member_is_named_and_the_next_plan_succeeds(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(6)
    async with trainers(3, tmp_path, model_dir) as seats:
        before = [bits(item) for item in seats]
        members = [item.member for item in seats]
        plan = plan_for(seats[0].body, members, num_tokens=num_live(batch), round_s=30.0)
        started = time.monotonic()
        living = asyncio.gather(*(item.run(plan, batch[:3]) for item in seats[:2]), return_exceptions=True)
        await seats[2].job.close()
        results = await living
        assert [suspects(result) for result in results] == [seats[2].who.peer_id] * 2
        assert time.monotonic() - started < 10.0
        assert [bits(item) for item in seats[:2]] == before[:2]

        again = plan_for(seats[0].body, members[:2], num_tokens=num_live(batch), attempt=1)
        results = await run_all(seats[:2], again, [batch[:3], batch[3:]])
        assert all(isinstance(result, RoundDone) for result in results), results


async def test_a_member_that_hangs_up_in_mid_round_is_named(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats:
        first = seats[0]
        async with stand_in(5) as (dead, member):
            plan = plan_for(first.body, [first.member, member], num_tokens=num_live(batch), owners=[first.who.peer_id])
            running = asyncio.create_task(first.run(plan, batch))
            async with calling(dead, first.member) as stub:  # its part comes, then it is gone
                await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
                await fetch(stub, plan, 0, peer_pb2.SHARD_CONTENT_AVERAGE)
        await running  # the owner needs nothing more of it
        async with stand_in(6) as (dead, member):
            plan = plan_for(first.body, [first.member, member], num_tokens=num_live(batch), attempt=1)
            running = asyncio.create_task(first.run(plan, batch))
            async with calling(dead, first.member) as stub:
                await push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))])
        with pytest.raises(RoundStaleError) as caught:
            await running
        assert caught.value.why == dead.peer_id


async def test_a_silent_member_is_named_by_all_within_the_deadline(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats, stand_in(5) as (silent, member):
        members = [*(item.member for item in seats), member]
        owners = [item.who.peer_id for item in seats]
        plan = plan_for(seats[0].body, members, num_tokens=num_live(batch), owners=owners, round_s=2.0)
        started = time.monotonic()
        results = await run_all(seats, plan, [batch, []])
        assert [suspects(result) for result in results] == [silent.peer_id] * 2
        assert 1.0 < time.monotonic() - started < 2.5


async def test_a_link_that_breaks_once_does_not_end_the_round(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(6)
    async with trainers(2, tmp_path, model_dir) as seats, breaking_proxy(seats[1].member.endpoint) as (address, breaks):
        members = [seats[0].member, Member(seats[1].who.peer_id, address)]
        plan = plan_for(seats[0].body, members, num_tokens=num_live(batch))
        results = await run_all(seats, plan, [batch[:3], batch[3:]])
        assert all(isinstance(result, RoundDone) for result in results), results
        assert breaks == [True]


@asynccontextmanager
async def breaking_proxy(endpoint: str, *, after_bytes: int = 60_000) -> AsyncIterator[tuple[str, list[bool]]]:
    """An address in front of `endpoint` whose first connection is reset once it has carried so many bytes up."""
    host, port = endpoint.rsplit(":", 1)
    breaks: list[bool] = []
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float) -> None:
        num_bytes = 0
        try:
            while data := await reader.read(16_384):
                num_bytes += len(data)
                if num_bytes > limit:
                    breaks.append(True)
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.transport.abort()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = float("inf") if tasks else after_bytes
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        up = asyncio.create_task(relay(reader, up_writer, limit))
        down = asyncio.create_task(relay(up_reader, writer, float("inf")))
        tasks.update((up, down))
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        writer.transport.abort()
        up_writer.transport.abort()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), breaks
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_call_may_come_before_the_plan_but_not_after_its_time(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only], stand_in(5) as (early, member):
        owners = [only.who.peer_id]
        plan = plan_for(only.body, [only.member, member], num_tokens=num_live(batch), owners=owners)
        async with calling(early, only.member) as stub:
            pushing = asyncio.create_task(push(stub, [part(plan, 0, bytes(4 * size_of(plan, 0)))]))
            with pytest.raises(RoundStaleError):  # no such name
                await push(stub, [peer_pb2.PushGradientRequest(round_id="0.x")])
            assert not pushing.done()
            assert isinstance(await only.run(plan, batch), RoundDone)
            await pushing
            later = plan_for(only.body, [only.member], num_tokens=num_live(batch), attempt=1)
            await only.run(later, batch)
            for operation in (
                push(stub, [part(plan, 0, bytes(4))]),
                fetch(stub, plan, 0, peer_pb2.SHARD_CONTENT_AVERAGE),
            ):
                with pytest.raises(RoundStaleError):
                    await operation
            request = peer_pb2.FetchShardRequest(round_id="0.7")
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.FetchShard(request, timeout=0.2).read()


async def test_the_owners_bytes_win_over_one_ulp(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(6)
    async with trainers(2, tmp_path, model_dir) as seats:
        odd_one = seats[1].job
        honest = odd_one._heavy

        async def perturbed(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = await honest(function, *args, **kwargs)
            if function is adamw_step:
                result.weights_P[:] = np.nextafter(result.weights_P, np.float32(np.inf))
            return result

        odd_one._heavy = perturbed  # type: ignore[method-assign, assignment]
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, plan, [batch[:3], batch[3:]])
        assert isinstance(results[0], RoundDone)
        assert isinstance(results[1], RoundDone)
        assert results[0].metrics["num_shards_replaced"] == results[1].metrics["num_shards_replaced"] == 1
        assert results[0].body == results[1].body
        body = Body.from_bytes(results[0].body)
        for item in seats:
            await item.job.handle(Commit(body.version, body.root))
        assert bits(seats[0]) == bits(seats[1])


@pytest.mark.parametrize("what", ["weights", "norm"])
async def test_an_owner_that_lies_is_named(tmp_path: Path, model_dir: Path, what: str) -> None:
    batch = make_samples(6)
    async with trainers(2, tmp_path, model_dir) as seats:
        liar = seats[1].job
        honest = liar._heavy

        async def lying(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = await honest(function, *args, **kwargs)
            if function is adamw_step and what == "weights":
                result.weights_P[-1] += 0.5
            if function is reduce_parts and what == "norm":
                return Average(result.gradient_S, result.squared_norm * 0.01)
            return result

        liar._heavy = lying  # type: ignore[method-assign, assignment]
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, plan, [batch[:3], batch[3:]])
        assert suspects(results[0]) == seats[1].who.peer_id


async def test_own_gradient_that_is_not_finite_names_its_trainer(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats:
        trainer = seats[1].job._trainer
        honest = trainer.gradient

        def broken(*args: Any, **kwargs: Any) -> Any:
            share = honest(*args, **kwargs)
            share.vector_P[5] = np.inf
            return share

        trainer.gradient = broken  # type: ignore[method-assign]
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, plan, [batch[:2], batch[2:]])
        assert [suspects(result) for result in results] == [seats[1].who.peer_id] * 2


async def test_a_new_plan_drops_the_round_that_runs(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only], stand_in(5) as (_, member):
        stuck = plan_for(only.body, [only.member, member], num_tokens=num_live(batch), round_s=60.0)
        running = asyncio.create_task(only.run(stuck, batch))
        await asyncio.wait_for(_opened(only, stuck.round_id), 5)
        alone = plan_for(only.body, [only.member], num_tokens=num_live(batch), attempt=1)
        assert isinstance(await only.run(alone, batch), RoundDone)
        with pytest.raises(RoundStaleError) as caught:
            await running
        assert caught.value.why == ""


async def test_a_daemon_that_no_longer_waits_ends_the_round(tmp_path: Path, model_dir: Path) -> None:
    async with trainers(1, tmp_path, model_dir) as [only], stand_in(5) as (_, member):
        stuck = plan_for(only.body, [only.member, member], num_tokens=7, round_s=60.0)
        running = asyncio.create_task(only.run(stuck))
        await asyncio.wait_for(_opened(only, stuck.round_id), 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert only.job._running is not None
        await asyncio.wait({only.job._running}, timeout=5)
        assert only.job._book.current is not None
        assert only.job._book.current.failure is not None


async def _opened(item: Seat, round_id: RoundId) -> None:
    """Returns when the trainer has opened the round."""
    await item.job._book.find(round_id, wait_s=5)


@pytest.mark.parametrize("garbage", [b"", b"\x01", b"\x93\x01\x02\x03"])
async def test_garbage_is_no_plan(tmp_path: Path, model_dir: Path, garbage: bytes) -> None:
    async with trainers(1, tmp_path, model_dir) as [only]:
        with pytest.raises(RoundStaleError, match="cannot be read"):
            await only.job.handle(RunRound(garbage, (), 1.0, ""))


async def test_the_first_failure_stays_and_answers_all() -> None:
    me, other = person(0).peer_id, person(1).peer_id
    book = RoundBook()
    plan = RoundPlan(
        run_id="",  # type: ignore[arg-type]
        round_id=RoundId("3.0"),
        base_version=3,  # type: ignore[arg-type]
        base_root="",  # type: ignore[arg-type]
        members=(),
        shards=(),
        divisor=1,
        deadline_ms=0,
    )
    opened = OpenRound(plan, me=me, deadline=0.0)
    opened.members = {me: None, other: None}  # type: ignore[dict-item]
    await book.open(opened)
    opened.fail(blame(plan.round_id, [other], "first"))
    opened.fail(blame(plan.round_id, [me], "second"))
    with pytest.raises(RoundStaleError) as caught:
        opened.check_member(me)
    assert caught.value.why == other
    with pytest.raises(NotEnrolledError):
        opened.check_member(PeerId("somebody"))


def test_one_error_prefers_faults_and_joins_suspects() -> None:
    a, b = blame(RoundId("1.0"), [PeerId("A")], "x"), blame(RoundId("1.0"), [PeerId("B")], "y")
    empty = blame(RoundId("1.0"), [], "z")
    joined = one_error(ExceptionGroup("", [empty, ExceptionGroup("", [b, a])]))
    assert isinstance(joined, RoundStaleError)
    assert joined.why == "A,B"
    engine = EngineError("broken")
    assert one_error(ExceptionGroup("", [a, engine])) is engine
    bug = KeyError("bug")
    group: ExceptionGroup[Exception] = ExceptionGroup("", [a, engine, bug])
    assert one_error(group) is bug


async def test_the_other_half_of_the_service_is_not_served_here(tmp_path: Path, model_dir: Path) -> None:
    async with trainers(1, tmp_path, model_dir) as [only], calling(person(1), only.member) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FetchManifest(peer_pb2.FetchManifestRequest(version=0), timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FetchChunk(peer_pb2.FetchChunkRequest(digest="0" * 64), timeout=5).read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
