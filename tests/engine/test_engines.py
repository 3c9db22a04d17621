"""What every rollout engine owes its caller, asked of both; the reference is transformers, one sample at a time."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from node.rollout.engine import Chunk, Engine, Sample, Segment
from protocol.errors import EngineError
from protocol.ids import Version
from tests.engine.checks import (
    EVENT_DEADLINE_S,
    KINDS,
    MAX_LEN,
    NEAR_TIE,
    TOLERANCE,
    assert_same,
    check_chunks,
    check_swap,
    collect,
    collect_parts,
    new_engine,
    race_margins,
    some_requests,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while vllm is imported
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def running(request: pytest.FixtureRequest, tied_model: Any) -> AsyncIterator[Engine]:
    """One engine a kind for the whole file: a start is seconds."""
    engine = new_engine(request.param)
    await engine.start(tied_model.folder, Version(0), tied_model.files["A"])
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running: Engine, tied_model: Any) -> Engine:
    """The running engine, on version 0 = weights A."""
    if running.version != 0:
        await running.load(Version(0), tied_model.files["A"])
    return running


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_every_token_wins_its_race_and_carries_its_logprob(
    engine: Engine, tied_model: Any, temperature: float
) -> None:
    requests = some_requests(24, length=30, temperature=temperature)
    samples = await collect(engine, requests)
    assert samples.keys() == {request.key for request in requests}
    for request in requests:
        sample = samples[request.key]
        assert (len(sample.token_ids), sample.finish_reason) == (30, "length")
        assert sample.segments == (Segment(Version(0), 30),)
        assert race_margins(tied_model, "A", request, sample.token_ids).max() < NEAR_TIE
        expected = tied_model.logprobs("A", request.prompt_ids, sample.token_ids)
        assert sample.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_another_seed_would_not_pass_for_this_one(engine: Engine, tied_model: Any) -> None:
    (request,) = some_requests(1, length=30)
    sample = (await collect(engine, [request]))[request.key]
    other = replace(request, seed=request.seed + 1)
    assert race_margins(tied_model, "A", other, sample.token_ids).max() > 1
    assert (await collect(engine, [other]))[request.key].token_ids != sample.token_ids


async def test_a_sample_is_the_same_in_any_company(engine: Engine) -> None:
    requests = some_requests(20, length=40)
    together = await collect(engine, requests)
    for request in requests[::6]:
        alone = await collect(engine, [request])
        assert alone[request.key].token_ids == together[request.key].token_ids


async def test_calls_share_one_batch(engine: Engine) -> None:
    long, short = some_requests(2, length=300)
    outside = asyncio.create_task(collect(engine, [long]))
    await collect(engine, [replace(short, max_new_tokens=3)])
    assert not outside.done()
    assert len((await outside)[long.key].token_ids) == 300


async def test_stop_ids_end_a_sample_and_are_its_last_token(engine: Engine) -> None:
    (request,) = some_requests(1, length=30)
    whole = (await collect(engine, [request]))[request.key].token_ids
    stop = whole[9]
    stopped = (await collect(engine, [replace(request, stop_ids=(stop, 127))]))[request.key]
    assert stopped.token_ids == whole[: whole.index(stop) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_a_sample_goes_on_elsewhere_from_its_first_tokens(
    engine: Engine, tied_model: Any, temperature: float
) -> None:
    requests = some_requests(8, length=60, temperature=temperature)
    whole = await collect(engine, requests)
    stops = {request.key: 5 + 6 * i for i, request in enumerate(requests)}
    moved = [
        replace(
            request,
            prompt_ids=request.prompt_ids + whole[request.key].token_ids[: stops[request.key]],
            max_new_tokens=60 - stops[request.key],
            first_position=stops[request.key],
        )
        for request in requests
    ]
    chunks, rest = await collect_parts(engine, moved, chunk_tokens=4)
    for request in moved:
        check_chunks(request, chunks[request.key], rest[request.key], chunk_tokens=4)
        expected = whole[request.key].token_ids[request.first_position :]
        assert_same(tied_model, request, rest[request.key].token_ids, expected)
    if temperature:
        forgetful = replace(moved[0], first_position=0)
        forgotten = (await collect(engine, [forgetful]))[forgetful.key]
        assert forgotten.token_ids != whole[forgetful.key].token_ids[moved[0].first_position :]


async def test_a_sample_stopped_under_way_goes_on_from_its_chunks(engine: Engine, tied_model: Any) -> None:
    first, *others = requests = some_requests(4, length=300)
    whole = await collect(engine, requests)
    received: list[Chunk] = []
    stopped, samples = False, {}
    async for part in engine.generate(requests, chunk_tokens=8):
        if isinstance(part, Sample):
            samples[part.key] = part
        elif part.key == first.key and not stopped:
            received.append(part)
            if len(received) == 3:
                await engine.stop({first.key, "nobody"})
                stopped = True
    assert samples[first.key].finish_reason == "abort"
    for other in others:
        assert_same(tied_model, other, samples[other.key].token_ids, whole[other.key].token_ids)
    prefix = tuple(token for chunk in received for token in chunk.token_ids)
    assert prefix == whole[first.key].token_ids[:24]
    moved = replace(first, prompt_ids=first.prompt_ids + prefix, max_new_tokens=276, first_position=24)
    rest = (await collect(engine, [moved]))[moved.key].token_ids
    assert_same(tied_model, moved, rest, whole[first.key].token_ids[24:])


async def test_stopping_frees_the_places(engine: Engine) -> None:
    """All places are taken by long samples; a short one goes through once they are stopped, before they could end."""
    longs, (short,) = some_requests(40, length=350), some_requests(1, length=2)
    reasons: list[str] = []
    waiting = None
    async for part in engine.generate(longs, chunk_tokens=2):
        if isinstance(part, Sample):
            reasons.append(part.finish_reason)
        elif waiting is None:
            waiting = asyncio.create_task(collect(engine, [replace(short, key="short")]))
            await engine.stop({request.key for request in longs})
    assert reasons == ["abort"] * 40
    assert waiting is not None
    assert len((await waiting)["short"].token_ids) == 2


async def test_chunks_follow_each_other_and_agree_with_the_sample(engine: Engine) -> None:
    requests = some_requests(24, length=100)
    chunks, samples = await collect_parts(engine, requests, chunk_tokens=8)
    for request in requests:
        num_tokens = check_chunks(request, chunks[request.key], samples[request.key], chunk_tokens=8)
        assert num_tokens >= 8
        assert {len(chunk.token_ids) for chunk in chunks[request.key]} == {8}


async def test_chunks_leave_by_time_too(engine: Engine) -> None:
    (request,) = some_requests(1, length=200)
    chunks, samples = await collect_parts(engine, [request], chunk_tokens=1000, chunk_s=0.0)
    assert len(chunks[request.key]) > 1
    assert check_chunks(request, chunks[request.key], samples[request.key], chunk_tokens=1000) > 1


async def test_swap_in_mid_generation_is_exact(engine: Engine, tied_model: Any) -> None:
    await check_swap(engine, tied_model)
    (request,) = some_requests(1, length=30)  # its prompt was cached under A
    sample = (await collect(engine, [request]))[request.key]
    assert sample.segments == (Segment(Version(1), 30),)
    assert sample.logprobs == pytest.approx(
        tied_model.logprobs("B", request.prompt_ids, sample.token_ids), abs=TOLERANCE
    )


def spoil_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(384, 127)


def spoil_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


def drop_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(128, 128)


@pytest.mark.parametrize("spoil", [spoil_shape, spoil_dtype, drop_tensor, add_tensor])
async def test_a_file_of_another_layout_is_refused(engine: Engine, tied_model: Any, tmp_path: Path, spoil: Any) -> None:
    requests = some_requests(3, length=20)
    good = await collect(engine, requests)
    tensors = load_file(tied_model.files["B"])
    spoil(tensors)
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(EngineError, match="does not fit"):
        await engine.load(Version(1), tmp_path / "bad.safetensors")
    assert engine.version == 0
    assert await collect(engine, requests) == good


async def test_a_file_cut_short_or_missing_is_refused(engine: Engine, tied_model: Any, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(tied_model.files["B"].read_bytes()[:-10])
    for weights in (cut, tmp_path / "none.safetensors"):
        with pytest.raises(EngineError, match="cannot be read"):
            await engine.load(Version(1), weights)


async def test_a_load_that_fails_half_way_leaves_the_old_weights(
    engine: Engine, tied_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before the pause is taken out, so that the failure comes in the middle of the swap."""
    tensors = load_file(tied_model.files["B"])
    spoil_shape(tensors)
    save_file(tensors, tmp_path / "bad.safetensors")
    monkeypatch.setattr(sys.modules[type(engine).__module__], "check_layout", lambda *_, **__: None)
    short, *longs = some_requests(4, length=100)
    samples = {}
    async for sample in engine.generate([replace(short, max_new_tokens=10), *longs]):
        assert isinstance(sample, Sample)
        samples[sample.key] = sample
        if sample.key == short.key:
            with pytest.raises(EngineError, match="Version 0 is served on"):
                await engine.load(Version(1), tmp_path / "bad.safetensors")
    for request in longs:
        sample = samples[request.key]
        assert sample.segments == (Segment(Version(0), 100),)
        expected = tied_model.logprobs("A", request.prompt_ids, sample.token_ids)
        assert sample.logprobs == pytest.approx(expected, abs=TOLERANCE)
    await engine.load(Version(2), tied_model.files["B"])
    scores = await engine.score(longs[0].prompt_ids, samples["r1"].token_ids)
    expected = tied_model.logprobs("B", longs[0].prompt_ids, samples["r1"].token_ids)
    assert scores == pytest.approx(expected, abs=TOLERANCE)


async def test_score_agrees_with_the_reference_up_to_the_full_length(engine: Engine, tied_model: Any) -> None:
    prompt_ids = (5, 6, 7)
    for num in (1, 40, MAX_LEN - 3):
        completion_ids = [(i * 37 + 11) % 128 for i in range(num)]
        scores = await engine.score(prompt_ids, completion_ids)
        expected = tied_model.logprobs("A", prompt_ids, completion_ids)
        assert scores == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": ()},
        {"prompt_ids": (128,)},
        {"prompt_ids": (-1,)},
        {"max_new_tokens": 0},
        {"max_new_tokens": MAX_LEN},
        {"seed": 2**63},
        {"temperature": float("nan")},
        {"first_position": -1},
    ],
)
async def test_a_request_out_of_range_is_refused_and_harms_nobody(engine: Engine, changes: dict[str, Any]) -> None:
    good, bad = some_requests(2, length=5)
    with pytest.raises(EngineError, match=r"refused|cannot be sampled"):
        engine.check(replace(bad, **changes))
    with pytest.raises(EngineError, match=r"refused|cannot be sampled"):
        await collect(engine, [good, replace(bad, **changes)])
    assert len((await collect(engine, [good]))[good.key].token_ids) == 5


async def test_samples_that_nobody_waits_for_are_dropped(engine: Engine) -> None:
    """All places are taken by long samples; once those are given up, a short one goes through before they could end."""
    samples = engine.generate(some_requests(17, length=2)[:1] + some_requests(40, length=350)[1:])
    await anext(samples)
    await samples.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(EVENT_DEADLINE_S):
        ticks = 0
        short = asyncio.create_task(collect(engine, some_requests(1, length=5)))
        while not short.done():
            await asyncio.sleep(0)
            ticks += 1
    assert ticks > 10  # the loop was free while the engine worked


async def test_a_load_given_up_leaves_an_engine_that_samples(engine: Engine, tied_model: Any) -> None:
    for num_turns in range(4):  # of the loop, before the caller gives up
        load = asyncio.create_task(engine.load(Version(1), tied_model.files["B"]))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        load.cancel()
        await asyncio.wait({load})
    await engine.load(Version(2), tied_model.files["B"])
    (request,) = some_requests(1, length=5)
    assert (await collect(engine, [request]))[request.key].segments == (Segment(Version(2), 5),)
