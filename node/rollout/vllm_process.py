"""vLLM's process on CPU, begun before vLLM is imported here: both sides import at the same time, which takes half as
long. Impure: a process.

Invariant: the process runs what vLLM gives its own process to run, in the environment that vLLM wants for it, and never
outlives its owner. Imports nothing of vLLM in the owner's process.
"""

import contextlib
import functools
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from node.rollout.vllm_surroundings import NO_COMPILER, children_environment

EXIT_ORPHANED = 1
IMPORTS = ("node.rollout.vllm_extension", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""What vLLM's process will need, whatever the model."""

PRELOADED = (
    ("vllm", ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*")),
    ("torch", ("../torch.libs/libgomp*.so*", "lib/libgomp*.so*")),
)
"""Where packages carry libraries that vLLM has its process load before all others: a faster `malloc`, and torch's own
OpenMP. The first that is there of each."""


class EarlyProcess(SpawnProcess):
    """A process that has begun, and waits to be told what to run. To vLLM it looks like one that it starts itself."""

    _writer: Connection | None = None
    _job: tuple[Callable[..., None], Mapping[str, Any]] | None = None

    @classmethod
    def begin(cls, imports: Sequence[str] = IMPORTS) -> "EarlyProcess":
        """It imports from now on."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = cls(target=_wait_and_run, args=(reader, imports))
        process.start()
        reader.close()
        process._writer = writer
        return process

    @property
    def has_job(self) -> bool:
        """Whether it was told what to run."""
        return self._job is not None

    def give(self, target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
        """What `start` tells it to run."""
        self._job = (target, kwargs)

    def start(self) -> None:
        """Has it run what it was given. Raises `OSError`, which says how it ended, if it has ended before."""
        if self._writer is None:
            super().start()
            return
        try:
            with self._writer as writer:
                writer.send(dict(os.environ))
                writer.send(self._job)
        except BrokenPipeError as error:
            self.join()
            raise OSError(f"its process ended while it imported vLLM, with status {self.exitcode}") from error

    def discard(self) -> None:
        """Ends it: there is nothing to run."""
        self.kill()
        self.join()


class EarlyContext(SpawnContext):
    """What vLLM makes its process by: it is the one that has begun, unless that lacks a library that vLLM preloads."""

    def __init__(self, early: EarlyProcess, preload: str) -> None:
        super().__init__()
        self.early, self._preload = early, preload

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> SpawnProcess:
        if os.environ.get("LD_PRELOAD", "") != self._preload:
            self.early.discard()
            return SpawnProcess(target=target, name=name, kwargs=kwargs)
        self.early.give(target, kwargs)
        self.early.name = name
        return self.early


@contextlib.contextmanager
def early_context(folder: Path) -> Iterator[EarlyContext | None]:
    """A process that begins at once, with its files in `folder`; ended after it unless vLLM took it. None where torch
    is not a CPU build: elsewhere vLLM makes its process by other means."""
    if not metadata.version("torch").endswith("+cpu"):
        yield None
        return
    preload = os.environ.get("LD_PRELOAD") or ":".join(preloaded())
    compiler = {name: os.environ.get(name, value) for name, value in NO_COMPILER.items()}
    with children_environment(folder, LD_PRELOAD=preload, **compiler):
        early = EarlyProcess.begin()
    try:
        yield EarlyContext(early, preload)
    finally:
        if not early.has_job:
            early.discard()


def preloaded() -> list[str]:
    """Paths of what vLLM has its process preload, where its packages carry them."""
    places = [
        (Path(spec.origin).parent, patterns)
        for name, patterns in PRELOADED
        if (spec := find_spec(name)) and spec.origin
    ]
    found = [[path for pattern in patterns for path in folder.glob(pattern)] for folder, patterns in places]
    return [str(paths[0].resolve()) for paths in found if paths]


@functools.cache
def watch_owner() -> None:
    """From now on the calling process ends when the one that started it does."""
    threading.Thread(target=_end_with_owner, name="hexcomb-owner-watch", daemon=True).start()


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    if owner:
        owner.join()
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # the engine's own folder, which the owner made
        os._exit(EXIT_ORPHANED)  # nobody is left to clean up for, and other threads may be deep in a kernel


def _wait_and_run(reader: Connection, imports: Sequence[str]) -> None:
    """The process's entry."""
    watch_owner()
    for name in imports:
        import_module(name)
    with reader:
        os.environ.update(reader.recv())
        target, kwargs = reader.recv()
    target(**kwargs)
