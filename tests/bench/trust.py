"""What trust in an engine costs: `python -m tests.bench.trust MODEL_DIR [ENGINE ...]`.

Seconds of a start, of the self-test after it, and of a load with the canary's probe scored and without. MODEL_DIR holds
`config.json` and `model.safetensors` in float32.
"""

import asyncio
import sys
import time
from pathlib import Path

from node.rollout.selection import make_engine
from node.rollout.self_test import judge_engine
from node.torch_guard import block_broken_extras
from protocol.canary import TOLERANCES, probe_for
from protocol.ids import Version
from tests.bench.table import Figure, at_most, print_table, reported

NUM_LOADS = 5
"""Best of so many."""


async def figures_of(name: str, model_dir: Path) -> list[Figure]:
    """The figures of one engine."""
    weights, engine = model_dir / "model.safetensors", make_engine(name)
    began_s = time.monotonic()
    await engine.start(model_dir, Version(0), weights)
    start_s = time.monotonic() - began_s
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        found = await judge_engine(engine, model_dir=model_dir, weights=weights)
        for number in range(2 * NUM_LOADS):
            is_probed = number % 2 == 1
            began_s = time.monotonic()
            probe = probe_for(engine.vocab_size) if is_probed else None
            await engine.load(Version(0), weights, probe=probe)
            times[is_probed].append(time.monotonic() - began_s)
    finally:
        await engine.close()
    allowed = TOLERANCES[engine.dtype].max_k3
    return [
        reported(f"{name}: start", start_s, unit="s", anchor="-"),
        reported(f"{name}: self-test", found.took_s, unit="s", anchor="-"),
        at_most(f"{name}: k3", found.k3 or 0.0, allowed, anchor="the trainer's forward, same weights"),
        reported(f"{name}: load", min(times[False]), unit="s", anchor="-"),
        reported(f"{name}: load and probe", min(times[True]), unit="s", anchor="-"),
    ]


async def main(model_dir: Path, names: list[str]) -> bool:
    """Prints the table; whether every threshold was reached."""
    block_broken_extras()
    return print_table([figure for name in names for figure in await figures_of(name, model_dir)])


if __name__ == "__main__":
    wanted = sys.argv[2:] or ["transformers", "vllm"]
    sys.exit(0 if asyncio.run(main(Path(sys.argv[1]), wanted)) else 1)
