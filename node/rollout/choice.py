"""Which engines are tried, in which order, and whether both are measured first. Pure: the time is an argument.

Both are measured back to back or not at all, since a machine that is busy makes a rate that is taken alone worthless.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from node.compute.messages import EngineRate
from protocol.errors import UsageError

SMALL_PARAMETERS = 20_000_000
"""Below, plain transformers is about as fast and starts several times sooner: a first start does not wait for vLLM."""
FAILURE_HOLDS_S = 86_400.0
"""An engine that did not start is tried again after so long."""
NAMES = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the choice depends on beside the rates. `is_careful`: the engine is started after a crash."""

    has_vllm: bool
    on_gpu: bool
    num_parameters: int
    is_first: bool
    is_careful: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Engines to try in this order, and why, for people. `is_measured` says that all of them are measured first."""

    names: tuple[str, ...]
    why: str
    is_measured: bool = False


def choose(wish: str, machine: Machine, rates: Sequence[EngineRate], *, now_s: float) -> Choice:
    """What to do about the owner's `wish`; `now_s` is Unix time. Raises `UsageError`."""
    if wish in NAMES:
        return Choice((wish,), "as its owner chose")
    if wish != "auto":
        raise UsageError(f"there is no engine {wish!r}", remedy="Choose auto, vllm or transformers.")
    if not machine.has_vllm:
        return Choice(("transformers",), "vllm is not installed")
    if machine.on_gpu:
        return Choice(("vllm", "transformers"), "vllm comes first on a GPU, unmeasured")
    valid = {rate.engine: rate for rate in rates if is_valid(rate, now_s=now_s)}
    if all(name in valid for name in NAMES):
        best_first = sorted(valid.values(), key=lambda rate: -rate.tokens_per_s)
        return Choice(tuple(rate.engine for rate in best_first), "; ".join(map(words, best_first)))
    is_small = machine.num_parameters < SMALL_PARAMETERS
    if machine.is_careful:
        return Choice(NAMES if is_small else NAMES[::-1], "not measured after a crash")
    if is_small and machine.is_first:
        return Choice(NAMES, "it starts sooner, and the model is small; both are measured at the next start")
    return Choice(NAMES, "both are measured", is_measured=True)


def is_valid(rate: EngineRate, *, now_s: float) -> bool:
    """A rate holds as long as the machine is the same; that an engine did not start, for a day."""
    return rate.tokens_per_s > 0 or 0 <= now_s - rate.at_s < FAILURE_HOLDS_S


def words(rate: EngineRate) -> str:
    """One rate for people."""
    return f"{rate.engine} {rate.tokens_per_s:.0f} tokens/s" if rate.tokens_per_s else f"no {rate.engine}: {rate.why}"
