"""vLLM alone, as a user of its offline interface would run it: `python -m tests.bench.bare_vllm FILE`.

FILE (JSON, `Work`) names a model and the requests. The engine gets exactly the arguments that the daemon's adapter
gives it, the seeded noise among them, and runs inside this process, without the daemon's hops between processes. Prints
`Bare` as JSON.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from node.rollout.vllm_engine import VllmEngine
from node.rollout.vllm_surroundings import ENVIRONMENT
from node.torch_guard import block_broken_extras

NUM_WARM = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be sampled; `prompts` and `seeds` have one entry for each sample."""

    model_dir: str
    weights: str
    max_model_len: int
    max_num_seqs: int
    max_new_tokens: int
    stop_ids: list[int]
    temperature: float
    prompts: list[list[int]]
    seeds: list[int]


@dataclass(frozen=True, slots=True)
class Bare:
    """The samples' token ids in order, how long they took, and the same number of tokens for each sample (no stop) with
    the noise and without."""

    token_ids: list[list[int]]
    seconds: float
    with_noise_s: float
    without_noise_s: float


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While it lasts, the adapter builds a `vllm.LLM` where it would build an `AsyncLLM`."""
    from vllm import LLM
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    def build(arguments: Any) -> LLM:
        plain = AsyncEngineArgs(model=arguments.model)
        names = [field.name for field in dataclasses.fields(arguments)]
        changed = {name: getattr(arguments, name) for name in names if getattr(arguments, name) != getattr(plain, name)}
        return LLM(model=arguments.model, **{name: value for name, value in changed.items() if name != "model"})

    original = AsyncLLM.from_engine_args
    AsyncLLM.from_engine_args = build
    try:
        yield
    finally:
        AsyncLLM.from_engine_args = original


def measure(work: Work) -> Bare:
    """Builds, warms up, measures."""
    os.environ.update(ENVIRONMENT)
    block_broken_extras()
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    from node.rollout.vllm_extension import NOISE_KEY

    engine = VllmEngine(max_num_seqs=work.max_num_seqs, max_model_len=work.max_model_len)
    with offline():
        engine._build(Path(work.model_dir), Path(work.weights))
    model = cast(Any, engine._engine)
    prompts = [tokens_input(ids) for ids in work.prompts]

    def params(seed: int, *, stops: bool = True, noise: bool = True) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=work.max_new_tokens,
            stop_token_ids=work.stop_ids if stops else [],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={NOISE_KEY: [seed, 0, work.temperature]} if noise else None,
        )

    def run(count: int, **kind: bool) -> tuple[list[list[int]], float]:
        chosen, began_s = [params(seed, **kind) for seed in work.seeds[:count]], time.monotonic()
        outputs = model.generate(prompts[:count], chosen, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], time.monotonic() - began_s

    run(NUM_WARM)
    token_ids, seconds = run(len(prompts))
    some = min(len(prompts), work.max_num_seqs)
    _, with_noise_s = run(some, stops=False)
    _, without_noise_s = run(some, stops=False, noise=False)
    return Bare(token_ids, seconds, with_noise_s, without_noise_s)


if __name__ == "__main__":
    said, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(asdict(measure(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Work)))), file=said)
