"""`make bench-gpu`: what only a CUDA machine can show; status 1 if a threshold is missed, or without such a machine.

The seeded noise as an accelerator computes it must equal the CPU's bit for bit, so that any node can say which token
had to win; then the swarm of `make demo-real` runs with its engines on the GPU.
"""

import sys
import time
from statistics import median

import numpy as np

from coordinator.demo_real import start_demo_real
from node.rollout import noise
from tests.bench.table import Figure, at_most, print_table, reported

NUM_ROWS, VOCABULARY, NUM_TURNS = 64, 49_152, 20
NUM_VERSIONS = 10


def noise_figures(device: str) -> list[Figure]:
    """The noise of `NUM_ROWS` samples over the vocabulary of SmolLM2, on the device and by numpy."""
    import torch

    chance = np.random.default_rng(7)
    seeds = [int(seed) for seed in chance.integers(-(2**63), 2**63 - 1, NUM_ROWS)]
    took_s, num_wrong, largest = list[float](), 0, 0.0
    for turn in range(NUM_TURNS):
        positions = [turn * NUM_ROWS + row for row in range(NUM_ROWS)]
        began_s = time.perf_counter()
        found_BV = noise.gumbel_on(torch.device(device), seeds, positions, vocab_size=VOCABULARY).cpu().numpy()
        took_s.append(time.perf_counter() - began_s)
        expected_BV = noise.gumbel(seeds, positions, vocab_size=VOCABULARY)
        num_wrong += int((found_BV.view(np.uint32) != expected_BV.view(np.uint32)).sum())
        largest = max(largest, float(np.abs(found_BV - expected_BV).max()))
    anchor = f"numpy on the CPU, {NUM_TURNS} steps of {NUM_ROWS} samples over {VOCABULARY} tokens"
    return [
        at_most(f"noise on {device}: values that differ in a bit", num_wrong, 0, anchor=anchor),
        reported(f"noise on {device}: largest difference", largest, anchor=anchor),
        reported(f"noise on {device}: one step", 1000 * median(took_s), unit="ms", anchor="its copy to the CPU in it"),
    ]


def main() -> int:
    """The bench."""
    import torch

    if not torch.cuda.is_available():
        print("bench-gpu: this machine has no CUDA device that torch can use; nothing was measured", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name())
    is_equal = print_table(noise_figures("cuda"))
    passed = start_demo_real(num_versions=NUM_VERSIONS, engines=("vllm", "transformers"), keep=None)
    return 0 if is_equal and passed else 1


if __name__ == "__main__":
    sys.exit(main())
