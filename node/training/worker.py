"""The trainer's job in the compute child: a peer service, one worker thread, and the daemon's requests.
Impure.

Invariants: one round runs at a time, and a newer request drops the one that runs; torch and long numpy work
happen in one thread, so that the service and its deadlines never wait for them; what peers are served after
a round stays until the next plan comes.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import msgspec

from node.compute.messages import (
    AbortRound,
    Commit,
    Done,
    Evaluate,
    Evaluated,
    RoundDone,
    RunRound,
    Started,
    StartTrainer,
)
from node.training.averaging import RoundWork, Stepped
from node.training.gpu_memory import cap_gpu_memory
from node.training.links import Links
from node.training.open_round import OpenRound, RoundBook
from node.training.optimizer import Vector
from node.training.peer_service import TrainerPeer
from node.training.shards import check_plan
from node.training.trainer import ShareGradient, Trainer, write_moments
from node.weights.blobs import BlobStore
from protocol.certificates import Leaf
from protocol.endpoint import Endpoint
from protocol.errors import EngineError, PortInUseError, RoundStaleError
from protocol.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from protocol.ids import Digest, PeerId, Version
from protocol.manifest import Body
from protocol.round import Member, RoundPlan
from protocol.tls import ServedLeaf, channel_credentials, channel_options, server_credentials
from protocol.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server

MAX_CONCURRENT_CALLS = 256
CLOSE_S = 1.0

T = TypeVar("T")


def _load(gpu_memory_share: float, *args: Any, **kwargs: Any) -> Trainer:
    cap_gpu_memory(gpu_memory_share)
    return Trainer.load(*args, **kwargs)


class TrainerJob:
    """One trainer; made by `start`."""

    def __init__(self, message: StartTrainer, trainer: Trainer, pool: ThreadPoolExecutor) -> None:
        self._message, self._trainer, self._pool = message, trainer, pool
        self._me = PeerId(message.peer_id)
        self._blobs = BlobStore(Path(message.blob_dir))
        self._book = RoundBook()
        self._links = Links(self._dial)
        self._server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        self._running: asyncio.Task[RoundDone] | None = None
        self._round_id = ""

    @classmethod
    async def start(cls, message: StartTrainer) -> tuple[Self, Started]:
        """Loads the version and listens; the endpoint has the port that the system chose."""
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        load = functools.partial(
            _load,
            message.gpu_memory_share,
            Path(message.model_dir),
            Body.from_bytes(message.body),
            weights=Path(message.weights),
            optimizer_state=Path(message.optimizer_state) if message.optimizer_state else None,
        )
        trainer = await asyncio.get_running_loop().run_in_executor(pool, load)
        job = cls(message, trainer, pool)
        try:
            return job, Started(endpoint=await job._listen())
        except BaseException:
            await job.close()
            raise

    async def handle(self, message: msgspec.Struct, emit: object = None) -> msgspec.Struct:
        """Answers one of the trainer's requests."""
        match message:
            case RunRound():
                return await self._replace_round(message, plan_of(message.plan))
            case Commit(version, root):
                await self._heavy(self._trainer.commit, Version(version), Digest(root))
                return Done()
            case AbortRound(round_id):
                if round_id == self._round_id:
                    await self._drop_round("it was aborted")
                return Done()
            case Evaluate():
                return await self._heavy(self._evaluate, message)
            case _:
                raise EngineError(f"a trainer does not do {type(message).__name__}")

    async def close(self) -> None:
        """Drops the round, hangs up and stops listening."""
        await self._drop_round("its trainer stops")
        await self._server.stop(CLOSE_S)
        await self._links.keep_only(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _listen(self) -> str:
        message = self._message
        served = ServedLeaf(Leaf(message.leaf_certificate, message.leaf_key))
        credentials = server_credentials(served, coordinator_key=message.coordinator_key)
        service = TrainerPeer(self._book, self._trainer.moments_after, coordinator_key=message.coordinator_key)
        add_PeerServiceServicer_to_server(service, self._server)
        port = self._server.add_secure_port(str(Endpoint(message.listen_host, 0)), credentials)
        if port == 0:
            raise PortInUseError(f"the trainer cannot listen on {message.listen_host}")
        await self._server.start()
        return str(Endpoint(message.listen_host, port))

    def _dial(self, member: Member) -> grpc.aio.Channel:
        leaf = Leaf(self._message.leaf_certificate, self._message.leaf_key)
        credentials = channel_credentials(leaf, coordinator_key=self._message.coordinator_key)
        options = [*CLIENT_OPTIONS, *channel_options(member.peer_id)]
        return grpc.aio.secure_channel(member.endpoint, credentials, options=options)

    async def _replace_round(self, message: RunRound, plan: RoundPlan) -> RoundDone:
        """Runs a round in a task of its own, which a later request can drop."""
        previous, self._round_id = self._running, plan.round_id
        task = self._running = asyncio.create_task(self._run_round(message, plan, after=previous))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # the daemon no longer waits
            task.cancel()
            raise
        if task.cancelled():
            raise RoundStaleError("the round was dropped", why="")
        return task.result()

    async def _run_round(
        self, message: RunRound, plan: RoundPlan, *, after: asyncio.Task[RoundDone] | None
    ) -> RoundDone:
        if after is not None:
            after.cancel()
            await asyncio.wait({after})
        self._trainer.abort()
        in_force = self._trainer.in_force
        check_plan(
            plan,
            me=self._me,
            version=in_force.body.version,
            root=in_force.body.root,
            num_elements=in_force.state.num_elements,
        )
        if message.remaining_s <= 0:
            raise RoundStaleError(f"the deadline of round {plan.round_id} is over", why="")
        opened = OpenRound(plan, me=self._me, deadline=asyncio.get_running_loop().time() + message.remaining_s)
        await self._book.open(opened)
        await self._links.keep_only(plan.members)
        dropped, shares = threading.Event(), list[ShareGradient]()

        async def gradient() -> Vector:
            shares.append(
                await self._heavy(self._trainer.gradient, message.samples, dropped=dropped, loss=self._message.loss)
            )
            return shares[0].vector_P

        try:
            work = RoundWork(opened, self._links, heavy=self._heavy, spec=self._message.optimizer)
            stepped = await work.run(in_force.state, gradient)
            started = time.monotonic()
            store = self._trainer.next_version
            staged = await self._heavy(store, stepped.state, self._blobs, run_id=plan.run_id)
            await self._heavy(write_moments, Path(message.moments_path), staged.state.moments)
            canary = await self._heavy(self._trainer.canary, staged)
            stepped.seconds["time/store_s"] = time.monotonic() - started
        finally:
            dropped.set()
        self._trainer.staged = staged
        return RoundDone(staged.body.to_bytes(), metrics_of(shares[0], stepped), canary)

    async def _drop_round(self, why: str) -> None:
        """Ends the round that runs, if one does, and what it has staged."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._book.close(why)
        self._trainer.abort()

    def _evaluate(self, message: Evaluate) -> Evaluated:
        prompts, contract = message.prompt_ids, message.contract
        if not message.weights:
            version = self._trainer.in_force.body.version
            return Evaluated(version, self._trainer.evaluate(prompts, contract))
        body = Body.from_bytes(message.body)
        completions = self._trainer.evaluate_other(prompts, contract, body=body, weights=Path(message.weights))
        return Evaluated(body.version, completions)

    def _heavy(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args, **kwargs))


def plan_of(payload: bytes) -> RoundPlan:
    """The plan that the daemon has verified. Raises `RoundStaleError` if it cannot be read."""
    try:
        return msgspec.msgpack.decode(payload, type=RoundPlan)
    except msgspec.DecodeError as error:
        raise RoundStaleError("a round plan cannot be read") from error


def metrics_of(share: ShareGradient, stepped: Stepped) -> dict[str, float]:
    """What this member tells of the round; means are over its own share of `num_tokens` tokens."""
    return {
        **share.metrics.means(),
        **stepped.seconds,
        "num_tokens": float(share.num_tokens),
        "grad_norm": stepped.norm,
        "grad_clip": stepped.clip,
        "lr": stepped.rate,
        "num_shards_replaced": float(stepped.num_replaced),
    }
