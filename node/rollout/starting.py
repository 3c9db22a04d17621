"""Starts the engine that `choice` says, measured where it says so. Impure: engines.

Invariant: one engine exists at a time, and the one that is handed out has stood its test.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import cast

from node.compute.messages import EngineRate, Started, StartRollout
from node.rollout.choice import Choice, Machine, choose, words
from node.rollout.engine import Chunk, Engine, Sample, SampleRequest
from node.rollout.model_files import read_layout
from node.rollout.self_test import judge_engine
from node.torch_guard import block_broken_extras
from protocol.errors import EngineError
from protocol.ids import Version
from protocol.run import SamplingContract

MEASURE_S = 1.5
MAX_MEASURE_S = 15.0
PROMPT_TOKENS = 8
WARM_UP_TOKENS = 4
BATCHES = 4
"""Samples that are asked for at once, in seats: as many wait as an engine that is kept busy has waiting."""

UNSEEN = Machine(has_vllm=False, on_gpu=False, num_parameters=0, is_first=False)
Build = Callable[[str], Engine]


async def start_engine(order: StartRollout, build: Build) -> tuple[Engine, Started]:
    """The engine that serves `order`; `build` makes one by its name. Raises `EngineError` when none starts, and
    `UsageError`."""
    machine = await asyncio.to_thread(_look, order) if order.engine == "auto" else UNSEEN
    choice = choose(order.engine, machine, order.rates, now_s=time.time())
    starter = _Starter(order, build)
    if choice.is_measured:
        choice = await starter.measure(choice, machine)
    return await starter.serve(choice)


class _Starter:
    """One start. `rates` are what is to be remembered of it."""

    def __init__(self, order: StartRollout, build: Build) -> None:
        self._order, self._build = order, build
        self._engine: Engine | None = None
        self._name, self._k3 = "", cast("float | None", None)
        self.rates = {rate.engine: rate for rate in order.rates}

    async def measure(self, choice: Choice, machine: Machine) -> Choice:
        """Starts and measures each engine, and says which to serve with. Raises `EngineError` when none started."""
        errors = []
        for name in choice.names:
            try:
                engine = await self._start(name)
                rate = await tokens_per_s(engine, self._order.contract)
                self.rates[name] = EngineRate(name, rate, at_s=time.time())
            except EngineError as error:
                errors.append(error)
                self._note_failure(name, error)
            print(f"engine measured: {words(self.rates[name])}", flush=True)
        if len(errors) == len(choice.names):
            raise errors[-1]
        measured = choose(self._order.engine, machine, tuple(self.rates.values()), now_s=time.time())
        return Choice(tuple(name for name in measured.names if self.rates[name].tokens_per_s), measured.why)

    async def serve(self, choice: Choice) -> tuple[Engine, Started]:
        """The first engine of the choice that starts."""
        why = choice.why
        for position, name in enumerate(choice.names):
            try:
                engine = await self._start(name)
            except EngineError as error:
                self._note_failure(name, error)
                if position == len(choice.names) - 1:
                    raise
                print(f"engine {name} did not start, trying the next: {error}", flush=True)
                why = words(self.rates[name])
                continue
            seats, rates = engine.max_num_seqs, tuple(self.rates.values())
            return engine, Started(engine=name, num_seats=seats, k3=self._k3, choice=why, rates=rates)
        raise AssertionError("there is always one engine to try")

    async def _start(self, name: str) -> Engine:
        """The engine of that name, judged: the one that runs, or a new one in its place."""
        if self._engine is not None and self._name == name:
            return self._engine
        await self._close()
        order, weights = self._order, Path(self._order.weights)
        model_dir, version = Path(order.model_dir), Version(order.version)
        self._engine, self._name = self._build(name), name
        try:
            await self._engine.start(model_dir, version, weights)
            found = await judge_engine(self._engine, model_dir=model_dir, weights=weights, canary=order.canary)
        except EngineError:
            await self._close()
            raise
        print(f"engine {name} stands its test: {found}", flush=True)
        self._k3 = found.k3
        return self._engine

    def _note_failure(self, name: str, error: EngineError) -> None:
        self.rates[name] = EngineRate(name, 0.0, why=error.sentence(), at_s=time.time())

    async def _close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()


async def tokens_per_s(
    engine: Engine,
    contract: SamplingContract,
    *,
    measure_s: float = MEASURE_S,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """How fast the engine samples with all seats taken, prompts included. It has nothing else to do meanwhile, and
    has nothing left to do afterwards. Raises `EngineError`."""
    seats, number = engine.max_num_seqs, 0
    warm_up = [_request(engine, contract, i, longest=WARM_UP_TOKENS) for i in range(seats)]
    await _count(engine, warm_up, is_over=lambda _: False)
    started_s, num_tokens = clock(), 0

    def is_over(num_more: int) -> bool:
        elapsed_s, is_enough = clock() - started_s, num_tokens + num_more >= seats
        return elapsed_s >= (measure_s if is_enough else MAX_MEASURE_S)

    while not is_over(0):
        number += 1
        requests = [_request(engine, contract, number * seats * BATCHES + i) for i in range(seats * BATCHES)]
        num_tokens += await _count(engine, requests, is_over=is_over)
    return num_tokens / (clock() - started_s)


async def _count(engine: Engine, requests: Sequence[SampleRequest], *, is_over: Callable[[int], bool]) -> int:
    """Tokens sampled of these requests until it is over, or all are finished."""
    lengths: dict[str, int] = {}
    parts = engine.generate(requests, chunk_tokens=8, chunk_s=0.1)
    async with aclosing(cast("AsyncGenerator[Chunk | Sample, None]", parts)):
        async for part in parts:
            before = part.start if isinstance(part, Chunk) else 0
            lengths[part.key] = before + len(part.token_ids)
            if is_over(sum(lengths.values())):
                break
    return sum(lengths.values())


def _request(engine: Engine, contract: SamplingContract, number: int, *, longest: int = 1 << 30) -> SampleRequest:
    """A prompt that shares nothing with others: no engine can save its computation."""
    ids = tuple(
        (number * 31 + position * 7 + number // engine.vocab_size) % engine.vocab_size
        for position in range(PROMPT_TOKENS)
    )
    num_new = min(contract.max_new_tokens, longest)
    return SampleRequest(f"measure {number}", ids, num_new, seed=number, temperature=contract.temperature)


def _look(order: StartRollout) -> Machine:
    block_broken_extras()
    import torch

    layout = read_layout(Path(order.weights))
    return Machine(
        has_vllm=find_spec("vllm") is not None,
        on_gpu=torch.cuda.is_available(),
        num_parameters=sum(prod(tensor.shape) for tensor in layout.values()),
        is_first=order.is_first,
        is_careful=order.restraint > 0,
    )
