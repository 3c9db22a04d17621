"""Version 0 for demonstrations: a Qwen3 of under a million parameters with its own tokenizer. Writes one folder.

Shape letters: D digits, E hidden size, V vocabulary.

Invariants: the folder is an ordinary Hugging Face model (transformers and vLLM load it); embeddings are tied, and the
tied tensor is stored once; equal environment and seed give equal bytes on one machine. Imported by children alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.tokenizer import END_ID, PAD_ID, vocabulary_of, write_tokenizer
from node.torch_guard import block_broken_extras
from node.training.warmup import WarmUpProgress, WarmUpSettings, warm_up, warm_up_tasks
from protocol.tasks import Environment, load_tokenizer


@dataclass(frozen=True, slots=True)
class TinyShape:
    """The model's sizes; a head of at least 32 is what vLLM's attention on CPU can do."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int = 32
    feed_forward: int = 384
    max_length: int = 512


@dataclass(frozen=True, slots=True)
class TinyBase:
    """What was made: `accuracy` is held-out and greedy, nought without a warm-up."""

    folder: Path
    num_parameters: int
    warm_up_steps: int
    accuracy: float


NUM_VOCABULARY_TASKS = 2_000
DIGIT_REACH = 4.0
"""Digits so far apart still share 60 % of their embedding's direction."""
DIGIT_NOISE = 0.02


def create_tiny_base(
    folder: Path,
    environment: Environment,
    *,
    seed: int = 0,
    warm_up_first: bool = True,
    shape: TinyShape | None = None,
    settings: WarmUpSettings | None = None,
    progress: Callable[[WarmUpProgress], None] = lambda _: None,
) -> TinyBase:
    """Writes configuration, tokenizer and `model.safetensors` into `folder`, after a supervised warm-up if wanted.

    Raises `EngineError` when the warm-up does not reach its target. Takes seconds to a minute on one core.
    """
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = vocabulary_of(_texts(environment, seed))
    write_tokenizer(folder, vocabulary, max_length=shape.max_length)
    model = build_tiny_model(shape, num_tokens=len(vocabulary), seed=seed)
    order_digits(model, vocabulary, seed=seed)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    steps, accuracy = 0, 0.0
    if warm_up_first:
        last = warm_up(model, environment, load_tokenizer(folder), seed=seed, settings=settings, progress=progress)
        steps, accuracy = last.step, last.accuracy
    write_weights(model, folder / "model.safetensors")
    return TinyBase(folder, sum(p.numel() for p in model.parameters()), steps, accuracy)


def build_tiny_model(shape: TinyShape, *, num_tokens: int, seed: int) -> Any:
    """A float32 `Qwen3ForCausalLM` with weights drawn from `seed`; its vocabulary is a multiple of 32."""
    block_broken_extras()
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=-(-num_tokens // 32) * 32,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True)
    return model.float()


def order_digits(model: Any, vocabulary: Sequence[str], *, seed: int) -> None:
    """Draws the digits' embeddings anew so that near digits are alike: rows of a Gaussian process over 0 to 9.

    With independent rows a tiny model learns the training prompts by heart; with these it generalizes from them.
    """
    rows = {int(piece): row for row, piece in enumerate(vocabulary) if len(piece) == 1 and piece in "0123456789"}
    digits_D = torch.tensor(sorted(rows), dtype=torch.float64)
    near_DD = torch.exp(-((digits_D[:, None] - digits_D) ** 2) / (2 * DIGIT_REACH**2))
    mixing_DD = torch.linalg.cholesky((near_DD + DIGIT_NOISE * torch.eye(len(rows))) / (1 + DIGIT_NOISE))
    noise_DE = torch.randn(len(rows), model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        embedding_VE = model.get_input_embeddings().weight
        embedding_VE[[rows[int(digit)] for digit in digits_D]] = (
            mixing_DD.float() @ noise_DE * model.config.initializer_range
        )


def write_weights(model: Any, path: Path) -> None:
    """Writes the model's parameters by name to one safetensors file; a tied tensor once, under its first name."""
    from safetensors.torch import save_file

    tensors = {name: p.detach().contiguous().cpu() for name, p in sorted(model.named_parameters())}
    save_file(tensors, path, metadata={"format": "pt"})


def use_one_thread() -> None:
    """A tiny model's steps are too short to share, and one thread gives the same bits anywhere. For a whole process."""
    torch.set_num_threads(1)


def convert_weights(model_dir: Path, path: Path) -> None:
    """Writes the weights of a Hugging Face folder as runs have them: float32, each tensor once, by sorted name."""
    block_broken_extras()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    write_weights(model, path)


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes a GGUF file's model into `folder`: configuration, tokenizer and its chat template, float32 weights."""
    block_broken_extras()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **read)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **read)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # what was quantized is float32 now, and would be refused as it is
    folder.mkdir(parents=True)
    type(model.config).from_dict(settings).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_weights(model, folder / "model.safetensors")


def _texts(environment: Environment, seed: int) -> Iterator[str]:
    """The training prompts and answers that the vocabulary is made from."""
    for task, _ in zip(warm_up_tasks(environment, seed), range(NUM_VOCABULARY_TASKS), strict=False):
        yield task.prompt
        yield task.answer
