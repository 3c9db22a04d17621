"""How fast this machine trains and samples a given model: short measurements, not estimates from tables.
Impure.

The model is the run's own shape with random weights. Invariant: a model that is too large to be built for a
measurement of a second is measured with fewer layers, and the rate is scaled by the parameters that do the
work.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from node.compute.messages import Probe, Probed
from node.torch_guard import block_broken_extras
from node.training.gpu_memory import cap_gpu_memory
from protocol.errors import ModelMissingError

MEASURE_S = 1.0
TRAIN_ROWS, TRAIN_LENGTH = 8, 64
DECODE_ROWS, DECODE_STEPS = 8, 32
MAX_PARAMETERS = {"cuda": 300_000_000, "cpu": 50_000_000}
"""Of what is measured whole."""
REDUCED_LAYERS = 2


def probe(request: Probe) -> Probed:
    """Both rates, and memory and device of this machine. Takes a few seconds."""
    model_dir = Path(request.model_dir)
    cap_gpu_memory(request.gpu_memory_share)
    return Probed(
        decode_tokens_per_s=decode_tokens_per_s(model_dir),
        train_tokens_per_s=train_tokens_per_s(model_dir),
        memory_bytes=memory_bytes(),
        device=device_name(),
    )


def train_tokens_per_s(model_dir: Path, *, measure_s: float = MEASURE_S) -> float:
    """Tokens per second through forward and backward pass, in float32, in batches of 512."""
    model, share = _model(model_dir)
    ids_BL = _token_ids(model, TRAIN_ROWS, TRAIN_LENGTH)

    def step() -> int:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss.backward()
        return ids_BL.numel()

    return _rate(step, measure_s) * share


def decode_tokens_per_s(model_dir: Path, *, measure_s: float = MEASURE_S) -> float:
    """Tokens per second when sampling 8 sequences at once with a cache of keys and values."""
    model, share = _model(model_dir)
    prompt_BL = _token_ids(model, DECODE_ROWS, 16)

    def step() -> int:
        ids_BL, cache = prompt_BL, None
        with torch.inference_mode():
            for _ in range(DECODE_STEPS):
                output: Any = model(input_ids=ids_BL, past_key_values=cache, use_cache=True)
                ids_BL, cache = output.logits[:, -1:].argmax(dim=-1), output.past_key_values
        return DECODE_ROWS * DECODE_STEPS

    return _rate(step, measure_s) * share


def memory_bytes() -> int:
    """Memory that an engine or a trainer can have: the GPU's free memory, else what the machine has
    available.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def device_name() -> str:
    """The name of the first GPU, or "cpu"."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def _model(model_dir: Path) -> tuple[Any, float]:
    """A model with random weights, and how many times faster it is than the whole one, as a factor below 1."""
    block_broken_extras()
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():
        raise ModelMissingError(f"{model_dir} has no config.json")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = _num_working_parameters(AutoModelForCausalLM, config)
    if whole > MAX_PARAMETERS[device]:
        config.num_hidden_layers = min(config.num_hidden_layers, REDUCED_LAYERS)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    share = _num_working_parameters(AutoModelForCausalLM, config) / whole
    with torch.random.fork_rng(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model.eval(), share


def _num_working_parameters(factory: Any, config: Any) -> int:
    """Parameters that each token is multiplied by: all but the table of input embeddings, unless it is
    tied.
    """
    with torch.device("meta"):
        model = factory.from_config(config, trust_remote_code=False)
    num_parameters = sum(p.numel() for p in model.parameters())
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return int(num_parameters if is_tied else num_parameters - model.get_input_embeddings().weight.numel())


def _token_ids(model: Any, num_rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(model.config.vocab_size, (num_rows, length), generator=generator)
    return ids_BL.to(next(model.parameters()).device)


def _rate(step: Callable[[], int], measure_s: float) -> float:
    """Tokens per second of `step`, which returns how many it did; the first call, which warms up, does not
    count.
    """
    step()
    _synchronize()
    started, num_tokens = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - started) < measure_s or not num_tokens:
        num_tokens += step()
        _synchronize()
    return num_tokens / elapsed_s if elapsed_s else 0.0


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
