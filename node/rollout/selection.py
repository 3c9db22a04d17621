"""Which engine a node runs. Impure: looks at what is installed; imports only the engine that is chosen."""

from importlib.util import find_spec

from node.rollout.engine import Engine
from node.rollout.memory import Limits
from protocol.errors import EngineError


def make_engine(
    name: str, *, max_num_seqs: int = 64, max_model_len: int = 2048, limits: Limits | None = None
) -> Engine:
    """A new engine, not yet started: `vllm` or `transformers`. Raises `EngineError` where it is not installed.

    At most `max_num_seqs` samples run at once, further ones wait; `max_model_len` bounds prompt and completion
    together. Both become less where `limits` and the memory that is free at the start allow no more.
    """
    limits = limits or Limits()
    if name == "vllm" and find_spec("vllm") is None:
        raise EngineError(
            "The engine vllm is not installed",
            remedy="Install hexcomb[cpu] or hexcomb[gpu], or choose transformers.",
        )
    if name == "vllm":
        from node.rollout.vllm_engine import VllmEngine

        return VllmEngine(max_num_seqs=max_num_seqs, max_model_len=max_model_len, limits=limits)
    from node.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(max_num_seqs=max_num_seqs, max_model_len=max_model_len, limits=limits)
