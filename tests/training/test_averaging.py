"""Rounds that meet a fault: who is named, how soon, and that nothing in force changes. Real TLS on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from node.compute.messages import AbortRound, Commit, RoundDone, RunRound
from node.training.averaging import one_error
from node.training.open_round import OpenRound, RoundBook, blame
from node.training.optimizer import adamw_step
from node.training.shards import Average, reduce_parts
from protocol.errors import (
    EngineError,
    NotEnrolledError,
    PartConflictError,
    PartRefusedError,
    RoundStaleError,
)
from protocol.grpc_errors import from_rpc_error
from protocol.ids import PeerId, RoundId
from protocol.manifest import Body
from protocol.round import Member, RoundPlan
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub
from tests.training.trainers import (
    Seat,
    calling,
    make_samples,
    num_live,
    person,
    plan_for,
    run_all,
    stand_in,
    trainers,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def size_of(plan: RoundPlan, shard: int) -> int:
    return plan.shards[shard].stop - plan.shards[shard].start


async def push(stub: PeerServiceStub, messages: list[peer_pb2.PushGradientRequest]) -> None:
    """Sends the messages as one part; raises what the owner answers."""

    async def stream() -> AsyncIterator[peer_pb2.PushGradientRequest]:
        for message in messages:
            yield message

    try:
        await stub.PushGradient(stream(), timeout=10)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def part(plan: RoundPlan, shard: int, data: bytes, *, offset: int = 0) -> peer_pb2.PushGradientRequest:
    return peer_pb2.PushGradientRequest(round_id=plan.round_id, shard=shard, offset=offset, data=data)


async def fetch(stub: PeerServiceStub, plan: RoundPlan, shard: int, content: Any) -> bytes:
    request = peer_pb2.FetchShardRequest(round_id=plan.round_id, shard=shard, content=content)
    try:
        return b"".join([message.data async for message in stub.FetchShard(request, timeout=10)])
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def suspects(result: object) -> str:
    assert isinstance(result, RoundStaleError), result
    return result.why


def bits(item: Seat) -> tuple[bytes, ...]:
    return tuple(getattr(item.state, name).tobytes() for name in ("weights_P", "first_P", "second_P"))


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
            await only.job.handle(RunRound(garbage, ()))


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
        num_tokens=1,
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
