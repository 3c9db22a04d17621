"""The rollout job of the compute child: an engine, and the environment that prompts come from. Impure.

Invariant: a slot's tokens leave as one `SlotFilled` event whose segments say which version sampled each;
the reply to `Generate` comes after the last of them. Imports torch only through the engine that it starts.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import msgspec

from node.compute.messages import (
    Done,
    Generate,
    Load,
    MakePrompts,
    Prompts,
    SlotFilled,
    Started,
    StartRollout,
)
from node.rollout.engine import Engine, Sample, SampleRequest
from node.rollout.selection import EngineName, make_engine
from protocol.child import Emit
from protocol.errors import EngineError, ModelMissingError, UsageError
from protocol.ids import TaskKey, Version
from protocol.run import SamplingContract
from protocol.tasks import Environment, Tokenizer, load_tokenizer, make_environment, regenerate

PROMPT_ROOM = 4096
"""Tokens kept free for prompts beside the longest completion, where the model allows so many."""


class RolloutJob:
    """One engine at work. `start` makes it, `handle` serves it, `close` ends it."""

    def __init__(self, engine: Engine, order: StartRollout) -> None:
        self._engine, self._order = engine, order
        self._source: tuple[Environment, Tokenizer] | None = None

    @classmethod
    async def start(cls, order: StartRollout) -> "tuple[RolloutJob, Started]":
        """The job that `order` asks for. Raises `EngineError` when no engine starts."""
        names: tuple[EngineName, ...] = _engine_names(order.engine)
        model_dir, version, weights = Path(order.model_dir), Version(order.version), Path(order.weights)
        max_model_len = _max_model_len(model_dir, order.contract)
        for position, name in enumerate(names):
            engine = make_engine(name, max_model_len=max_model_len)
            try:
                await engine.start(model_dir, version, weights)
            except EngineError as error:
                await engine.close()
                if position == len(names) - 1:
                    raise
                print(f"engine {name} did not start, trying the next: {error}", flush=True)
                continue
            return cls(engine, order), Started(engine=_name_of(engine))
        raise AssertionError("there is always one engine to try")

    async def handle(self, request: Generate | MakePrompts | Load, emit: Emit) -> msgspec.Struct:
        """Answers one request. Raises `EngineError` when the engine is lost."""
        match request:
            case Generate():
                return await self._generate(request, emit)
            case MakePrompts(tasks):
                return await asyncio.to_thread(self._make_prompts, tasks)
            case Load(version, weights):
                await self._engine.load(Version(version), Path(weights))
                return Done()

    async def close(self) -> None:
        """Ends the engine and all that it started."""
        await self._engine.close()

    async def _generate(self, request: Generate, emit: Emit) -> Done:
        contract = self._order.contract
        wanted = [
            SampleRequest(
                key=order.slot,
                prompt_ids=order.prompt_ids,
                max_new_tokens=contract.max_new_tokens,
                seed=order.seed,
                temperature=contract.temperature,
                stop_ids=contract.stop_ids,
            )
            for order in request.orders
        ]
        # Closing takes unfinished requests back from the engine, when the daemon no longer waits for them.
        async with aclosing(cast("AsyncGenerator[Sample, None]", self._engine.generate(wanted))) as samples:
            async for sample in samples:
                await emit(_filled(request.lease_id, sample))
        return Done()

    def _make_prompts(self, tasks: tuple[tuple[str, int, int], ...]) -> Prompts:
        environment, tokenizer = self._open_source()
        made = (regenerate(environment, TaskKey(*task)) for task in tasks)
        return Prompts(tuple(environment.prompt_ids(task, tokenizer) for task in made))

    def _open_source(self) -> tuple[Environment, Tokenizer]:
        if self._source is None:
            tokenizer = load_tokenizer(Path(self._order.model_dir))
            self._source = make_environment(self._order.environment), tokenizer
        return self._source


def _filled(lease_id: str, sample: Sample) -> SlotFilled:
    return SlotFilled(
        lease_id=lease_id,
        slot=sample.key,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        segments=tuple((segment.version, segment.num_tokens) for segment in sample.segments),
        finish_reason=sample.finish_reason,
    )


def _engine_names(wish: str) -> tuple[EngineName, ...]:
    match wish:
        case "auto":
            return ("auto", "transformers")
        case "vllm" | "transformers":
            return (wish,)
        case _:
            raise UsageError(f"there is no engine {wish!r}", remedy="Choose auto, vllm or transformers.")


def _name_of(engine: Engine) -> str:
    return type(engine).__name__.removesuffix("Engine").lower()


def _max_model_len(model_dir: Path, contract: SamplingContract) -> int:
    """Tokens that prompt and completion may have together: what the run needs, and never more than the
    model has."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelMissingError(f"{model_dir} has no config.json", remedy="Fetch the base model again.")
    longest = int(json.loads(path.read_text()).get("max_position_embeddings", 0)) or PROMPT_ROOM
    return min(longest, contract.max_new_tokens + PROMPT_ROOM)
