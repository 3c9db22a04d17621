"""Both engines on the same sixteen samples, without a daemon: `python -m tests.bench.rollout engines`.

What `auto` chooses by on a node's own machine: the transformers engine is the faster one on tiny models.
"""

import asyncio
import time
from pathlib import Path
from statistics import median

from node.rollout.engine import Engine, Sample, SampleRequest
from node.rollout.selection import make_engine
from node.torch_guard import block_broken_extras
from protocol.ids import Version
from tests.bench import models
from tests.bench.table import Figure, reported

NUM_SAMPLES, NUM_TOKENS, NUM_TURNS = 16, 48, 3
MODELS, ENGINES = ("tiny", "real"), ("vllm", "transformers")


def figures() -> list[Figure]:
    """Starts each engine on each model; about three minutes."""
    block_broken_extras()
    found = list[Figure]()
    for name in MODELS:
        base = models.base(name)
        weights = next(base.glob("*.safetensors"))
        rates = {engine: asyncio.run(_measure(engine, base, weights)) for engine in ENGINES}
        ratio = median(rates["vllm"]) / median(rates["transformers"])
        shown = "; ".join(f"{engine} {' '.join(f'{rate:.0f}' for rate in rates[engine])}" for engine in ENGINES)
        anchor = f"{NUM_SAMPLES} sequences of {NUM_TOKENS} tokens, no daemon; tokens/s: {shown}"
        found.append(reported(f"{name}: vLLM over transformers, 16 sequences", ratio, unit="x", anchor=anchor))
    return found


async def _measure(name: str, base: Path, weights: Path) -> list[float]:
    """Tokens per second of each turn, after one to warm up."""
    engine = make_engine(name, max_num_seqs=NUM_SAMPLES, max_model_len=NUM_TOKENS + 32)
    await engine.start(base, Version(0), weights)
    try:
        return [await _turn(engine, number) for number in range(NUM_TURNS + 1)][1:]
    finally:
        await engine.close()


async def _turn(engine: Engine, number: int) -> float:
    requests = [
        SampleRequest(
            key=f"{number}/{sample}",
            prompt_ids=tuple((7 * number + 31 * sample + 5 * position) % engine.vocab_size for position in range(16)),
            max_new_tokens=NUM_TOKENS,
            seed=100 * number + sample,
            temperature=1.0,
            stop_ids=(),
        )
        for sample in range(NUM_SAMPLES)
    ]
    began_s = time.monotonic()
    samples = [part async for part in engine.generate(requests) if isinstance(part, Sample)]
    return sum(len(sample.token_ids) for sample in samples) / (time.monotonic() - began_s)
