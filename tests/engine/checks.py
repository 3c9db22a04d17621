"""What the tests of engines share: requests, how to collect what comes, and what is the same text up to near ties."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.rollout.engine import Chunk, Engine, Sample, SampleRequest
from node.rollout.noise import gumbel
from node.rollout.selection import make_engine
from protocol.ids import Version

KINDS = ["transformers", "vllm"]
MAX_LEN = 400
TOLERANCE = 1e-4  # of a log-probability, in float32
NEAR_TIE = 1e-3  # two tokens closer than this in their race may come out either way
EVENT_DEADLINE_S = 20.0
OWNER_DEADLINE_S = 90.0


def new_engine(kind: Any) -> Engine:
    return make_engine(kind, max_num_seqs=16, max_model_len=MAX_LEN)


def some_requests(num: int, *, length: int, **changes: Any) -> list[SampleRequest]:
    """Prompts of 3 to 23 tokens; the first eight of them are also asked for a second sample."""
    prompts = [tuple((i * 31 + j * j * 7 + j) % 128 for j in range(3 + i % 21)) for i in range(num)]
    return [
        replace(SampleRequest(f"r{i}", prompts[i % 8 if i % 16 > 7 else i], length, seed=i * 7919 - 40), **changes)
        for i in range(num)
    ]


async def collect(engine: Engine, requests: Sequence[SampleRequest]) -> dict[str, Sample]:
    return (await collect_parts(engine, requests, chunk_tokens=0))[1]


async def collect_parts(
    engine: Engine, requests: Sequence[SampleRequest], *, chunk_tokens: int, chunk_s: float = 1000.0
) -> tuple[dict[str, list[Chunk]], dict[str, Sample]]:
    """The chunks and the sample of each request; a chunk after its sample fails."""
    chunks: dict[str, list[Chunk]] = {request.key: [] for request in requests}
    samples: dict[str, Sample] = {}
    async with asyncio.timeout(60):
        async for part in engine.generate(requests, chunk_tokens=chunk_tokens, chunk_s=chunk_s):
            assert part.key not in samples
            if isinstance(part, Chunk):
                chunks[part.key].append(part)
            else:
                samples[part.key] = part
    return chunks, samples


def check_chunks(request: SampleRequest, chunks: Sequence[Chunk], sample: Sample, *, chunk_tokens: int) -> int:
    """The chunks are the sample's first tokens, without a hole, each of one version; how many tokens they hold."""
    versions = [segment.version for segment in sample.segments for _ in range(segment.num_tokens)]
    position = 0
    for chunk in chunks:
        num = len(chunk.token_ids)
        assert chunk.start == request.first_position + position
        assert 1 <= num <= chunk_tokens
        assert chunk.token_ids == sample.token_ids[position : position + num]
        assert chunk.logprobs == sample.logprobs[position : position + num]
        assert [chunk.version] * num == versions[position : position + num]
        position += num
    return position


def assert_same(model: Any, request: SampleRequest, found: Sequence[int], expected: Sequence[int]) -> None:
    """Equal tokens, or equal up to a near tie, after which two samples may go their own ways."""
    pairs = enumerate(zip(found, expected, strict=True))
    fork = next((i for i, (one, other) in pairs if one != other), None)
    if fork is not None:
        assert race_margins(model, "A", request, found[: fork + 1])[fork] < NEAR_TIE
        assert race_margins(model, "A", request, expected[: fork + 1])[fork] < NEAR_TIE


def race_margins(model: Any, which: str, request: SampleRequest, ids: Sequence[int]) -> torch.Tensor:
    """By how much each token missed being the winner of its race, under the weights `which`; 0 where it won."""
    num_prompt, positions = len(request.prompt_ids), range(request.first_position, request.first_position + len(ids))
    with torch.inference_mode():
        logits_TV = model.references[which](input_ids=torch.tensor([[*request.prompt_ids, *ids]])).logits[0]
    race_TV = logits_TV[num_prompt - 1 : -1]
    if request.temperature:
        noise_TV = torch.from_numpy(gumbel([request.seed] * len(ids), positions, vocab_size=128))
        race_TV = race_TV / request.temperature + noise_TV
    margins_T: torch.Tensor = race_TV.max(-1).values - race_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return margins_T


async def check_swap(engine: Engine, model: Any) -> None:
    """Swaps A for B when a short sample ends; the long ones must be A up to the edge and B after it."""
    short, *longs = some_requests(6, length=150)
    samples: dict[str, Sample] = {}
    chunks: list[Chunk] = []
    async for part in engine.generate([replace(short, max_new_tokens=20), *longs], chunk_tokens=7):
        if isinstance(part, Chunk):
            chunks.append(part)
            continue
        samples[part.key] = part
        if part.key == short.key:
            await engine.load(Version(1), model.files["B"])
    assert engine.version == 1
    for request in longs:
        sample = samples[request.key]
        own = [chunk for chunk in chunks if chunk.key == request.key]
        check_chunks(request, own, sample, chunk_tokens=7)
        assert {chunk.version for chunk in own} == {0, 1}
        (before, after) = sample.segments
        edge = before.num_tokens
        assert (before.version, after.version) == (0, 1)
        assert 10 <= edge < 140
        assert edge + after.num_tokens == 150
        by = {which: model.logprobs(which, request.prompt_ids, sample.token_ids) for which in "AB"}
        assert sample.logprobs[:edge] == pytest.approx(by["A"][:edge], abs=TOLERANCE)
        assert sample.logprobs[edge:] == pytest.approx(by["B"][edge:], abs=TOLERANCE)
        assert race_margins(model, "A", request, sample.token_ids)[:edge].max() < NEAR_TIE
        assert race_margins(model, "B", request, sample.token_ids)[edge:].max() < NEAR_TIE
        # The control: the same checks against the wrong weights must fail, or they would show nothing.
        assert sample.logprobs[edge:] != pytest.approx(by["A"][edge:], abs=0.1)
        assert sample.logprobs[:edge] != pytest.approx(by["B"][:edge], abs=0.1)
        assert race_margins(model, "A", request, sample.token_ids)[edge:].max() > 0.5
