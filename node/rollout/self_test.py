"""Whether an engine computes what it was given: judged at its start, and by a canary after each load.

At the start: its log-probabilities of the probe against the trainer's forward on the same weights; then a load of
changed weights, which must show as the same forward says; then the first weights again, which must be back. Invariant:
an engine that leaves these functions without an error serves the weights that it names. Impure: the engine, files.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.rollout.engine import Engine
from node.rollout.reference import Reference
from protocol.canary import TOLERANCES, Probe, max_difference, mean_k3, probe_for
from protocol.errors import EngineUntrustedError

REMEDY = "The node does not sample with it. Another engine may do (`engine` in node.toml); if none does, report it."


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was found: `k3` against the trainer's forward (None where there was nothing to compare with), the largest
    difference after the changed weights and after the first ones were loaded, and what it took."""

    k3: float | None
    changed_difference: float | None
    restored_difference: float | None
    took_s: float


async def judge_engine(
    engine: Engine, *, model_dir: Path, weights: Path, canary: Sequence[float] = (), reference: bool = True
) -> SelfTest:
    """Judges an engine that has just loaded `weights`; `canary` is what the version's trainers expect of the probe,
    empty where unknown. Raises `EngineUntrustedError`.

    Where there is no room for a second copy of the model the canary alone is judged by.
    """
    started_s = time.monotonic()
    probe = probe_for(engine.vocab_size)
    found = await engine.score(probe.prompt_ids, probe.completion_ids)
    check_canary(found, canary, dtype=engine.dtype)
    if not (reference and await asyncio.to_thread(Reference.is_affordable, weights)):
        k3 = mean_k3(canary, found) if canary else None
        return SelfTest(k3, None, None, time.monotonic() - started_s)
    judge = await asyncio.to_thread(Reference.load, model_dir, weights)
    k3 = check_contract(found, await asyncio.to_thread(judge.score, probe), dtype=engine.dtype)
    with tempfile.TemporaryDirectory(prefix="hexcomb-self-test-") as folder:
        changed = Path(folder) / "changed.safetensors"
        await asyncio.to_thread(judge.change, changed)
        expected = await asyncio.to_thread(judge.score, probe)
        del judge
        away = await _load(engine, changed, probe, expected, what="changed weights")
        back = await _load(engine, weights, probe, found, what="the first weights, after others,")
    return SelfTest(k3, away, back, time.monotonic() - started_s)


def check_contract(sampler: Sequence[float], trainer: Sequence[float], *, dtype: str) -> float:
    """The k3 of sampler and trainer. Raises `EngineUntrustedError` where it is over what the type allows: importance
    ratios would be wrong from the start."""
    k3, allowed = mean_k3(trainer, sampler), TOLERANCES[dtype].max_k3
    if not k3 <= allowed:
        raise EngineUntrustedError(
            "the rollout engine may not sample",
            why=f"k3 between its log-probabilities and the trainer's is {k3:.2g}, over {allowed:g} for {dtype}",
            remedy=REMEDY,
        )
    return k3


def check_canary(found: Sequence[float], canary: Sequence[float], *, dtype: str) -> float | None:
    """The largest difference. Raises `EngineUntrustedError` where the probe is not what the version's trainers expect;
    nothing is expected where `canary` is empty."""
    return _check(found, canary, dtype=dtype, what="the version's canary") if canary else None


async def _load(engine: Engine, weights: Path, probe: Probe, expected: Sequence[float], *, what: str) -> float:
    found = await engine.load(engine.version, weights, probe=probe)
    return _check(found, expected, dtype=engine.dtype, what=what)


def _check(found: Sequence[float], expected: Sequence[float], *, dtype: str, what: str) -> float:
    difference, allowed = max_difference(found, expected), TOLERANCES[dtype].max_difference
    if not difference <= allowed:
        raise EngineUntrustedError(
            "the rollout engine may not sample",
            why=f"its log-probabilities of {what} are off by {difference:.2g}, over {allowed:g} for {dtype}",
            remedy=REMEDY,
        )
    return difference
