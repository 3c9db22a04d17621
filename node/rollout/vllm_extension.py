"""What runs inside vLLM's own process: its entry, the swap of weights, and the sampling noise.

Invariant: the process never outlives its owner, and a layer that computes from a packed copy of its weight
computes from the newest one. With `vllm_engine`, the only module that imports vllm. Impure.

Shapes: B rows, V vocabulary.
"""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from node.rollout.noise import perturb
from node.rollout.vllm_process import EarlyContext, watch_owner

NOISE_KEY = "hexcomb"  # in a request's `extra_args`: (seed, first position, temperature)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """The entry of the process, in place of vLLM's own: which is called once a watch on the owner is set, and with the
    imports done for which garbage was not collected. vLLM collects all of it thrice while it starts: what was imported
    is not looked through for it."""
    from vllm.v1.engine.core import EngineCoreProc

    watch_owner()
    gc.freeze()
    gc.enable()
    try:
        EngineCoreProc.run_engine_core(*args, **kwargs)
    except SystemExit:  # the orderly end: all is released, and taking the interpreter apart would take seconds more
        atexit.register(os._exit, 0)
        raise


@contextmanager
def own_entry(early: EarlyContext | None) -> Iterator[None]:
    """While it lasts, vLLM starts its process through `run_engine_core`, and takes the one that has begun early."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    entry, make_context = EngineCoreProc.run_engine_core, utils.get_mp_context
    EngineCoreProc.run_engine_core = run_engine_core
    if early is not None:
        utils.get_mp_context = lambda: early
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core, utils.get_mp_context = entry, make_context


class WorkerExtension:
    """Methods that vLLM mixes into its worker; called by `collective_rpc`, while generation is paused."""

    model_runner: Any

    def hexcomb_load(self, weights: str) -> None:
        """Replaces every weight by the file's. After an error the model is unusable until a later call
        succeeds.
        """
        tensors = load_file(weights)
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        repack(self.model_runner.get_model())


def repack(model: torch.nn.Module) -> None:
    """Renews the packed copies that CPU layers compute from.

    Loading renews them only in layers whose own parameter arrived, which an output head tied to the
    embeddings has not: it would go on with the old weights without a word. Elsewhere than on CPU there are no
    such copies.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "cpu_linear", None) is not None and weight is not None and weight.numel():
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


@dataclass(frozen=True, slots=True)
class _Draw:
    """The noise of one row. `output_ids` is vLLM's own list, which grows as the row does."""

    seed: int
    first_position: int
    temperature: float
    output_ids: list[int]


class SeededNoise(LogitsProcessor):
    """Adds the noise of the seed, so that vLLM's greedy choice is the seeded sample."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._draws: dict[int, _Draw] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._draws, batch_update, _draw)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._draws:
            return logits
        draws = [self._draws.get(row, _NO_DRAW) for row in range(len(logits))]
        return perturb(
            logits,
            temperatures=[draw.temperature for draw in draws],
            seeds=[draw.seed for draw in draws],
            positions=[draw.first_position + len(draw.output_ids) for draw in draws],
        )


_NO_DRAW = _Draw(seed=0, first_position=0, temperature=0.0, output_ids=[])


def _draw(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Draw | None:
    extra = (params.extra_args or {}).get(NOISE_KEY)
    if extra is None:
        return None
    seed, first_position, temperature = extra
    return _Draw(seed, first_position, temperature, output_ids)
