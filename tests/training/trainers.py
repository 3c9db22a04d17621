"""A run in miniature for the trainer's tests: a tiny model, a coordinator's key, members with leaves, plans."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec

from node.compute.messages import RoundDone, RunRound, StartTrainer
from node.training.worker import TrainerJob
from node.weights.blobs import BlobStore
from node.weights.content import assemble, body_of
from node.weights.service import UnservedPeer
from protocol.certificates import Leaf, certificate_request, issue_leaf, new_leaf_key
from protocol.errors import RoundStaleError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_options import CLIENT_OPTIONS, SERVER_OPTIONS
from protocol.ids import PeerId, RoundId, RunId, Version
from protocol.keys import Identity
from protocol.loss import LossSpec
from protocol.manifest import Body
from protocol.round import Member, RoundPlan, TrainSample, split_evenly
from protocol.run import OptimizerSpec
from protocol.tls import ServedLeaf, anchor_pem, channel_credentials, channel_options, server_credentials
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub, add_PeerServiceServicer_to_server

RUN_ID = RunId("0123456789abcdef0123456789abcdef")
COORDINATOR = Identity.from_seed(bytes(31) + b"\x01")
SPEC = OptimizerSpec(lr=1e-3, weight_decay=0.01, max_grad_norm=0.5, warmup_versions=2)
VOCABULARY = 64
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Person:
    """A peer with a leaf of the run."""

    peer_id: PeerId
    leaf: Leaf


def person(number: int) -> Person:
    """The peer of that number, enrolled."""
    identity = Identity.from_seed(bytes(31) + bytes([100 + number]))
    key_pem = new_leaf_key()
    request = certificate_request(key_pem, peer_id=identity.peer_id)
    now_ms = int(time.time() * 1000)
    return Person(
        identity.peer_id,
        Leaf(issue_leaf(COORDINATOR, request, peer_id=identity.peer_id, now_ms=now_ms), key_pem),
    )


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A folder with config.json and random weights, as version 0 of a run begins."""
    import torch
    from safetensors.torch import save_file

    from node.training.trainer import build_model

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model, _ = build_model(folder)
    save_file(
        {name: p.detach().contiguous().cpu() for name, p in model.named_parameters()},
        folder / "model.safetensors",
    )
    return folder


@dataclass(slots=True)
class Seat:
    """One running trainer."""

    who: Person
    job: TrainerJob
    member: Member
    message: StartTrainer

    @property
    def state(self) -> Any:
        """The optimizer's state in force."""
        return self.job._trainer.in_force.state

    @property
    def body(self) -> Body:
        """The body in force."""
        return self.job._trainer.in_force.body

    async def run(self, plan: RoundPlan, samples: Sequence[TrainSample] = ()) -> RoundDone:
        """The member's part of a round."""
        remaining_s, path = plan.deadline_ms / 1000 - time.time(), f"{self.message.blob_dir}.moments"
        done = await self.job.handle(RunRound(msgspec.msgpack.encode(plan), tuple(samples), remaining_s, path))
        assert isinstance(done, RoundDone)
        return done


async def seat(
    number: int,
    folder: Path,
    model_dir: Path,
    *,
    body: Body | None = None,
    state: str = "",
    weights: str = "",
    loss: LossSpec | None = None,
) -> Seat:
    """A trainer that has loaded version 0, or what `body`, `weights` and `state` describe."""
    who = person(number)
    blobs = BlobStore(folder / f"blobs{number}")
    body = body or body_of(
        model_dir / "model.safetensors", blobs, model_dir=model_dir, run_id=RUN_ID, chunk_bytes=1 << 14
    )
    if not weights:
        weights = str(folder / f"weights{number}.safetensors")
        assemble(body, blobs, Path(weights))
    message = StartTrainer(
        model_dir=str(model_dir),
        version=body.version,
        body=body.to_bytes(),
        weights=weights,
        optimizer_state=state,
        optimizer=SPEC,
        temperature=1.0,
        blob_dir=str(blobs.folder),
        run_id=RUN_ID,
        peer_id=who.peer_id,
        coordinator_key=COORDINATOR.public_bytes,
        listen_host="127.0.0.1",
        ca_certificate=anchor_pem(COORDINATOR.public_bytes),
        leaf_certificate=who.leaf.certificate_pem,
        leaf_key=who.leaf.key_pem,
        loss=loss or LossSpec(),
    )
    job, started = await TrainerJob.start(message)
    return Seat(who, job, Member(who.peer_id, started.endpoint), message)


@asynccontextmanager
async def trainers(
    num: int, folder: Path, model_dir: Path, *, loss: LossSpec | None = None
) -> AsyncIterator[list[Seat]]:
    """So many trainers, closed at the end."""
    seats: list[Seat] = []
    try:
        for number in range(num):
            seats.append(await seat(number, folder, model_dir, loss=loss))
        yield seats
    finally:
        for item in seats:
            await item.job.close()


@asynccontextmanager
async def stand_in(number: int) -> AsyncIterator[tuple[Person, Member]]:
    """A member that can be dialled and does nothing by itself; a test acts for it."""
    who = person(number)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_PeerServiceServicer_to_server(UnservedPeer(), server)
    credentials = server_credentials(ServedLeaf(who.leaf), coordinator_key=COORDINATOR.public_bytes)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield who, Member(who.peer_id, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


@asynccontextmanager
async def calling(who: Person, member: Member) -> AsyncIterator[PeerServiceStub]:
    """A stub of one member, as another peer."""
    credentials = channel_credentials(who.leaf, coordinator_key=COORDINATOR.public_bytes)
    options = [*CLIENT_OPTIONS, *channel_options(member.peer_id)]
    async with grpc.aio.secure_channel(member.endpoint, credentials, options=options) as channel:
        yield PeerServiceStub(channel)


def plan_for(
    body: Body,
    members: Sequence[Member],
    *,
    num_tokens: int,
    attempt: int = 0,
    owners: Sequence[PeerId] | None = None,
    round_s: float = 20.0,
) -> RoundPlan:
    """The plan of the next round on `body`; all members own shards unless `owners` says who."""
    num_elements = sum(tensor.num_elements for tensor in body.tensors)
    owners = tuple(owners if owners is not None else (member.peer_id for member in members))
    return RoundPlan(
        run_id=RUN_ID,
        round_id=RoundId(f"{body.version}.{attempt}"),
        base_version=Version(body.version),
        base_root=body.root,
        members=tuple(members),
        shards=split_evenly(num_elements, owners),
        divisor=num_tokens,
        deadline_ms=int((time.time() + round_s) * 1000),
    )


def make_samples(num: int, *, seed: int = 0, length: int = 10) -> list[TrainSample]:
    """Samples made by hand: random tokens, plausible log-probabilities, a masked token here and there."""
    chance = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(count))

    samples = []
    for index in range(num):
        size = chance.randint(max(1, length - 4), length + 4)
        samples.append(
            TrainSample(
                slot=f"slot-{seed}-{index}",
                prompt_ids=tokens(length),
                completion_ids=tokens(size),
                logprobs=tuple(-4.1 + chance.uniform(-0.3, 0.3) for _ in range(size)),
                mask=tuple(position == 0 or chance.random() > 0.1 for position in range(size)),
                segments=((Version(0), size),),
                advantage=chance.uniform(-1.0, 1.0),
            )
        )
    return samples


def num_live(samples: Sequence[TrainSample]) -> int:
    """The tokens that train."""
    return sum(sum(sample.mask) for sample in samples)


async def run_all(
    seats: Sequence[Seat], plan: RoundPlan, shares: Sequence[Sequence[TrainSample]]
) -> list[RoundDone | BaseException]:
    """A round on all seats at once; what each came to."""
    runs = (item.run(plan, share) for item, share in zip(seats, shares, strict=True))
    return await asyncio.gather(*runs, return_exceptions=True)


def size_of(plan: RoundPlan, shard: int) -> int:
    """Elements of a shard."""
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
    """One message of a part."""
    return peer_pb2.PushGradientRequest(round_id=plan.round_id, shard=shard, offset=offset, data=data)


async def fetch(stub: PeerServiceStub, plan: RoundPlan, shard: int, content: Any) -> bytes:
    """All bytes of a stage of a shard; raises what the owner answers."""
    request = peer_pb2.FetchShardRequest(round_id=plan.round_id, shard=shard, content=content)
    try:
        return b"".join([message.data async for message in stub.FetchShard(request, timeout=10)])
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def suspects(result: object) -> str:
    """Whom a failed round blames."""
    assert isinstance(result, RoundStaleError), result
    return result.why


def bits(item: Seat) -> tuple[bytes, ...]:
    """The state in force, byte for byte."""
    return tuple(getattr(item.state, name).tobytes() for name in ("weights_P", "first_P", "second_P"))
