"""What vLLM's process finds around it: environment, folder, memory for its cache. Impure: the environment, files.

Invariant: what is changed for the start alone is as before after it. Imports nothing of vLLM.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node import torch_guard
from node.rollout.memory import BLOCK_TOKENS

MAX_TEMP_PATH_CHARS = 45  # a socket's whole path may have 107, and vLLM's names for them are long

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker inside the engine's process: two processes, not three
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that takes logits processors everywhere
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # scoring a sample of full length asks for one more token
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}

NO_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}  # spares a C++ compiler and many seconds on CPU


@contextmanager
def no_collection() -> Iterator[None]:
    """While it lasts, Python does not look for unused cycles: a quarter of the time that vLLM's six thousand modules
    take to import goes into that, and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for one engine, at a path short enough for the sockets in it."""
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= MAX_TEMP_PATH_CHARS else "/tmp"
    return tempfile.TemporaryDirectory(prefix="hexcomb-engine-", dir=parent)


@contextmanager
def children_environment(folder: Path, **more: str) -> Iterator[None]:
    """While it lasts, Python processes that are started have `more` in their environment, put their temporary files
    into `folder`, where vLLM's sockets lie too, and keep torch's broken companions out from their first line: the
    engine's process imports them while it unpickles its arguments, and so does a helper that meets a kind of model for
    the first time. They collect no garbage until their entry says so (`no_collection` has the reason).
    """
    source = Path(torch_guard.__file__).read_text()
    (folder / "sitecustomize.py").write_text(f"{source}\n\nblock_broken_extras()\n__import__('gc').disable()\n")
    path = os.environ.get("PYTHONPATH")
    changes = {
        "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder),
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        **more,
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


def device_arguments(gpu_memory_share: float) -> dict[str, Any]:
    """What vLLM is told of the device; on a CPU it is also told to leave the compiler alone."""
    import torch

    if torch.cuda.is_available():
        return {"gpu_memory_utilization": gpu_memory_share} if gpu_memory_share else {}
    for name, value in NO_COMPILER.items():
        os.environ.setdefault(name, value)
    return {"enforce_eager": True, "block_size": BLOCK_TOKENS}  # so small that the prefix cache works on short prompts


def release(engine: Any) -> None:
    """Frees what vLLM leaves to its finalizers, which complain when they run while the interpreter ends."""
    resources = engine.engine_core.resources
    if all(socket.closed for socket in (resources.input_socket, resources.output_socket)):
        resources.ctx.destroy(linger=0)  # would wait for ever for an open socket
    engine.shutdown = _nothing


def _nothing() -> None: ...


def process_of(engine: Any) -> Any:
    """The `multiprocessing` process that vLLM computes in."""
    return engine.engine_core.resources.engine_manager.processes[0]
