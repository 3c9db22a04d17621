"""The rollout job of the compute child: an engine, and the environment that prompts come from. Impure.

Invariant: a slot's tokens leave as one `SlotFilled` event whose segments say which version sampled each, and before it,
by pieces, as `SlotAdvanced`; the reply to `Generate` comes after the last of them. Nothing leaves that weights sampled
which have not been judged, or were found wrong. Imports torch only through the engine that it starts.
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
    Loaded,
    MakePrompts,
    Prompts,
    SlotAdvanced,
    SlotFilled,
    SlotOrder,
    Started,
    StartRollout,
    StopSlots,
)
from node.planner import NUM_SEATS
from node.rollout.engine import Chunk, Engine, Sample, SampleRequest
from node.rollout.memory import Limits
from node.rollout.selection import make_engine
from node.rollout.self_test import check_canary
from node.rollout.starting import start_engine
from protocol.canary import probe_for
from protocol.child import Emit
from protocol.errors import EngineError, EngineUntrustedError, ModelMissingError, ModelRefusedError
from protocol.gym_tasks import make_environment
from protocol.ids import TaskKey, Version
from protocol.run import SamplingContract
from protocol.tasks import Environment, Tokenizer, load_tokenizer, regenerate

PROMPT_ROOM = 4096
"""Tokens kept free for prompts beside the longest completion, where the model allows so many."""

EXPECTED_PROMPT_TOKENS = 512
"""Prompts are counted on to be no longer; those that are only leave less room for others."""


class RolloutJob:
    """One engine at work. `start` makes it, `handle` serves it, `close` ends it."""

    def __init__(self, engine: Engine, order: StartRollout) -> None:
        self._engine, self._order = engine, order
        self._source: tuple[Environment, Tokenizer] | None = None
        self._running: set[str] = set()
        self._spoilt: set[str] = set()
        self._loading = asyncio.Lock()
        self._judged = asyncio.Event()
        self._judged.set()
        self._end: EngineUntrustedError | None = None

    @classmethod
    async def start(cls, order: StartRollout) -> "tuple[RolloutJob, Started]":
        """The job that `order` asks for. Raises `EngineError` when no engine starts."""
        max_num_seqs, max_model_len, limits = limits_of(order)

        def build(name: str) -> Engine:
            return make_engine(name, max_num_seqs=max_num_seqs, max_model_len=max_model_len, limits=limits)

        engine, started = await start_engine(order, build)
        return cls(engine, order), started

    async def handle(self, request: Generate | StopSlots | MakePrompts | Load, emit: Emit) -> msgspec.Struct:
        """Answers one request. Raises `EngineError` when the engine is lost, or when it may not sample."""
        match request:
            case Generate():
                return await self._generate(request, emit)
            case StopSlots(lease_id, slots):
                await self._engine.stop({_key(lease_id, slot) for slot in slots})
                return Done()
            case MakePrompts(tasks):
                return await asyncio.to_thread(self._make_prompts, tasks)
            case Load(version, weights, canary):
                return Loaded(await self._load(Version(version), Path(weights), canary))

    async def close(self) -> None:
        """Ends the engine and all that it started."""
        await self._engine.close()

    async def _load(self, version: Version, weights: Path, canary: tuple[float, ...]) -> float | None:
        """Loads and judges; loads once more if that fails, since a load may go wrong by chance. What is sampled
        meanwhile waits, and is thrown away where the weights were wrong."""
        async with self._loading:
            self._require_trust()
            self._judged.clear()
            try:
                return await self._load_and_judge(version, weights, canary)
            except EngineUntrustedError as error:
                print(f"version {version} is loaded once more: {error}", flush=True)
                self._end = error  # until it is proved wrong, whatever comes
                await self._spoil()
                difference = await self._load_and_judge(version, weights, canary)
                self._end = None
                return difference
            finally:
                self._judged.set()

    async def _load_and_judge(self, version: Version, weights: Path, canary: tuple[float, ...]) -> float | None:
        found = await self._engine.load(version, weights, probe=probe_for(self._engine.vocab_size))
        return check_canary(found, canary, dtype=self._engine.dtype)

    async def _spoil(self) -> None:
        """Ends every sample that runs, and keeps what it has from leaving."""
        self._spoilt |= self._running
        await self._engine.stop(set(self._running))

    def _require_trust(self) -> None:
        if self._end is not None:
            raise self._end

    async def _generate(self, request: Generate, emit: Emit) -> Done:
        await self._judged.wait()
        self._require_trust()
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
        keys = {sample.key for sample in wanted}
        self._running |= keys
        # Closing takes unfinished requests back from the engine, when the daemon no longer waits for them.
        try:
            async with aclosing(cast("AsyncGenerator[Chunk | Sample, None]", samples)):
                async for part in samples:
                    await self._judged.wait()
                    await self._pass_on(part, request.lease_id, slots[part.key], emit)
        finally:
            self._running -= keys
            self._spoilt -= keys
        return Done()

    async def _pass_on(self, part: Chunk | Sample, lease_id: str, slot: str, emit: Emit) -> None:
        is_spoilt = part.key in self._spoilt
        if isinstance(part, Chunk):
            if not is_spoilt:
                await emit(_advanced(lease_id, slot, part))
            return
        self._running.discard(part.key)
        await emit(SlotFilled(lease_id, slot, (), (), (), "abort") if is_spoilt else _filled(lease_id, slot, part))

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


def limits_of(order: StartRollout) -> tuple[int, int, Limits]:
    """Samples at a time, the longest one, and the rest of what the engine is allowed. Each step of restraint halves the
    samples; from the second on memory and room for prompts are halved too."""
    halvings = max(0, order.restraint - 1)
    prompt_room = PROMPT_ROOM >> halvings
    limits = Limits(
        expected_tokens=order.contract.max_new_tokens + EXPECTED_PROMPT_TOKENS,
        cache_share=1.0 / (1 << halvings),
        gpu_memory_share=order.gpu_memory_share,
        trust_remote_code=order.trust_remote_code,
    )
    longest = _max_model_len(Path(order.model_dir), order.contract, prompt_room)
    return max(1, NUM_SEATS >> order.restraint), longest, limits


def _max_model_len(model_dir: Path, contract: SamplingContract, prompt_room: int) -> int:
    """Tokens that prompt and completion may have together: what the run needs, and never more than the
    model has."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelMissingError(f"{model_dir} has no config.json", remedy="Fetch the base model again.")
    try:
        longest = int(json.loads(path.read_text()).get("max_position_embeddings", 0)) or PROMPT_ROOM
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelRefusedError(f"{path} cannot be read", why=str(error)) from error
    return min(longest, contract.max_new_tokens + prompt_room)
