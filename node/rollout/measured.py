"""The memory that an engine finds at its start. Impure: reads the system's files; imports torch inside functions
alone."""

from dataclasses import replace
from pathlib import Path

import psutil

from node.rollout.memory import Limits, Memory, Room, room_for
from node.rollout.model_files import ModelFacts, read_facts

CPU_WEIGHT_COPIES = 2.0
"""While an update is read the old weights are there too."""
GPU_WEIGHT_COPIES = 1.2
CPU_CACHE_SHARE, GPU_CACHE_SHARE = 0.25, 0.85
"""Other programs live beside an engine on a CPU; what is left of a GPU is for activations."""
MAX_CPU_CACHE_BYTES = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def look(
    model_dir: Path, weights: Path, *, max_num_seqs: int, max_model_len: int, limits: Limits
) -> tuple[ModelFacts, Room]:
    """The model, and what an engine of it may take of this machine as it is now. Raises `ModelRefusedError`, and
    `WeightsUnfitError` where folder and file are not of one model."""
    facts = read_facts(model_dir, weights, max_model_len=max_model_len, trust_remote_code=limits.trust_remote_code)
    room = room_for(
        device_memory(limits.cache_share, gpu_memory_share=limits.gpu_memory_share),
        weight_bytes=weights.stat().st_size,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        max_len=facts.max_len,
        expected_tokens=limits.expected_tokens or facts.max_len,
        max_num_seqs=max_num_seqs,
    )
    return replace(facts, max_len=room.max_len), room


def device_memory(cache_share: float, *, gpu_memory_share: float = 0.0) -> Memory:
    """The GPU's where there is one, as far as the owner allows, else the machine's; `cache_share` of the usual share is
    for the cache."""
    import torch

    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        free_bytes = min(free_bytes, int(total_bytes * (gpu_memory_share or 1.0)))
        return Memory(free_bytes, GPU_WEIGHT_COPIES, GPU_CACHE_SHARE * cache_share, free_bytes)
    most = int(MAX_CPU_CACHE_BYTES * cache_share)
    return Memory(free_bytes_here(), CPU_WEIGHT_COPIES, CPU_CACHE_SHARE * cache_share, most)


def free_bytes_here(cgroup: Path = CGROUP) -> int:
    """What programs may still take: of the machine, and of the container where one sets a limit."""
    free = psutil.virtual_memory().available
    try:
        most, used = (cgroup / "memory.max").read_text(), int((cgroup / "memory.current").read_text())
        caches = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        if most.strip() == "max":
            return free
        return max(0, min(free, int(most) - used + int(caches["inactive_file"])))  # file caches give way
    except (OSError, ValueError, KeyError):  # no container, or one of another kind
        return free
