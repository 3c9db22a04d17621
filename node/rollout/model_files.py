"""What an engine knows of a model before it computes anything: sizes, and the layout of the one weight file.

A layout is the name, dtype and shape of every tensor. Engines compare layouts before they pause, because
vLLM takes a file that lacks a tensor without a word and then serves uninitialised memory. Invariant: a file
that passed `check_layout` can be loaded over the weights of the start. Impure: reads files.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from node.rollout.engine import SampleRequest
from protocol.errors import EngineError, ModelRefusedError, WeightsUnfitError

_HEAD = "lm_head.weight"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NUM_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file; `dtype` as safetensors writes it (`F32`, `BF16`)."""

    dtype: str
    shape: tuple[int, ...]


Layout = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as an engine sees it. `dtype` is torch's name; `max_len` bounds prompt plus completion."""

    vocab_size: int
    max_len: int
    dtype: str
    tied: bool
    kv_bytes_per_token: int
    layout: Layout

    def check(self, requests: Sequence[SampleRequest]) -> None:
        """Raises `EngineError` for a request that the model cannot take; an id out of range would end a GPU
        context.
        """
        for request in requests:
            self.check_ids(request.prompt_ids, extra=request.max_new_tokens)
            sound = (
                request.max_new_tokens >= 1
                and request.first_position >= 0
                and -(2**63) <= request.seed < 2**63
                and math.isfinite(request.temperature)
                and request.temperature >= 0
            )
            if not sound:
                raise EngineError(
                    f"The request {request.key} cannot be sampled",
                    why="its length, seed, position or temperature is out of range",
                )

    def check_ids(self, ids: Sequence[int], *, extra: int = 0) -> None:
        """Raises `EngineError` unless `ids` are some, in range, and leave room for `extra` more."""
        if not ids or not all(0 <= token < self.vocab_size for token in ids):
            raise EngineError("The token ids were refused", why=f"they are empty or not below {self.vocab_size}")
        if len(ids) + extra > self.max_len:
            raise EngineError(
                "The token ids were refused", why=f"{len(ids)} and {extra} more exceed {self.max_len} tokens"
            )


def read_layout(weights: Path) -> Layout:
    """The layout of a safetensors file; `EngineError` when it cannot be read or is cut short."""
    try:
        with safe_open(weights, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise EngineError(f"The weight file {weights} cannot be read", why=str(error)) from error


def check_layout(found: Layout, expected: Layout, *, weights: Path) -> None:
    """Raises `WeightsUnfitError` naming the first differences, unless the two are equal."""
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    changed = sorted(name for name in expected.keys() & found.keys() if found[name] != expected[name])
    complaints = [
        f"{len(names)} {word} ({', '.join(names[:_NUM_NAMES_SHOWN])})"
        for word, names in (("missing", missing), ("unknown", extra), ("of another shape or dtype", changed))
        if names
    ]
    if complaints:
        raise WeightsUnfitError(
            f"The weight file {weights} does not fit the model", why="tensors are " + "; ".join(complaints)
        )


def read_facts(model_dir: Path, weights: Path, *, max_model_len: int, trust_remote_code: bool = False) -> ModelFacts:
    """Reads configuration and weight header and checks that they are of one model. Imports transformers:
    seconds. Raises `ModelRefusedError` for a model of an unknown kind, or one with code of its own that is not trusted.

    A file without an output head means that the head is tied to the embeddings, whatever the configuration
    says.
    """
    layout = read_layout(weights)
    if not layout:
        raise EngineError(f"The weight file {weights} is empty")
    tied = _HEAD not in layout
    largest = max(layout.values(), key=lambda spec: math.prod(spec.shape))
    if largest.dtype not in _DTYPES:
        raise EngineError(f"The weights are {largest.dtype}", remedy=f"Use one of {', '.join(_DTYPES)}.")
    config, shapes = _config_and_shapes(model_dir, tied=tied, trust_remote_code=trust_remote_code)
    expected = {
        name: TensorSpec(layout[name].dtype if name in layout else largest.dtype, shape)
        for name, shape in shapes.items()
    }
    check_layout(layout, expected, weights=weights)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_bytes = 4 if largest.dtype == "F32" else 2
    return ModelFacts(
        vocab_size=config.vocab_size,
        max_len=min(max_model_len, config.max_position_embeddings),
        dtype=_DTYPES[largest.dtype],
        tied=tied,
        kv_bytes_per_token=2 * config.num_hidden_layers * num_kv_heads * head_dim * num_bytes,
        layout=layout,
    )


def stage_model(folder: Path, model_dir: Path, weights: Path, *, tied: bool) -> None:
    """Makes `folder` look like a Hugging Face checkpoint: the configuration, and a link to the weight file."""
    config = json.loads((model_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    (folder / "model.safetensors").symlink_to(weights.resolve())
    for code in model_dir.glob("*.py"):  # there is none but where `check_code` let it pass
        shutil.copyfile(code, folder / code.name)


def check_code(model_dir: Path, *, trust_remote_code: bool) -> None:
    """Raises `ModelRefusedError` where the model comes with code that would run here, unless the owner trusts it."""
    try:
        has_code = "auto_map" in json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError, TypeError) as error:
        raise ModelRefusedError(f"the configuration in {model_dir} cannot be read", why=str(error)) from error
    if has_code and not trust_remote_code:
        raise ModelRefusedError(
            "the model was refused",
            why="it brings code of its own, which would run on this machine",
            remedy="Only if you trust whoever made it: set `trust_remote_code = true` in node.toml.",
        )


def _config_and_shapes(
    model_dir: Path, *, tied: bool, trust_remote_code: bool
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The configuration, and the shape of every tensor that a checkpoint of it holds, from a model without
    memory.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    check_code(model_dir, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, tie_word_embeddings=tied, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a configuration of strangers may break a model's constructor in any way
        raise ModelRefusedError(
            f"the model in {model_dir} was refused",
            why=f"transformers does not know its kind, or its configuration is broken: {error}",
        ) from error
    names = {name for name, _ in model.named_parameters()}  # one name for each tied group
    state = model.state_dict()
    buffers = state.keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return config, {name: tuple(state[name].shape) for name in names | buffers}
