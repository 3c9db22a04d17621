"""A stand-in for NVIDIA's library: GPUs whose users, caps and refusals a test decides."""

from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """Answers like `pynvml`. `users` are process ids that compute, by GPU; `busy` those seen busy, with their share."""

    class NVMLError(Exception):
        """The root."""

    class NVMLError_NoPermission(NVMLError):
        """Not an administrator."""

    class NVMLError_NotFound(NVMLError):
        """Nothing to tell."""

    class NVMLError_NotSupported(NVMLError):
        """Not on this GPU."""

    def __init__(self, num_gpus: int = 1, *, may_set: bool = True) -> None:
        self.users: dict[int, list[int]] = {index: [] for index in range(num_gpus)}
        self.busy: list[tuple[int, int]] = []
        self.caps_mw = dict.fromkeys(range(num_gpus), 300_000)
        self.may_set, self.is_broken, self.sets = may_set, False, list[tuple[int, int]]()

    def nvmlInit(self) -> None:
        self._answer()

    def nvmlDeviceGetCount(self) -> int:
        return len(self.users)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}f00"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._answer()
        return [SimpleNamespace(pid=pid) for pid in self.users[handle]]

    def nvmlDeviceGetProcessUtilization(self, handle: int, seen_us: int) -> list[Any]:
        if not self.busy:
            raise self.NVMLError_NotFound
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=seen_us + 1) for pid, share in self.busy]

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        self._answer()
        return self.caps_mw[handle]

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> tuple[int, int]:
        return 100_000, 400_000

    def nvmlDeviceSetPowerManagementLimit(self, handle: int, milliwatts: int) -> None:
        if not self.may_set:
            raise self.NVMLError_NoPermission
        self.caps_mw[handle] = milliwatts
        self.sets.append((handle, milliwatts))

    def _answer(self) -> None:
        if self.is_broken:
            raise self.NVMLError("GPU is lost")
