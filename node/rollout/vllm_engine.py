"""The rollout engine on vLLM: continuous batching in a process of vLLM's own.

vLLM samples greedily from logits to which `vllm_extension` has added the seed's noise; weights are swapped
while generation is paused, and running samples are recomputed under them. Invariant: generation never resumes
on a model that is not wholly of one version; where the old one cannot be restored either, the engine is lost.
With `vllm_extension`, the only module that imports vllm. Impure: a child process.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from node import torch_guard
from node.rollout.engine import Sample, SampleRequest, Segment
from node.rollout.model_files import ModelFacts, check_layout, read_facts, read_layout, stage_model
from protocol.errors import EngineError
from protocol.ids import Version

CONTROL_DEADLINE_S = 300.0
CLOSE_DEADLINE_S = 10.0
MAX_TEMP_PATH_CHARS = 45  # a socket's whole path may have 107, and vLLM's names for them are long
BLOCK_SIZE = 32  # the smallest that the CPU kernels take: the prefix cache works on short prompts too
MIN_KV_CACHE_BYTES = 64 << 20
MAX_KV_CACHE_BYTES = 1 << 30  # samples that find no room wait or are recomputed
MAX_KV_CACHE_SHARE = 0.25  # of the memory that is free at the start

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker inside the engine's process: two processes, not three
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that takes logits processors everywhere
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # scoring a sample of full length asks for one more token
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


class VllmEngine:
    """`node.rollout.engine.Engine` over a child process. One event loop at a time may use it."""

    def __init__(self, *, max_num_seqs: int = 64, max_model_len: int = 2048) -> None:
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._loading = asyncio.Lock()
        self._swaps: set[asyncio.Task[None]] = set()
        self._ids = count()
        self._engine: Any = None
        self._end: asyncio.Future[EngineError]
        self._folder: tempfile.TemporaryDirectory[str]  # private to its user; goes with the engine
        self._facts: ModelFacts
        self._version: Version
        self._weights: Path

    @property
    def version(self) -> Version:
        return self._version

    async def start(self, model_dir: Path, version: Version, weights: Path) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._version, self._weights = version, weights
        await asyncio.to_thread(self._build, model_dir, weights)
        sentinel = _process(self._engine).sentinel
        loop.add_reader(sentinel, self._on_death, sentinel)
        await self._control(self._engine.update_weight_version(str(version)))

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        self._require_running()
        self._facts.check(requests)
        pending = {asyncio.create_task(self._sample(request)) for request in requests}
        try:
            while pending:
                waited: set[asyncio.Future[Any]] = {*pending, self._end}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                finished = pending & done
                if not finished:
                    raise self._end.result()
                pending -= finished
                for task in finished:
                    yield task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def load(self, version: Version, weights: Path) -> None:
        swap = asyncio.create_task(self._swap(version, weights))
        self._swaps.add(swap)
        swap.add_done_callback(self._swaps.discard)
        await asyncio.shield(swap)  # a caller who gives up must not leave the engine paused

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        from vllm import SamplingParams

        self._require_running()
        self._facts.check_ids(prompt_ids)
        ids = [*prompt_ids, *completion_ids]
        self._facts.check_ids(ids)
        if not completion_ids:
            return ()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        output = await self._race(self._run(ids, params))
        rows = output.prompt_logprobs[len(prompt_ids) :]
        return tuple(row[token].logprob for row, token in zip(rows, completion_ids, strict=True))

    async def close(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        asyncio.get_running_loop().remove_reader(_process(engine).sentinel)
        if not self._end.done():
            aborting = asyncio.create_task(engine.pause_generation(mode="abort"))
            await asyncio.wait({aborting}, timeout=CLOSE_DEADLINE_S)  # in any case the process is ended now
            aborting.cancel()
        self._finish(EngineError("The engine is closed"))
        if engine.output_handler:
            engine.output_handler.cancel()  # else it reports the end of its process as an accident
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(_release, engine)
        self._folder.cleanup()

    def _build(self, model_dir: Path, weights: Path) -> None:
        """Imports vLLM, starts its process and waits until it has loaded the weights: about ten seconds."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch_guard.block_broken_extras()
        self._facts = read_facts(model_dir, weights, max_model_len=self._max_model_len)
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= MAX_TEMP_PATH_CHARS else "/tmp"
        self._folder = tempfile.TemporaryDirectory(prefix="hexcomb-engine-", dir=parent)
        try:
            stage_model(Path(self._folder.name), model_dir, weights, tied=self._facts.tied)
            self._engine = self._launch(Path(self._folder.name))
        except Exception as error:
            self._folder.cleanup()
            raise EngineError("vLLM did not start", why=str(error)) from error

    def _launch(self, folder: Path) -> Any:
        """A running AsyncLLM on the checkpoint in `folder`."""
        import torch

        per_device: dict[str, Any] = {}
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # spares a C++ compiler and many seconds
            per_device = {
                "enforce_eager": True,
                "block_size": BLOCK_SIZE,
                "kv_cache_memory_bytes": _kv_cache_bytes(self._facts, self._max_num_seqs),
            }
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with _children_environment(folder), _own_entry():
            arguments = AsyncEngineArgs(
                model=str(folder),
                dtype=self._facts.dtype,
                max_model_len=self._facts.max_len + 1,
                max_num_seqs=self._max_num_seqs,
                skip_tokenizer_init=True,
                generation_config="vllm",
                enable_prefix_caching=True,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                logprobs_mode="raw_logprobs",
                logits_processors=["node.rollout.vllm_extension:SeededNoise"],
                worker_extension_cls="node.rollout.vllm_extension.WorkerExtension",
                **per_device,
            )
            return AsyncLLM.from_engine_args(arguments)

    async def _sample(self, request: SampleRequest) -> Sample:
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
        output = (await self._run(request.prompt_ids, params)).outputs[0]
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

    async def _run(self, ids: Sequence[int], params: Any) -> Any:
        """vLLM's last word on one request."""
        from vllm.inputs import tokens_input

        try:
            outputs = self._engine.generate(tokens_input(list(ids)), params, str(next(self._ids)))
            return [output async for output in outputs][-1]
        except Exception as error:
            raise EngineError("vLLM failed to sample", why=f"{type(error).__name__}: {error}") from error

    async def _swap(self, version: Version, weights: Path) -> None:
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
            await self._control(self._engine.resume_generation())

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

    async def _control(self, call: Coroutine[Any, Any, Any]) -> Any:
        """An answer from vLLM's process within the deadline; the engine counts as lost without one."""
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                return await self._race(call)
        except TimeoutError as error:
            self._lose(f"its process did not answer for {CONTROL_DEADLINE_S:.0f} s")
            raise self._end.result() from error

    async def _race(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of `call`, or the engine's end if that is first: vLLM leaves such calls unanswered."""
        task = asyncio.create_task(call)
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
            _process(self._engine).kill()

    def _finish(self, end: EngineError) -> None:
        if not self._end.done():
            self._end.set_result(end)


def _release(engine: Any) -> None:
    """Frees what vLLM leaves to its finalizers, which complain when they run while the interpreter ends."""
    resources = engine.engine_core.resources
    if all(socket.closed for socket in (resources.input_socket, resources.output_socket)):
        resources.ctx.destroy(linger=0)  # would wait for ever for an open socket
    engine.shutdown = _nothing


def _nothing() -> None: ...


def _process(engine: Any) -> Any:
    """The `multiprocessing` process that vLLM computes in."""
    return engine.engine_core.resources.engine_manager.processes[0]


def _kv_cache_bytes(facts: ModelFacts, max_num_seqs: int) -> int:
    longest = facts.kv_bytes_per_token * (facts.max_len + BLOCK_SIZE)  # without room for one, vLLM does not start
    allowed = int(psutil.virtual_memory().available * MAX_KV_CACHE_SHARE)
    return max(MIN_KV_CACHE_BYTES, longest, min(longest * max_num_seqs, allowed, MAX_KV_CACHE_BYTES))


@contextmanager
def _children_environment(folder: Path) -> Iterator[None]:
    """While it lasts, Python processes that vLLM starts put their temporary files into `folder`, where vLLM's
    sockets lie too, and keep torch's broken companions out from their first line: the engine's process imports
    them while it unpickles its arguments, and so does a helper that meets a kind of model for the first time.
    """
    source = Path(torch_guard.__file__).read_text()
    (folder / "sitecustomize.py").write_text(f"{source}\n\nblock_broken_extras()\n")
    path = os.environ.get("PYTHONPATH")
    changes = {
        "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder),
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _own_entry() -> Iterator[None]:
    """While it lasts, vLLM starts its process through `vllm_extension.run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    from node.rollout.vllm_extension import run_engine_core

    original = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = run_engine_core
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = original
