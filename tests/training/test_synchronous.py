"""S7: with a lag of nought the coordinator changes nothing about training. The real core hands out leases and rounds to
two rollout nodes and a trainer, which sample and train with the real code; a plain loop that is written out here makes
the same versions, bit for bit: equal seeds, fp32, one thread, one row at a time, sums in one order.
"""

import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from coordinator.core import events as e
from coordinator.core.effects import SendPlan
from node.compute.messages import Commit
from node.rollout.engine import Sample, SampleRequest
from node.rollout.transformers_engine import TransformersEngine
from node.training import gradient as gradients
from node.training.optimizer import OptimizerState, adamw_step, clip_coefficient
from node.training.shards import reduce_parts
from node.training.trainer import build_model
from node.weights.blobs import BlobStore
from node.weights.content import assemble
from protocol.errors import NoWorkError
from protocol.ids import PeerId, SlotKey, TaskKey, Version
from protocol.manifest import Body
from protocol.rollout import Piece, Rollout, edges_of, to_float32
from protocol.round import RoundPlan, TrainSample
from protocol.run import EnvironmentSpec, Mode, SamplingContract
from protocol.seeds import slot_seed
from tests.coordinator.world import World, make_rules
from tests.training.trainers import RUN_ID, SPEC, VOCABULARY, Seat, trainers, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_VERSIONS, NUM_GROUPS, GROUP_SIZE, NUM_TOKENS, STOP_ID, SEED = 3, 2, 4, 6, 1, 7
SUMS = EnvironmentSpec("sums")
ROLLOUT_NODES = ("r0", "r1")


def prompt_of(task: TaskKey) -> tuple[int, ...]:
    chance = random.Random(f"prompt {task.index}")
    return tuple(chance.randrange(2, VOCABULARY) for _ in range(chance.randint(3, 6)))


def reward_of(token_ids: tuple[int, ...]) -> float:
    return sum(token % 3 == 0 for token in token_ids) / len(token_ids)


def secret_of(version: Version) -> bytes:
    return bytes([40 + version]) * 32


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path) -> AsyncIterator[TransformersEngine]:
    """One row at a time, so that no neighbour changes the order in which a row's numbers are added."""
    engine = TransformersEngine(max_num_seqs=1)
    await engine.start(model_dir, Version(0), model_dir / "model.safetensors")
    yield engine
    await engine.close()


async def fill(engine: TransformersEngine, slot: SlotKey) -> Sample:
    """The slot's sample under the weights that the engine has."""
    seed = slot_seed(secret_of(slot.version), slot)
    request = SampleRequest(str(slot), prompt_of(slot.task), NUM_TOKENS, seed, 1.0, (STOP_ID,))
    (sample,) = [sample async for sample in engine.generate([request])]
    return sample


async def synchronous(engine: TransformersEngine, model_dir: Path, folder: Path) -> list[bytes]:
    """The weights of each version by the plain loop: sample a batch, score it, one gradient, one step, again."""
    model, _ = build_model(model_dir)
    weights, layout = load_file(model_dir / "model.safetensors"), gradients.flat_layout(model)
    flat_P = torch.cat([weights[span.name].flatten() for span in layout]).numpy()
    state, made = OptimizerState(flat_P, 0 * flat_P, 0 * flat_P), list[bytes]()
    for version in map(Version, range(NUM_VERSIONS)):
        tensors = {s.name: torch.from_numpy(state.weights_P)[s.start : s.start + s.numel].view(s.shape) for s in layout}
        path = folder / f"plain{version}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        await engine.load(version, path)
        for name, parameter in gradients.trained_parameters(model):
            parameter.data = tensors[name]
        batch: list[gradients.TrainSample] = []
        for index in range(version * NUM_GROUPS, (version + 1) * NUM_GROUPS):
            slots = [SlotKey(version, TaskKey(SUMS.name, SEED, index), sample) for sample in range(GROUP_SIZE)]
            filled = [await fill(engine, slot) for slot in slots]
            mean = math.fsum(reward_of(sample.token_ids) for sample in filled) / GROUP_SIZE
            batch += [
                gradients.TrainSample(
                    name=str(slot),
                    prompt_ids=prompt_of(slot.task),
                    completion_ids=sample.token_ids,
                    behaviour_logprobs=to_float32(sample.logprobs),
                    mask=(True,) * len(sample.token_ids),
                    advantage=reward_of(sample.token_ids) - mean,
                )
                for slot, sample in zip(slots, filled, strict=True)
            ]
        summed = gradients.batch_gradient(model, batch)
        average = reduce_parts([summed.vector_P.numpy()], divisor=summed.num_tokens)
        clip = clip_coefficient(math.sqrt(average.squared_norm), max_norm=SPEC.max_grad_norm)
        state = adamw_step(state, average.gradient_S, step=version + 1, spec=SPEC, clip=clip)
        made.append(state.weights_P.tobytes())
    return made


@dataclass
class Run:
    """The real core, the real trainer, and rollout nodes that take and fill leases in an order drawn from `chance`.
    `num_ahead` bounds the slots that they take beyond the batch of the next version (None = what the core gives)."""

    world: World
    seat: Seat
    engine: TransformersEngine
    folder: Path
    chance: random.Random
    num_ahead: int | None = None
    samples: dict[SlotKey, Sample] = field(default_factory=dict)
    made: list[bytes] = field(default_factory=list)

    @property
    def head(self) -> Version:
        assert self.world.core.state.head is not None
        return self.world.core.state.head.version

    async def start(self) -> None:
        self.world.do(e.BaseRegistered(self.seat.body))
        self.world.join(self.seat.who.peer_id, allowed="trainer")
        for name in ROLLOUT_NODES:
            self.world.join(name, allowed="rollout")
        await self.load()

    async def load(self) -> None:
        """Everybody takes the head in."""
        path = self.folder / f"v{self.head}.safetensors"
        assemble(self.seat.body, BlobStore(Path(self.seat.message.blob_dir)), path)
        await self.engine.load(self.head, path)
        self.world.see_all()

    async def make_version(self) -> None:
        """Rollout nodes work as long as they are given anything, then the round is done."""
        before = self.head
        for _ in range(100):
            names = self.chance.sample(ROLLOUT_NODES, len(ROLLOUT_NODES))
            has_worked = [await self.work(name) for name in names]
            self.world.tick(0.2)
            self.world.see_all()
            if self.world.core.state.round is not None and not any(has_worked):
                await self.train()
                assert self.head == before + 1
                return
        raise AssertionError(f"no batch: {self.world.core.waiting_for(self.world.now_ms)}")

    async def work(self, name: str) -> bool:
        """A lease, filled in any order; now and then a part of it is given back. False if there is none."""
        wanted = self.chance.randint(1, 3)
        if self.num_ahead is not None:
            allowed = (self.head + 1) * NUM_GROUPS * GROUP_SIZE + self.num_ahead
            wanted = min(wanted, allowed - len(self.samples))
        if wanted < 1:
            return False
        try:
            grant = self.world.lease(name, wanted)
        except NoWorkError:
            return False
        num_filled = self.chance.choice([len(grant.slots), len(grant.slots), 1])
        for slot in self.chance.sample(grant.slots, num_filled):
            self.samples[slot] = sample = await fill(self.engine, slot)
            segments = tuple((segment.version, segment.num_tokens) for segment in sample.segments)
            assert segments == ((self.head, len(sample.token_ids)),)
            piece = Piece(PeerId(name), self.head, 0, sample.token_ids, to_float32(sample.logprobs))
            assert sample.finish_reason != "abort"
            rollout = Rollout(slot, (piece,), sample.finish_reason)
            edges = tuple(edges_of(slot, rollout.pieces))
            event = e.RolloutSubmitted(PeerId(name), grant.lease_id, slot, rollout.digest, segments, edges)
            self.world.do(event)
            self.world.score(slot, reward_of(sample.token_ids))
        if num_filled < len(grant.slots):
            self.world.do(e.LeaseReturned(PeerId(name), grant.lease_id))
        return True

    async def train(self) -> None:
        """The round as the core sealed it."""
        sealed, me = self.world.asked(SendPlan)[-1], self.seat.who.peer_id
        assert isinstance(sealed, SendPlan)
        share = [
            TrainSample(
                slot=str(item.slot),
                prompt_ids=prompt_of(item.slot.task),
                completion_ids=self.samples[item.slot].token_ids,
                logprobs=to_float32(self.samples[item.slot].logprobs),
                mask=tuple(map(bool, item.mask)),
                segments=item.segments,
                advantage=item.advantage,
            )
            for item in self.world.core.share_of(sealed.round_id, me)
        ]
        deadline_ms = int(1000 * (sealed.remaining_s + 10**10))
        plan = RoundPlan(
            RUN_ID, sealed.round_id, sealed.base_version, sealed.base_root, sealed.members, sealed.shards,
            sealed.divisor, deadline_ms,
        )  # fmt: skip
        done = await self.seat.run(plan, share)
        body = Body.from_bytes(done.body)
        self.world.do(e.VersionAttested(me, sealed.round_id, body, done.metrics))
        await self.seat.job.handle(Commit(body.version, body.root))
        self.made.append(self.seat.state.weights_P.tobytes())
        await self.load()


async def through_the_core(
    engine: TransformersEngine, model_dir: Path, folder: Path, *, mode: Mode, max_lag: int, num_ahead: int | None
) -> list[bytes]:
    """The weights of each version, by the coordinator's rules."""
    rules = make_rules(
        run_id=RUN_ID,
        environment=SUMS,
        seed=SEED,
        sampling=SamplingContract(1.0, NUM_TOKENS, (STOP_ID,), VOCABULARY),
        groups_per_batch=NUM_GROUPS,
        group_size=GROUP_SIZE,
        max_lag=max_lag,
        mode=mode,
        num_trainers=1,
        expected_nodes=3,
    )
    async with trainers(1, folder, model_dir) as [only]:
        run = Run(World(rules), only, engine, folder, random.Random(f"{mode} {max_lag}"), num_ahead)
        await run.start()
        for _ in range(NUM_VERSIONS):
            await run.make_version()
        return run.made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(
    engine: TransformersEngine, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[bytes]:
    made = await synchronous(engine, model_dir, tmp_path_factory.mktemp("plain"))
    assert len(set(made)) == NUM_VERSIONS
    return made


@pytest.mark.parametrize("mode", ["sequential", "periodic", "async"])
async def test_lag_nought_is_synchronous_training_in_every_bit(
    engine: TransformersEngine, model_dir: Path, tmp_path: Path, expected: list[bytes], mode: Mode
) -> None:
    assert await through_the_core(engine, model_dir, tmp_path, mode=mode, max_lag=0, num_ahead=None) == expected


async def test_one_group_sampled_ahead_makes_other_weights(
    engine: TransformersEngine, model_dir: Path, make_home: Callable[[], Path], expected: list[bytes]
) -> None:
    """What the test above would see if the bound were off by one; and that nothing else makes the difference."""
    ahead, behind = make_home(), make_home()
    made = await through_the_core(engine, model_dir, ahead, mode="async", max_lag=2, num_ahead=GROUP_SIZE)
    assert made[0] == expected[0]
    assert made[1] != expected[1]
    assert await through_the_core(engine, model_dir, behind, mode="async", max_lag=2, num_ahead=0) == expected
