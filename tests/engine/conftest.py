"""Tiny random Qwen3 models, tied and untied, each with two sets of weights; and the reference by transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.torch_guard import block_broken_extras

block_broken_extras()

VOCAB_SIZE = 128
WEIGHT_SCALE = 0.12  # spreads the logits so far that the two sets of weights disagree visibly


@dataclass(frozen=True)
class TinyModel:
    """A model folder without weights, two weight files, and transformers' own models of them."""

    folder: Path
    files: dict[str, Path]
    references: dict[str, Any]

    def logprobs(self, which: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """What transformers says of each completion token under the weights `which`, in one unbatched pass."""
        import torch

        ids_1T = torch.tensor([[*prompt_ids, *completion_ids]])
        with torch.inference_mode():
            logprobs_TV = self.references[which](input_ids=ids_1T).logits[0].log_softmax(-1)
        start = len(prompt_ids) - 1
        return [float(logprobs_TV[start + i, token]) for i, token in enumerate(completion_ids)]


def build_tiny_model(folder: Path, *, tied: bool) -> TinyModel:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=WEIGHT_SCALE,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    files, references = {}, {}
    for number, which in enumerate("AB"):
        torch.manual_seed(number)
        model = Qwen3ForCausalLM(config).eval()
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        files[which] = folder.parent / f"{which}.safetensors"
        save_file(tensors, files[which])
        references[which] = model
    return TinyModel(folder, files, references)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference runs beside the engines on few cores."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
