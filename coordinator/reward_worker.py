"""The child that runs reward functions, in a process that can do nothing but compute.

It holds neither tokenizer nor environment, weights nor keys. It gives up network, processes and files before the first
function is imported. Each call has its time and its share of output; a call that fails in any way is an error of that
call, whose samples are then missing, never 0. What a function does to this process beyond that ends it, and the
coordinator starts another.
"""

import argparse
import asyncio
import importlib
import inspect
import io
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec

from coordinator import grading
from coordinator.builtin_rewards import BUILT_IN
from coordinator.sandbox import Sandbox, readable_by_python
from protocol.child_serve import Emit, serve
from protocol.errors import EngineError, UsageError

MAX_PRINTED = 1 << 20
"""Characters in one call; more fail it."""

KEPT_PER_CALL = 4096
MAX_MESSAGE = 300
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NOT_COLUMNS = ("prompts", "completions", "completion_ids")

Reward = Callable[..., Any]


class LimitHit(BaseException):
    """A call ran into a limit; no `except Exception` of a function takes it for a wrong answer."""


class Functions:
    """Answers `grading.RewardRequest`; `OpenRewards` comes first."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._plan = grading.RewardPlan()
        self._functions: list[Reward] = []
        self._output = Output(sys.stderr)

    async def handle(self, request: msgspec.Struct, emit: Emit) -> msgspec.Struct:
        """One request; calls are made in the main thread, where the alarm works."""
        match request:
            case grading.OpenRewards(plan=plan):
                return self._open(plan)
            case grading.Call(number=number, samples=samples):
                return await self._call(number, samples)
        raise EngineError(f"the rewards got a request that they do not know: {type(request).__name__}")

    def _open(self, plan: grading.RewardPlan) -> grading.RewardsOpened:
        self._plan = plan
        folder = None if plan.folder is None else Path(plan.folder)
        readable = readable_by_python(folder, [Path(path) for path in plan.hidden])
        if folder is not None:
            sys.path.insert(0, str(folder))
        written = os.fstat(sys.stderr.fileno()).st_size + MAX_PRINTED
        kept = self._sandbox.close(readable, memory_bytes=plan.memory_bytes, written_bytes=written)
        sys.stdout = sys.stderr = self._output
        self._functions = [find_function(spec.function) for spec in plan.functions]
        return grading.RewardsOpened(
            tuple(one.sentence for one in kept if one.by), tuple(one.sentence for one in kept if not one.by)
        )

    async def _call(self, number: int, samples: Sequence[grading.Sample]) -> grading.Values:
        spec = self._plan.functions[number]
        self._output.begin()
        before, limit_s = asyncio.all_tasks(), self._plan.timeout_s
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            returned = self._functions[number](**arguments(samples, is_chat=spec.is_chat))
            if inspect.isawaitable(returned):
                signal.setitimer(signal.ITIMER_REAL, 0)  # it must not go off in the event loop
                async with asyncio.timeout(limit_s):
                    returned = await returned
            return values_of(returned, len(samples))
        except (LimitHit, SystemExit, KeyboardInterrupt, Exception) as error:
            traceback.print_exc()
            raise EngineError(
                f"the reward {spec.function!r} failed", why=f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for task in asyncio.all_tasks() - before:
                task.cancel()


def find_function(name: str) -> Reward:
    """A built-in reward, or the `function` of `module:function`. Raises `UsageError`."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (LimitHit, SystemExit, Exception) as error:
        traceback.print_exc()
        raise UsageError(
            f"the reward {name!r} cannot be had",
            why=f"{type(error).__name__}: {error}"[:MAX_MESSAGE],
            remedy="Put its module beside the run file, or install its package; it may read nothing else, has no "
            "network, and may write no file.",
        ) from None
    if not callable(found):
        raise UsageError(f"the reward {name!r} is no function", remedy="Name one as module:function.")
    return found  # type: ignore[no-any-return]


def arguments(samples: Sequence[grading.Sample], *, is_chat: bool) -> dict[str, Any]:
    """What the function is called with: prompts, completions, their ids, and each column as a list."""
    rows = [json.loads(sample.columns) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_COLUMNS)
    return {
        "prompts": [_said("user", sample.prompt) if is_chat else sample.prompt for sample in samples],
        "completions": [_said("assistant", sample.completion) if is_chat else sample.completion for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        **{name: [row.get(name) for row in rows] for name in names},
    }


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def values_of(returned: Any, num_samples: int) -> grading.Values:
    """What a function returned, as numbers and None. Raises `ValueError` unless it is one for each sample."""
    if not isinstance(returned, list | tuple) or len(returned) != num_samples:
        length = f"{len(returned)} values" if isinstance(returned, list | tuple) else type(returned).__name__
        raise ValueError(f"it returned {length} for {num_samples} completions")
    values = [_number(value) for value in returned]
    faults = [place for place, value in enumerate(values) if value is not None and not math.isfinite(value)]
    return grading.Values(
        tuple(None if place in faults else value for place, value in enumerate(values)), tuple(faults)
    )


def _number(value: Any) -> float | None:
    """NaN for what is no number."""
    if value is None:
        return None
    return float(value) if isinstance(value, numbers.Real) else math.nan


class Output(io.TextIOBase):
    """What functions print: the beginning of each call's goes to the log, too much of it fails the call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._num_printed = stream, 0

    def begin(self) -> None:
        """A new call."""
        self._num_printed = 0

    def write(self, text: str) -> int:
        """Raises `LimitHit` over `MAX_PRINTED`; a full log is passed over."""
        kept = text[: max(0, KEPT_PER_CALL - self._num_printed)]
        is_over, self._num_printed = self._num_printed > MAX_PRINTED, self._num_printed + len(text)
        if self._num_printed > MAX_PRINTED and not is_over:  # once: the traceback of it is printed here, too
            raise LimitHit(f"it printed more than {MAX_PRINTED} characters")
        try:
            self._stream.write(kept)
        except OSError:
            return len(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise LimitHit("it took too long")


def main() -> None:
    """`python -m coordinator.reward_worker --socket PATH`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    os.environ.update(ONE_THREAD)
    signal.signal(signal.SIGALRM, _on_alarm)
    sandbox = Sandbox()
    sandbox.leave_world()
    asyncio.run(serve(options.socket, Functions(sandbox).handle, requests=grading.RewardRequest))


if __name__ == "__main__":
    main()
