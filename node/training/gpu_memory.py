"""The owner's share of the GPU's memory, in a process that uses torch on it. Impure: torch."""


def cap_gpu_memory(share: float) -> None:
    """Lets this process allocate no more than `share` (0 to 1; 0 = no limit) of each GPU's memory; beyond it torch
    raises its error for a full memory. Without a GPU there is nothing to cap."""
    import torch

    if share and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(share, index)
