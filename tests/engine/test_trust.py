"""Whether an engine that does not serve the weights that it names is caught, at its start and at a load."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from node.compute.messages import Done, Generate, Load, SlotAdvanced, SlotFilled, SlotOrder, StartRollout
from node.rollout import decoder, vllm_engine
from node.rollout.engine import Engine
from node.rollout.reference import Reference
from node.rollout.self_test import check_contract, judge_engine
from node.rollout.worker import RolloutJob
from protocol.canary import probe_for
from protocol.errors import EngineError, EngineUntrustedError, WeightsUnfitError
from protocol.ids import Version
from protocol.run import EnvironmentSpec, SamplingContract
from tests.engine.checks import KINDS, TOLERANCE, collect, new_engine, some_requests

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while vllm is imported
]
PROBE = probe_for(128)
LOST = "model.layers.1.mlp.up_proj.weight"


def expected(model: Any, which: str) -> list[float]:
    return list(model.logprobs(which, PROBE.prompt_ids, PROBE.completion_ids))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def running(request: pytest.FixtureRequest, tied_model: Any) -> AsyncIterator[Engine]:
    """One engine a kind for the whole file: a start is seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "EXTENSION", "tests.engine.bare_worker.BareWorker")
        engine = new_engine(request.param)
        await engine.start(tied_model.folder, Version(0), tied_model.files["A"])
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running: Engine, tied_model: Any) -> Engine:
    await running.load(Version(0), tied_model.files["A"])
    return running


def kind_of(engine: Engine) -> str:
    return type(engine).__name__


async def test_a_right_engine_stands_its_test_and_serves_its_version(engine: Engine, tied_model: Any) -> None:
    found = await judge_engine(
        engine, model_dir=tied_model.folder, weights=tied_model.files["A"], canary=expected(tied_model, "A")
    )
    assert found.k3 is not None
    assert found.k3 < 1e-10
    assert found.changed_difference is not None
    assert found.changed_difference < TOLERANCE
    assert found.restored_difference is not None
    assert found.restored_difference < TOLERANCE
    scores = await engine.score(PROBE.prompt_ids, PROBE.completion_ids)
    assert scores == pytest.approx(expected(tied_model, "A"), abs=TOLERANCE)


async def test_the_changed_weights_are_visibly_others(tied_model: Any, tmp_path: Path) -> None:
    judge = Reference.load(tied_model.folder, tied_model.files["A"])
    before = judge.score(PROBE)
    judge.change(tmp_path / "changed.safetensors")
    after = judge.score(PROBE)
    assert before == pytest.approx(expected(tied_model, "A"), abs=1e-6)
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) > 0.5
    old, new = load_file(tied_model.files["A"]), load_file(tmp_path / "changed.safetensors")
    assert {name for name in old if not old[name].equal(new[name])} == old.keys()


async def test_a_load_returns_the_probe_under_the_new_weights(engine: Engine, tied_model: Any) -> None:
    """While all places are taken by samples that last longer than the load may."""
    busy = asyncio.create_task(collect(engine, some_requests(40, length=350)))
    await collect(engine, some_requests(1, length=2)) if kind_of(engine) != "VllmEngine" else await asyncio.sleep(0.5)
    found = await engine.load(Version(1), tied_model.files["B"], probe=PROBE)
    assert found == pytest.approx(expected(tied_model, "B"), abs=TOLERANCE)
    assert not busy.done()
    await engine.stop({request.key for request in some_requests(40, length=1)})
    await busy


async def test_an_engine_that_skips_a_tensor_is_caught_at_its_start(
    engine: Engine, tied_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kind_of(engine) == "VllmEngine":
        monkeypatch.setattr(engine, "_put", skipping(engine, tied_model, tmp_path))
    else:
        monkeypatch.setattr(decoder, "copy_weights", copy_all_but_one)
    with pytest.raises(EngineUntrustedError, match="changed weights are off"):
        await judge_engine(engine, model_dir=tied_model.folder, weights=tied_model.files["A"])


async def test_a_tied_head_that_is_not_packed_anew_is_caught_at_the_start(
    engine: Engine, tied_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading A, B and A again alone would not show it: the head is A's all the while, and B's other layers differ."""
    if kind_of(engine) != "VllmEngine":
        pytest.skip("of vLLM alone")
    inner: Any = engine

    async def put(weights: Path) -> None:
        await inner._control(inner._engine.collective_rpc("load_without_repacking", args=(str(weights),)))

    monkeypatch.setattr(engine, "_put", put)
    with pytest.raises(EngineUntrustedError, match="changed weights are off"):
        await judge_engine(engine, model_dir=tied_model.folder, weights=tied_model.files["A"])


async def test_an_engine_of_other_weights_breaks_the_contract(engine: Engine, tied_model: Any) -> None:
    with pytest.raises(EngineUntrustedError, match="k3 between"):
        await judge_engine(engine, model_dir=tied_model.folder, weights=tied_model.files["B"])
    with pytest.raises(EngineUntrustedError, match="the version's canary are off"):
        await judge_engine(
            engine,
            model_dir=tied_model.folder,
            weights=tied_model.files["B"],
            canary=expected(tied_model, "B"),
            reference=False,
        )


async def test_the_contract_knows_what_each_type_may_do() -> None:
    trainer = (-1.0,) * 8
    noisy = tuple(-1.0 + 0.05 * (-1) ** i for i in range(8))
    assert check_contract(noisy, trainer, dtype="bfloat16") < 0.01
    with pytest.raises(EngineUntrustedError, match="over 1e-06 for float32"):
        check_contract(noisy, trainer, dtype="float32")
    with pytest.raises(EngineUntrustedError, match="k3"):
        check_contract((-1.0, float("nan")), (-1.0, -1.0), dtype="bfloat16")


async def test_bare_vllm_takes_a_file_without_one_tensor_and_this_engine_does_not(
    running: Engine, tied_model: Any, tmp_path: Path
) -> None:
    """The control: what vLLM is handed after the comparison it loads without a word, and scores what nobody trained."""
    if kind_of(running) != "VllmEngine":
        pytest.skip("of vLLM alone")
    tensors = load_file(tied_model.files["B"])
    del tensors[LOST]
    save_file(tensors, tmp_path / "short.safetensors")
    with pytest.raises(WeightsUnfitError, match="1 missing"):
        await running.load(Version(1), tmp_path / "short.safetensors")
    engine: Any = running
    await engine._engine.pause_generation(mode="keep", clear_cache=True)
    await engine._put(tmp_path / "short.safetensors")
    await engine._engine.resume_generation()
    scores = await running.score(PROBE.prompt_ids, PROBE.completion_ids)
    assert scores != pytest.approx(expected(tied_model, "B"), abs=0.01)
    await engine._engine.pause_generation(mode="keep", clear_cache=True)
    await engine._restore()
    await engine._engine.resume_generation()
    scores = await running.score(PROBE.prompt_ids, PROBE.completion_ids)
    assert scores == pytest.approx(expected(tied_model, "A"), abs=TOLERANCE)


class Forgetful:
    """An engine whose loads leave one tensor as it was, `num_bad` times."""

    def __init__(self, engine: Any, model: Any, folder: Path) -> None:
        self._engine, self._model, self._folder, self.num_bad = engine, model, folder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load(self, version: Version, weights: Path, **rest: Any) -> tuple[float, ...]:
        if self.num_bad:
            self.num_bad -= 1
            tensors = load_file(weights)
            tensors[LOST] = load_file(self._model.files["A"])[LOST]
            weights = self._folder / "forgetful.safetensors"
            save_file(tensors, weights)
        return await self._engine.load(version, weights, **rest)  # type: ignore[no-any-return]


class Bench:
    """A rollout job over an engine that may forget; `events` is what left."""

    def __init__(self, engine: Any, model: Any, folder: Path) -> None:
        contract = SamplingContract(1.0, 300, (), 128)
        order = StartRollout("", "", 0, "", EnvironmentSpec("chain_sum"), contract, piece_tokens=4)
        self.engine = Forgetful(engine, model, folder)
        self.job, self.model = RolloutJob(self.engine, order), model  # type: ignore[arg-type]
        self.events: list[Any] = []
        self.moved = asyncio.Event()

    async def generate(self, lease_id: str = "l", prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        orders = tuple(SlotOrder(f"s{i}", prompt, seed=i) for i in range(4))
        assert await self.job.handle(Generate(lease_id, orders), self.emit) == Done()

    async def emit(self, event: msgspec.Struct) -> None:
        self.events.append(event)
        self.moved.set()

    async def load(self) -> None:
        canary = tuple(expected(self.model, "B"))
        await self.job.handle(Load(1, str(self.model.files["B"]), canary), self.emit)

    def versions(self) -> set[int]:
        chunks = {event.version for event in self.events if isinstance(event, SlotAdvanced)}
        return chunks | {v for e in self.events if isinstance(e, SlotFilled) for v, _ in e.segments}


@pytest.fixture
def bench(engine: Engine, tied_model: Any, tmp_path: Path) -> Bench:
    return Bench(engine, tied_model, tmp_path)


async def test_a_good_load_interrupts_nothing(bench: Bench) -> None:
    generating = asyncio.create_task(bench.generate())
    await bench.moved.wait()
    await bench.load()
    await generating
    assert bench.versions() == {0, 1}
    assert {e.finish_reason for e in bench.events if isinstance(e, SlotFilled)} == {"length"}


async def test_a_load_that_goes_wrong_once_is_done_again_and_nothing_wrong_leaves(bench: Bench) -> None:
    generating = asyncio.create_task(bench.generate())
    await bench.moved.wait()
    bench.engine.num_bad = 1
    await bench.load()
    await generating
    assert bench.versions() == {0}  # what the wrong weights sampled is gone, and the samples with it
    assert {e.finish_reason for e in bench.events if isinstance(e, SlotFilled)} == {"abort"}
    bench.events.clear()
    await bench.generate("next")
    assert bench.versions() == {1}


async def test_a_load_that_stays_wrong_ends_all_sampling(bench: Bench) -> None:
    generating = asyncio.create_task(bench.generate())
    await bench.moved.wait()
    bench.engine.num_bad = 2
    with pytest.raises(EngineUntrustedError, match="the version's canary are off"):
        await bench.load()
    await generating
    assert bench.versions() == {0}
    for request in (Generate("l", (SlotOrder("s", (1,), seed=1),)), Load(1, str(bench.model.files["B"]), ())):
        with pytest.raises(EngineUntrustedError):
            await bench.job.handle(request, bench.emit)


async def test_without_a_canary_the_same_wrong_load_goes_unseen(bench: Bench) -> None:
    """The control: it is the canary that catches it."""
    bench.engine.num_bad = 1
    await bench.job.handle(Load(1, str(bench.model.files["B"]), ()), bench.emit)
    await bench.generate()
    assert bench.versions() == {1}


async def test_ids_out_of_the_vocabulary_are_left_out_and_the_next_are_served(bench: Bench) -> None:
    with pytest.raises(EngineError, match="not below 128"):
        await bench.engine.score((1, 128), (2,))
    await bench.generate(prompt=(1, 128))
    assert [event.finish_reason for event in bench.events] == ["refused"] * 4
    bench.events.clear()
    await bench.generate()
    assert {e.finish_reason for e in bench.events if isinstance(e, SlotFilled)} == {"length"}


def copy_all_but_one(model: Any, weights: Path) -> None:
    own = dict(model.named_parameters())
    for name, tensor in load_file(weights).items():
        if name != LOST:
            own[name].data.copy_(tensor)


def skipping(engine: Any, model: Any, folder: Path) -> Any:
    """In place of the order to vLLM's process: the same file with one tensor of the weights that were there before."""
    put = engine._put

    async def put_all_but_one(weights: Path) -> None:
        tensors = load_file(weights)
        tensors[LOST] = load_file(model.files["A"])[LOST]
        save_file(tensors, folder / "skipping.safetensors")
        await put(folder / "skipping.safetensors")

    return put_all_but_one
