"""Which engine a node runs. Impure: looks at what is installed; imports only the engine that is chosen."""

from importlib.util import find_spec
from typing import Literal

from node.rollout.engine import Engine
from protocol.errors import EngineError

EngineName = Literal["auto", "vllm", "transformers"]


def make_engine(
    name: EngineName = "auto", *, max_num_seqs: int = 64, max_model_len: int = 2048, gpu_memory_share: float = 0.0
) -> Engine:
    """A new engine, not yet started. `auto` takes vLLM where it is installed.

    `max_num_seqs` samples run at once, further ones wait; `max_model_len` bounds prompt and completion
    together. Of a GPU's memory no more than `gpu_memory_share` is taken; 0 = as the engine likes.
    """
    has_vllm = find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        raise EngineError(
            "The engine vllm is not installed",
            remedy="Install hexcomb[cpu] or hexcomb[gpu], or choose transformers.",
        )
    if name == "vllm" or (name == "auto" and has_vllm):
        from node.rollout.vllm_engine import VllmEngine

        return VllmEngine(max_num_seqs=max_num_seqs, max_model_len=max_model_len, gpu_memory_share=gpu_memory_share)
    from node.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(max_num_seqs=max_num_seqs, max_model_len=max_model_len, gpu_memory_share=gpu_memory_share)
