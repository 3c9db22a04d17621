"""Keeps broken companions of torch out of this process.

vllm's CPU build pulls in builds of torchvision, torchaudio and torchcodec that need CUDA; importing one of them
breaks every transformers model. Text models need none of them, so on a CPU build of torch they are made
un-importable. Impure: changes `sys.modules` of the calling process, and of nobody else.
"""

import sys
from importlib import metadata

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def block_broken_extras() -> None:
    """Makes torch's companions un-importable where torch itself is a CPU build; call before importing transformers."""
    if not metadata.version("torch").endswith("+cpu"):
        return
    for name in COMPANIONS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
