"""The rollout engine on vLLM: continuous batching in a process of vLLM's own.

vLLM samples greedily from logits to which `vllm_extension` has added the seed's noise; weights are swapped
while generation is paused, and running samples are recomputed under them. Invariant: generation never resumes
on a model that is not wholly of one version; where the old one cannot be restored either, the engine is lost.
With `vllm_extension`, the only module that imports vllm. Impure: a child process.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from node.rollout.chunks import Cutter
from node.rollout.engine import Chunk, Sample, SampleRequest, Segment
from node.rollout.measured import look
from node.rollout.memory import NO_LIMITS, Limits, Room
from node.rollout.model_files import ModelFacts, check_layout, read_layout, stage_model
from node.rollout.vllm_process import EarlyContext, early_context
from node.rollout.vllm_surroundings import (
    ENVIRONMENT,
    children_environment,
    device_arguments,
    make_folder,
    no_collection,
    process_of,
    release,
)
from node.torch_guard import block_broken_extras
from protocol.canary import Probe
from protocol.errors import EngineError
from protocol.ids import Version

CONTROL_DEADLINE_S = 300.0
CLOSE_DEADLINE_S = 10.0
EXTENSION = "node.rollout.vllm_extension.WorkerExtension"
SCORE_PRIORITY = -1  # samples have 0
LOOK_S = 0.1  # between two looks at what running samples have got


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that vLLM has under `name`."""

    request: SampleRequest
    name: str
    cutter: Cutter


class VllmEngine:
    """`node.rollout.engine.Engine` over a child process. One event loop at a time may use it."""

    def __init__(self, *, max_num_seqs: int = 64, max_model_len: int = 2048, limits: Limits = NO_LIMITS) -> None:
        self._max_num_seqs, self._max_model_len, self._limits = max_num_seqs, max_model_len, limits
        self._loading = asyncio.Lock()
        self._swaps: set[asyncio.Task[tuple[float, ...]]] = set()
        self._ids = count()
        self._running: dict[asyncio.Task[Sample], _Running] = {}
        self._engine: Any = None
        self._end: asyncio.Future[EngineError]
        self._folder: tempfile.TemporaryDirectory[str]  # private to its user; goes with the engine
        self._facts: ModelFacts
        self._version: Version
        self._weights: Path

    @property
    def version(self) -> Version:
        return self._version

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    @property
    def dtype(self) -> str:
        return self._facts.dtype

    async def start(self, model_dir: Path, version: Version, weights: Path) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._version, self._weights = version, weights
        await asyncio.to_thread(self._build, model_dir, weights)
        sentinel = process_of(self._engine).sentinel
        loop.add_reader(sentinel, self._on_death, sentinel)
        await self._control(self._engine.update_weight_version(str(version)))

    def check(self, request: SampleRequest) -> None:
        self._facts.check([request])

    async def generate(
        self, requests: Sequence[SampleRequest], *, chunk_tokens: int = 0, chunk_s: float = 1.0
    ) -> AsyncIterator[Chunk | Sample]:
        self._require_running()
        self._facts.check(requests)
        mine = {}
        for request in requests:
            running = _Running(request, str(next(self._ids)), Cutter(chunk_tokens, chunk_s))
            mine[asyncio.create_task(self._sample(request, running.name))] = running
        self._running |= mine
        pending = set(mine)
        try:
            while pending:
                waited: set[asyncio.Future[Any]] = {*pending, self._end}
                timeout_s = LOOK_S if chunk_tokens else None
                done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                finished = pending & done
                if done and not finished:
                    raise self._end.result()
                pending -= finished
                for task in finished:
                    cut_off = Sample(mine[task].request.key, (), (), (), "abort")
                    yield cut_off if task.cancelled() else task.result()
                chunks = [chunk for task in pending for chunk in self._chunks(mine[task])] if chunk_tokens else []
                for chunk in chunks:
                    yield chunk
        finally:
            for task in mine:
                del self._running[task]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def stop(self, keys: Collection[str]) -> None:
        self._require_running()
        stopped = {task: running for task, running in self._running.items() if running.request.key in keys}
        for task in stopped:
            task.cancel()
        names = [running.name for running in stopped.values()]
        await self._control(self._engine.abort(names))  # one may have been on its way in

    async def load(self, version: Version, weights: Path, *, probe: Probe | None = None) -> tuple[float, ...]:
        swap = asyncio.create_task(self._swap(version, weights, probe))
        self._swaps.add(swap)
        swap.add_done_callback(self._swaps.discard)
        return await asyncio.shield(swap)  # a caller who gives up must not leave the engine paused

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        self._require_running()
        self._facts.check_ids(prompt_ids)
        self._facts.check_ids([*prompt_ids, *completion_ids])
        if not completion_ids:
            return ()
        return tuple(await self._race(self._score(prompt_ids, completion_ids)))

    async def close(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        asyncio.get_running_loop().remove_reader(process_of(engine).sentinel)
        if not self._end.done():
            aborting = asyncio.create_task(engine.pause_generation(mode="abort"))
            await asyncio.wait({aborting}, timeout=CLOSE_DEADLINE_S)  # in any case the process is ended now
            aborting.cancel()
        self._finish(EngineError("The engine is closed"))
        if engine.output_handler:
            engine.output_handler.cancel()  # else it reports the end of its process as an accident
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(release, engine)
        self._folder.cleanup()

    def _build(self, model_dir: Path, weights: Path) -> None:
        """Imports vLLM, starts its process and waits until it has loaded the weights: about ten seconds, most of which
        both processes import modules."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        block_broken_extras()
        self._folder = make_folder()
        with ExitStack() as undo:
            undo.callback(self._folder.cleanup)
            self._engine = self._begin(Path(self._folder.name), model_dir, weights)
            undo.pop_all()

    def _begin(self, folder: Path, model_dir: Path, weights: Path) -> Any:
        """A running AsyncLLM whose files are in `folder`."""
        with early_context(folder) as early:
            self._facts, room = look(
                model_dir,
                weights,
                max_num_seqs=self._max_num_seqs,
                max_model_len=self._max_model_len,
                limits=self._limits,
            )
            self._max_num_seqs = room.max_num_seqs
            try:
                stage_model(folder, model_dir, weights, tied=self._facts.tied)
                with no_collection():
                    return self._launch(folder, room, early)
            except Exception as error:
                raise EngineError("vLLM did not start", why=str(error)) from error

    def _launch(self, folder: Path, room: Room, early: EarlyContext | None) -> Any:
        """A running AsyncLLM on the checkpoint in `folder`."""
        on_device = device_arguments(self._limits.gpu_memory_share)  # before the import, which looks at the environment
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from node.rollout.vllm_extension import own_entry

        with children_environment(folder), own_entry(early):
            arguments = AsyncEngineArgs(
                model=str(folder),
                dtype=self._facts.dtype,
                max_model_len=self._facts.max_len + 1,
                max_num_seqs=room.max_num_seqs,
                kv_cache_memory_bytes=room.cache_bytes,
                trust_remote_code=self._limits.trust_remote_code,
                skip_tokenizer_init=True,
                generation_config="vllm",
                enable_prefix_caching=True,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                logprobs_mode="raw_logprobs",
                scheduling_policy="priority",  # first come first served, but for what is scored
                logits_processors=["node.rollout.vllm_extension:SeededNoise"],
                worker_extension_cls=EXTENSION,
                **on_device,
            )
            return AsyncLLM.from_engine_args(arguments)

    def _chunks(self, running: "_Running") -> list[Chunk]:
        """What is due of a running sample, from vLLM's own record of it: which is complete after each step, costs the
        steps nothing, and names the version of each token as the finished output does.
        """
        if self._engine is None:
            return []
        processor = self._engine.output_processor
        names = processor.external_req_ids.get(running.name)
        state = processor.request_states.get(names[0]) if names else None
        if state is None or not state.weight_version_starts:
            return []
        ids, rows = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
        spans = [(Version(int(version)), start) for version, start in state.weight_version_starts]
        key, first = running.request.key, running.request.first_position
        return [
            Chunk(
                key,
                first + start,
                tuple(ids[start:stop]),
                tuple(rows[position][ids[position]].logprob for position in range(start, stop)),
                version,
            )
            for start, stop, version in running.cutter.cut(len(ids), spans, now_s=time.monotonic())
        ]

    async def _sample(self, request: SampleRequest, name: str) -> Sample:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from node.rollout.vllm_extension import NOISE_KEY

        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={NOISE_KEY: [request.seed, request.first_position, request.temperature]},
        )
        output = (await self._run(request.prompt_ids, params, name)).outputs[0]
        spans = output.weight_versions or []
        return Sample(
            key=request.key,
            token_ids=tuple(output.token_ids),
            logprobs=tuple(
                row[token].logprob for row, token in zip(output.logprobs or [], output.token_ids, strict=True)
            ),
            segments=tuple(Segment(Version(int(span.version)), span.end - span.start) for span in spans),
            finish_reason=output.finish_reason,
        )

    async def _run(self, ids: Sequence[int], params: Any, name: str) -> Any:
        """vLLM's last word on one request."""
        from vllm.inputs import tokens_input

        try:
            outputs = self._engine.generate(tokens_input(list(ids)), params, name)
            return [output async for output in outputs][-1]
        except Exception as error:
            raise EngineError("vLLM failed to sample", why=f"{type(error).__name__}: {error}") from error

    async def _score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, added: asyncio.Event | None = None
    ) -> tuple[float, ...]:
        """Goes ahead of samples that wait for a place; `added` is set once vLLM's process has the request."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = tokens_input([*prompt_ids, *completion_ids])
        try:
            queue = await self._engine.add_request(str(next(self._ids)), prompt, params, priority=SCORE_PRIORITY)
            if added:
                added.set()
            output = await queue.get()
            while not output.finished:
                output = await queue.get()
        except Exception as error:
            raise EngineError("vLLM failed to score", why=f"{type(error).__name__}: {error}") from error
        rows = output.prompt_logprobs[len(prompt_ids) :]
        return tuple(row[token].logprob for row, token in zip(rows, completion_ids, strict=True))

    async def _swap(self, version: Version, weights: Path, probe: Probe | None) -> tuple[float, ...]:
        async with self._loading:
            self._require_running()
            layout = await asyncio.to_thread(read_layout, weights)
            check_layout(layout, self._facts.layout, weights=weights)
            await self._control(self._engine.pause_generation(mode="keep", clear_cache=True))
            try:
                await self._put(weights)
                await self._control(self._engine.update_weight_version(str(version)))
            except Exception as error:
                await self._restore()
                await self._control(self._engine.resume_generation())
                raise EngineError(
                    f"The weights {weights} could not be loaded",
                    why=str(error),
                    remedy=f"Version {self.version} is served on.",
                ) from error
            self._version, self._weights = version, weights
            return await self._resume(probe)

    async def _resume(self, probe: Probe | None) -> tuple[float, ...]:
        """Goes on sampling, after the probe, which waits in vLLM's process before it does."""
        if probe is None:
            await self._control(self._engine.resume_generation())
            return ()
        added = asyncio.Event()
        scoring = asyncio.create_task(self._score(probe.prompt_ids, probe.completion_ids, added=added))
        await asyncio.wait({scoring, asyncio.create_task(added.wait())}, return_when=asyncio.FIRST_COMPLETED)
        added.set()
        await self._control(self._engine.resume_generation())
        return tuple(await self._control(scoring))

    async def _put(self, weights: Path) -> None:
        await self._control(self._engine.collective_rpc("hexcomb_load", args=(str(weights),)))

    async def _restore(self) -> None:
        """Loads the file of the version that is served, twice: a failed load may leave tensors behind that
        spoil the first attempt after it, with or without an error, but not the second.
        """
        await asyncio.gather(self._put(self._weights), return_exceptions=True)
        try:
            await self._put(self._weights)
        except Exception as error:
            self._lose(f"the weights of version {self._version} could not be restored: {error}")
            raise self._end.result() from error

    async def _control(self, call: Awaitable[Any]) -> Any:
        """An answer from vLLM's process within the deadline; the engine counts as lost without one."""
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                return await self._race(call)
        except TimeoutError as error:
            self._lose(f"its process did not answer for {CONTROL_DEADLINE_S:.0f} s")
            raise self._end.result() from error

    async def _race(self, call: Awaitable[Any]) -> Any:
        """The result of `call`, or the engine's end if that is first: vLLM leaves such calls unanswered."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._end.result()
        finally:
            task.cancel()

    def _require_running(self) -> None:
        if self._engine is None:
            raise EngineError("The engine is not running")
        if self._end.done():
            raise self._end.result()

    def _on_death(self, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        self._finish(EngineError("The engine is lost", why="its process died", remedy="Start a new engine."))

    def _lose(self, why: str) -> None:
        self._finish(EngineError("The engine is lost", why=why, remedy="Start a new engine."))
        if self._engine is not None:
            process_of(self._engine).kill()

    def _finish(self, end: EngineError) -> None:
        if not self._end.done():
            self._end.set_result(end)
