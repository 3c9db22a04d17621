"""The rollout engine on plain transformers: no compiler, no second process, quick to start; right for small
models.

One thread owns model and decoder and turns the wheel: commands, then one step, then commands again; the
event loop only posts commands and receives samples. Invariant: weights change between two steps, as one
command, and every running row is recomputed under them. Impure: a thread, torch.
"""

import asyncio
import os
import queue
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from node.rollout.chunks import Cutter
from node.rollout.engine import Chunk, Sample, SampleRequest
from node.rollout.measured import look
from node.rollout.memory import NO_LIMITS, Limits
from node.rollout.model_files import ModelFacts, check_layout, read_layout, stage_model
from node.torch_guard import block_broken_extras
from protocol.canary import Probe
from protocol.errors import EngineError
from protocol.ids import Version

if TYPE_CHECKING:
    from node.rollout.decoder import Decoder

_T = TypeVar("_T")

CLOSE_DEADLINE_S = 30.0


class TransformersEngine:
    """`node.rollout.engine.Engine` in this process. One event loop at a time may use it."""

    def __init__(self, *, max_num_seqs: int = 64, max_model_len: int = 2048, limits: Limits = NO_LIMITS) -> None:
        self._max_num_seqs, self._max_model_len, self._limits = max_num_seqs, max_model_len, limits
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loading = asyncio.Lock()
        self._end: EngineError | None = EngineError("The engine has not been started")
        self._thread: threading.Thread | None = None
        self._facts: ModelFacts
        self._model: Any
        self._decoder: Decoder
        self._weights: Path

    @property
    def version(self) -> Version:
        return self._decoder.version

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
        await asyncio.to_thread(self._build, model_dir, version, weights)
        self._end = None
        self._thread = threading.Thread(target=self._serve, name="hexcomb-decoder", daemon=True)
        self._thread.start()

    def check(self, request: SampleRequest) -> None:
        self._facts.check([request])

    async def generate(
        self, requests: Sequence[SampleRequest], *, chunk_tokens: int = 0, chunk_s: float = 1.0
    ) -> AsyncIterator[Chunk | Sample]:
        from node.rollout.decoder import Row

        self._require_running()
        self._facts.check(requests)
        loop = asyncio.get_running_loop()
        num_chunks = sum(request.max_new_tokens for request in requests) if chunk_tokens else 0  # at the most
        results: asyncio.Queue[Chunk | Sample | EngineError] = asyncio.Queue(maxsize=len(requests) + num_chunks)

        def deliver(outcome: Chunk | Sample | EngineError) -> None:
            loop.call_soon_threadsafe(results.put_nowait, outcome)

        rows = [Row(request, deliver, Cutter(chunk_tokens, chunk_s)) for request in requests]
        num_running = len(rows)
        try:
            await self._call(lambda: self._decoder.add(rows))
            while num_running:
                outcome = await results.get()
                if isinstance(outcome, EngineError):
                    raise outcome
                num_running -= isinstance(outcome, Sample)
                yield outcome
        finally:
            self._commands.put(lambda: self._decoder.remove(rows))

    async def stop(self, keys: Collection[str]) -> None:
        self._require_running()
        await self._call(lambda: self._decoder.stop(keys))

    async def load(self, version: Version, weights: Path, *, probe: Probe | None = None) -> tuple[float, ...]:
        async with self._loading:
            self._require_running()
            layout = await asyncio.to_thread(read_layout, weights)
            check_layout(layout, self._facts.layout, weights=weights)
            return await self._call(lambda: self._swap(version, weights, probe))

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        self._require_running()
        self._facts.check_ids(prompt_ids)
        self._facts.check_ids([*prompt_ids, *completion_ids])
        return await self._call(lambda: self._decoder.score(prompt_ids, completion_ids))

    async def close(self) -> None:
        if self._thread:
            self._commands.put(self._stop)
            await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
            self._thread = None

    # From here on: the decoder's thread, but for `_require_running`, `_call` and `_build`.

    def _require_running(self) -> None:
        if self._end:
            raise self._end

    async def _call(self, command: Callable[[], _T]) -> _T:
        """Runs `command` between two steps; its result or error."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._end:
                future.set_exception(self._end)
                return
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        if self._end:
            self._obey_rest()  # the thread may have looked for the last time
        return await asyncio.wrap_future(future)

    def _build(self, model_dir: Path, version: Version, weights: Path) -> None:
        block_broken_extras()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import AutoModelForCausalLM

        from node.rollout.decoder import Decoder
        from node.training.gpu_memory import cap_gpu_memory

        cap_gpu_memory(self._limits.gpu_memory_share)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a small model's steps are too short to share, and other processes want the cores
        facts, room = look(
            model_dir,
            weights,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            limits=self._limits,
        )
        self._facts = facts
        self._max_num_seqs = room.max_num_seqs
        with tempfile.TemporaryDirectory(prefix="hexcomb-engine-") as folder:
            stage_model(Path(folder), model_dir, weights, tied=facts.tied)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, facts.dtype), trust_remote_code=self._limits.trust_remote_code
            )
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # away from the mapped file, which others may share or remove
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, self._weights = model.to(device).eval(), weights
        self._decoder = Decoder(self._model, version, max_num_seqs=self._max_num_seqs)

    def _serve(self) -> None:
        try:
            while not self._end:
                self._obey()
                if self._decoder.busy and not self._end:
                    self._decoder.step()
        except Exception as error:  # whatever a step raises, nothing sampled after it could be trusted
            self._lose(error)
        self._obey_rest()

    def _obey(self) -> None:
        """Runs the commands that wait; waits for one when there is nothing else to do."""
        if not self._decoder.busy:
            self._commands.get()()
        while not self._commands.empty() and not self._end:
            self._commands.get()()

    def _obey_rest(self) -> None:
        """Answers commands that came too late, with the error that says why."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _swap(self, version: Version, weights: Path, probe: Probe | None) -> tuple[float, ...]:
        from node.rollout.decoder import copy_weights

        try:
            copy_weights(self._model, weights)
        except Exception as error:
            self._restore()
            raise EngineError(
                f"The weights {weights} could not be loaded",
                why=str(error),
                remedy=f"Version {self.version} is served on.",
            ) from error
        self._weights = weights
        self._decoder.recompute(version)
        return self._decoder.score(probe.prompt_ids, probe.completion_ids) if probe else ()

    def _restore(self) -> None:
        from node.rollout.decoder import copy_weights

        try:
            copy_weights(self._model, self._weights)
        except Exception as error:
            self._lose(error)
            raise

    def _stop(self) -> None:
        self._end = EngineError("The engine is closed")
        for row in self._decoder.rows:
            row.finish("abort")

    def _lose(self, error: Exception) -> None:
        self._end = EngineError(
            "The engine is lost", why=f"{type(error).__name__}: {error}", remedy="Start a new engine."
        )
        self._end.__cause__ = error
        for row in self._decoder.rows:
            row.deliver(self._end)
