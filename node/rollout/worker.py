"""The rollout job of the compute child: an engine, and the environment that prompts come from. Impure.

Invariant: a slot's tokens leave as one `SlotFilled` event whose segments say which version sampled each, and before it,
by pieces, as `SlotAdvanced`; the reply to `Generate` comes after the last of them. Imports torch only through the
engine that it starts.
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
    SlotAdvanced,
    SlotFilled,
    SlotOrder,
    Started,
    StartRollout,
    StopSlots,
)
from node.rollout.engine import Chunk, Engine, Sample, SampleRequest
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
            engine = make_engine(name, max_model_len=max_model_len, gpu_memory_share=order.gpu_memory_share)
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

    async def handle(self, request: Generate | StopSlots | MakePrompts | Load, emit: Emit) -> msgspec.Struct:
        """Answers one request. Raises `EngineError` when the engine is lost."""
        match request:
            case Generate():
                return await self._generate(request, emit)
            case StopSlots(lease_id, slots):
                await self._engine.stop({_key(lease_id, slot) for slot in slots})
                return Done()
            case MakePrompts(tasks):
                return await asyncio.to_thread(self._make_prompts, tasks)
            case Load(version, weights):
                await self._engine.load(Version(version), Path(weights))
                return Done()

    async def close(self) -> None:
        """Ends the engine and all that it started."""
        await self._engine.close()

    async def _generate(self, request: Generate, emit: Emit) -> Done:
        slots = {_key(request.lease_id, order.slot): order.slot for order in request.orders}
        wanted = []
        for order in request.orders:
            sample = self._request(request.lease_id, order)
            try:
                self._engine.check(sample)
                wanted.append(sample)
            except EngineError as error:  # its neighbours are none the worse for it
                print(f"slot {order.slot} left out: {error}", flush=True)
                await emit(SlotFilled(request.lease_id, order.slot, (), (), (), "refused"))
        samples = self._engine.generate(wanted, chunk_tokens=self._order.piece_tokens, chunk_s=self._order.piece_s)
        # Closing takes unfinished requests back from the engine, when the daemon no longer waits for them.
        async with aclosing(cast("AsyncGenerator[Chunk | Sample, None]", samples)):
            async for part in samples:
                slot = slots[part.key]
                if isinstance(part, Sample):
                    await emit(_filled(request.lease_id, slot, part))
                else:
                    await emit(_advanced(request.lease_id, slot, part))
        return Done()

    def _request(self, lease_id: str, order: SlotOrder) -> SampleRequest:
        contract = self._order.contract
        return SampleRequest(
            key=_key(lease_id, order.slot),
            prompt_ids=order.prompt_ids + order.prefix_ids,
            max_new_tokens=contract.max_new_tokens - len(order.prefix_ids),
            seed=order.seed,
            temperature=contract.temperature,
            stop_ids=contract.stop_ids,
            first_position=len(order.prefix_ids),
        )

    def _make_prompts(self, tasks: tuple[tuple[str, int, int], ...]) -> Prompts:
        environment, tokenizer = self._open_source()
        made = (regenerate(environment, TaskKey(*task)) for task in tasks)
        return Prompts(tuple(environment.prompt_ids(task, tokenizer) for task in made))

    def _open_source(self) -> tuple[Environment, Tokenizer]:
        if self._source is None:
            tokenizer = load_tokenizer(Path(self._order.model_dir))
            self._source = make_environment(self._order.environment), tokenizer
        return self._source


def _key(lease_id: str, slot: str) -> str:
    """The engine's name for a slot: one slot may come again in a later lease while the earlier one still runs."""
    return f"{lease_id} {slot}"


def _filled(lease_id: str, slot: str, sample: Sample) -> SlotFilled:
    return SlotFilled(
        lease_id=lease_id,
        slot=slot,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        segments=tuple((segment.version, segment.num_tokens) for segment in sample.segments),
        finish_reason=sample.finish_reason,
    )


def _advanced(lease_id: str, slot: str, chunk: Chunk) -> SlotAdvanced:
    return SlotAdvanced(lease_id, slot, chunk.start, chunk.token_ids, chunk.logprobs, chunk.version)


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
