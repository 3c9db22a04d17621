"""An update of the weights in place: how long generation stands still, and whether each token is of the weights that
its segment names. `python -m tests.bench.rollout swap`.

SmolLM2-135M in float32. The bare load is the same call to vLLM's worker on an idle engine; the pause runs from the word
to pause until generation is resumed, with sixteen samples under way. Afterwards transformers computes the
log-probabilities of what was sampled before the swap under the old weights, and of what came after under the new.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from node.rollout.engine import Sample, SampleRequest
from node.rollout.vllm_engine import VllmEngine
from node.torch_guard import block_broken_extras
from protocol.ids import Version
from tests.bench import models
from tests.bench.table import Figure, at_least, at_most

NUM_SAMPLES, NUM_TOKENS, NUM_LOADS = 16, 96, 5
SWAPS_S = 2.0
NOISE = 0.01
"""Of each tensor's standard deviation: what makes the new weights differ."""
DEADLINE_S = 300.0


def figures() -> list[Figure]:
    """Starts an engine; about three minutes."""
    block_broken_extras()
    base = models.base("real")
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        files = _weight_files(base, Path(folder))
        loads_s, pauses_s, samples = asyncio.run(_measure(base, files))
        differences = list(_differences(base, files, samples))
    num_mixed = sum(len(sample.segments) > 1 for sample in samples)
    shown = f"{median(pauses_s):.2f} s / {median(loads_s):.2f} s, medians of {len(pauses_s)} and {len(loads_s)}"
    return [
        at_most("real: pause for an update over a bare load", median(pauses_s) / median(loads_s), 1.2, anchor=shown),
        at_most(
            "real: log-probabilities around a swap",
            max(differences),
            1e-4,
            anchor=f"largest difference to transformers in float32, {len(differences)} tokens",
        ),
        at_least("real: samples with tokens of two versions", num_mixed, NUM_SAMPLES / 2, anchor=f"of {NUM_SAMPLES}"),
    ]


def _weight_files(base: Path, folder: Path) -> tuple[Path, Path]:
    """The old and the new weights in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = {name: tensor.float() for name, tensor in load_file(next(base.glob("*.safetensors"))).items()}
    save_file(tensors, folder / "old.safetensors")
    moved = {name: tensor + NOISE * tensor.std() * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(moved, folder / "new.safetensors")
    return folder / "old.safetensors", folder / "new.safetensors"


async def _measure(base: Path, files: tuple[Path, Path]) -> tuple[list[float], list[float], list[Sample]]:
    engine = VllmEngine(max_num_seqs=NUM_SAMPLES, max_model_len=1024)
    await engine.start(base, Version(0), files[0])
    try:
        loads_s = [await _timed(engine._put(files[(turn + 1) % 2])) for turn in range(2 * NUM_LOADS)]
        pauses_s = list[float]()
        samples = list[Sample]()
        for turn in range(NUM_LOADS):
            new = (turn + 1) % 2
            sampling = asyncio.create_task(_sample(engine, turn))
            await asyncio.sleep(SWAPS_S)
            pauses_s.append(await _pause(engine, Version(turn + 1), files[new]))
            async with asyncio.timeout(DEADLINE_S):
                samples = await sampling
            if turn == 0:
                first = samples
    finally:
        await engine.close()
    return loads_s[2:], pauses_s, first


async def _timed(call: Any) -> float:
    began_s = time.monotonic()
    await call
    return time.monotonic() - began_s


async def _pause(engine: VllmEngine, version: Version, weights: Path) -> float:
    """Loads, and says how long generation stood still."""
    inner: Any = engine._engine
    times = dict[str, float]()
    pause, resume = inner.pause_generation, inner.resume_generation

    async def noted_pause(**options: Any) -> None:
        times["paused"] = time.monotonic()
        await pause(**options)

    async def noted_resume() -> None:
        await resume()
        times["resumed"] = time.monotonic()

    inner.pause_generation, inner.resume_generation = noted_pause, noted_resume
    try:
        await engine.load(version, weights)
    finally:
        inner.pause_generation, inner.resume_generation = pause, resume
    return times["resumed"] - times["paused"]


async def _sample(engine: VllmEngine, turn: int) -> list[Sample]:
    requests = [
        SampleRequest(
            key=f"{turn}/{number}",
            prompt_ids=_prompt(number),
            max_new_tokens=NUM_TOKENS,
            seed=1000 * turn + number,
            temperature=1.0,
            stop_ids=(),
        )
        for number in range(NUM_SAMPLES)
    ]
    found = {part.key: part async for part in engine.generate(requests) if isinstance(part, Sample)}
    return [found[request.key] for request in requests]


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(1000 + (37 * number + position) % 1000 for position in range(24))


def _differences(base: Path, files: tuple[Path, Path], samples: Sequence[Sample]) -> Iterator[float]:
    """For each token, how far its log-probability is from that of transformers under its segment's weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for version, weights in enumerate(files):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32)
        model.load_state_dict(load_file(weights), strict=False)
        model.tie_weights()
        model.eval()
        for number, sample in enumerate(samples):
            ids_T = torch.tensor([*_prompt(number), *sample.token_ids])
            with torch.no_grad():
                logprobs_TV = model(ids_T[None]).logits[0].log_softmax(-1)
            start, shift = 0, len(_prompt(number)) - 1
            for segment in sample.segments:
                for position in range(start, start + segment.num_tokens):
                    if segment.version == version:
                        theirs = float(logprobs_TV[shift + position, sample.token_ids[position]])
                        yield abs(theirs - sample.logprobs[position])
                start += segment.num_tokens
