"""The GPUs as NVIDIA's management library shows them: who uses them, and how much power they may draw. Impure.

Only this module knows `pynvml`, and it is imported by the call that needs it. Every call may take long, so that they
are made in a thread. Invariant: a failure of library or driver is a `MachineUnfitError` with a reason, never a guess.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import MachineUnfitError

MIN_USE_PERCENT = 10
"""A program that only draws windows, like a desktop, uses less."""


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that computes on a GPU, or keeps it busy otherwise."""

    pid: int
    gpu: int


class Gpus(Protocol):
    """What is asked of the GPUs. All raise `MachineUnfitError`."""

    def users(self) -> Sequence[GpuUser]:
        """The processes on all GPUs, this node's included."""
        ...

    def cap_power(self, watts: float) -> None:
        """Sees to it that no GPU may draw more than this."""
        ...

    def restore_power(self) -> None:
        """Gives GPUs whose cap was changed the one that they had."""
        ...


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether the system shows an NVIDIA GPU, with or without the library."""
    return any(root.glob("dev/nvidia[0-9]*")) or any(root.glob("proc/driver/nvidia/gpus/*"))


def open_gpus() -> Gpus:
    """The GPUs that this node may use. Raises `MachineUnfitError` without library or GPU."""
    try:
        import pynvml
    except ImportError as error:
        raise _unfit("NVIDIA's library for Python is not installed", error) from error
    return NvmlGpus(pynvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


class NvmlGpus:
    """`Gpus` on a module like `pynvml`. `visible` is CUDA's list of the GPUs to use; None = all."""

    def __init__(self, nvml: Any, *, visible: str | None = None) -> None:
        self._nvml = nvml
        self._seen_us: dict[int, int] = {}
        self._caps_before: dict[int, int] = {}
        with self._asking("the NVIDIA driver does not answer"):
            nvml.nvmlInit()
            handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
            self._handles = {index: handle for index, handle in handles.items() if self._is_chosen(handle, visible)}
        if not self._handles:
            raise MachineUnfitError("there is no GPU to look at", why="the driver names none that CUDA may use")

    def users(self) -> Sequence[GpuUser]:
        with self._asking("the processes on the GPU cannot be listed"):
            return [GpuUser(pid, index) for index in self._handles for pid in sorted(set(self._pids(index)))]

    def cap_power(self, watts: float) -> None:
        wanted = round(watts * 1000)
        for index, handle in self._handles.items():
            with self._asking(f"the power cap of GPU {index} cannot be set"):
                now = self._nvml.nvmlDeviceGetPowerManagementLimit(handle)
                if now <= wanted:
                    continue
                least, _ = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                if wanted < least:
                    raise MachineUnfitError(f"GPU {index} cannot be capped below {least / 1000:g} W")
                self._nvml.nvmlDeviceSetPowerManagementLimit(handle, wanted)
                self._caps_before.setdefault(index, now)

    def restore_power(self) -> None:
        while self._caps_before:
            index, cap = self._caps_before.popitem()
            with self._asking(f"the power cap of GPU {index} cannot be given back"):
                self._nvml.nvmlDeviceSetPowerManagementLimit(self._handles[index], cap)

    def _pids(self, index: int) -> Iterator[int]:
        """Those that hold a context for computing, and those that kept the GPU busy since the last look."""
        nvml, handle = self._nvml, self._handles[index]
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            yield process.pid
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us.get(index, 0))
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NotSupported):  # none since the last look, or a GPU in parts
            return
        for sample in samples:
            self._seen_us[index] = max(self._seen_us.get(index, 0), sample.timeStamp)
            if sample.smUtil >= MIN_USE_PERCENT:
                yield sample.pid

    def _is_chosen(self, handle: Any, visible: str | None) -> bool:
        if visible is None:
            return True
        names = [name.strip() for name in visible.split(",")]
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return str(self._nvml.nvmlDeviceGetIndex(handle)) in names or any(n and uuid.startswith(n) for n in names)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError_NoPermission as error:
            raise MachineUnfitError(what, why="only an administrator may", remedy=_ADMIN) from error
        except self._nvml.NVMLError as error:
            raise _unfit(what, error) from error


_ADMIN = "Let an administrator run `nvidia-smi -pl WATTS`; a cap that is low enough already is left alone."

GpuOpener = Callable[[], Gpus]


def _unfit(what: str, error: Exception) -> MachineUnfitError:
    return MachineUnfitError(what, why=str(error))
