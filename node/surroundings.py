"""What else goes on at this machine: other programs' load, terminals, the GPUs, this node's own memory. Impure.

`look` takes milliseconds as a rule and may take long where a driver hangs: it is called in a thread, by one caller at a
time. Invariant: what belongs to this node and its children is never counted as somebody else's.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from node.gpu import GpuOpener, Gpus, has_gpu, open_gpus
from node.limits import Facts, Limits
from protocol.errors import HexcombError

REOPEN_S = 60.0
"""Between two attempts at GPUs that could not be looked at."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds that all cores were busy, and those of them that were this node's, since some moment."""

    at_s: float
    busy_s: float
    own_s: float
    num_cores: int


def others_share(before: CpuReading, after: CpuReading) -> float:
    """The share of the machine's cores, 0 to 1, that other programs had between two readings."""
    elapsed_s = (after.at_s - before.at_s) * after.num_cores
    if elapsed_s <= 0:
        return 0.0
    others_s = (after.busy_s - before.busy_s) - max(0.0, after.own_s - before.own_s)
    return min(max(others_s / elapsed_s, 0.0), 1.0)


def read_cpu(clock: Callable[[], float] = time.monotonic) -> CpuReading:
    """The cores now."""
    total = psutil.cpu_times()
    # What follows the first seven on Linux was another machine's, or is counted in the first already.
    busy_s = sum(total[:7]) - total.idle - getattr(total, "iowait", 0.0)
    own_s = 0.0
    for process in _own():
        try:
            own_s += sum(process.cpu_times()[:4])  # its own and its ended children's
        except psutil.Error:
            continue
    return CpuReading(clock(), busy_s, own_s, psutil.cpu_count() or 1)


def terminal_quiet_s() -> float | None:
    """Seconds since somebody last typed at a terminal of this machine; None where nobody is logged in at one."""
    typed_s = []
    for user in psutil.users():
        try:
            typed_s.append(Path("/dev", user.terminal).stat().st_atime if user.terminal else 0.0)
        except OSError:
            continue
    newest_s = max(typed_s, default=0.0)
    return max(0.0, time.time() - newest_s) if newest_s else None


def own_memory_bytes() -> int:
    """Memory of this node and its children; what they share is counted once, where the system says so."""
    return sum(_memory_of(process) for process in _own())


def own_pids() -> set[int]:
    """This process and everything that it started."""
    return {process.pid for process in _own()}


@dataclass
class Surroundings:
    """Looks at the machine, and remembers since when others have left it alone. Everything that it reads is handed in,
    so that tests need no GPU and no other load."""

    limits: Limits
    idle_cpu_share: float
    opener: GpuOpener = open_gpus
    sees_gpu: Callable[[], bool] = has_gpu
    cpu: Callable[[], CpuReading] = read_cpu
    typed_quiet_s: Callable[[], float | None] = terminal_quiet_s
    own: Callable[[], set[int]] = own_pids
    name_of: Callable[[int], str | None] = field(default=lambda pid: _name_of(pid))
    clock: Callable[[], float] = time.monotonic
    _gpus: Gpus | None = None
    _opened_s: float = float("-inf")
    _gpu_trouble: str = ""
    _power_trouble: str = ""
    _last_cpu: CpuReading | None = None
    _busy_s: float | None = None
    _busy_with: str = ""
    _gpu_used_s: float = float("-inf")

    def look(self) -> Facts:
        """What is so now."""
        now_s, limits = self.clock(), self.limits
        sees_gpu = self.sees_gpu() if limits.needs_gpu else False
        users = self._look_at_gpus(now_s) if limits.needs_gpu else None
        if users:
            self._gpu_used_s = now_s
        quiet_s = self._look_at_others(now_s, users or ()) if limits.idle_only_s else None
        return Facts(
            quiet_s=quiet_s,
            busy_with=self._busy_with,
            has_gpu=sees_gpu,
            gpu_quiet_s=None if users is None else now_s - self._gpu_used_s,
            gpu_users=users or (),
            gpu_trouble=self._gpu_trouble,
            power_trouble=self._power_trouble,
        )

    def leave(self) -> None:
        """Gives back what was changed. Raises `MachineUnfitError`."""
        if self._gpus is not None:
            self._gpus.restore_power()

    def _look_at_gpus(self, now_s: float) -> tuple[str, ...] | None:
        """Others on the GPUs, None where they cannot be seen; sets the power cap on the way, since a restarted driver
        forgets it."""
        try:
            gpus = self._open(now_s)
            if gpus is None:
                return None
            self._cap_power(gpus)
            users = self._others(user.pid for user in gpus.users())
        except HexcombError as error:
            self._gpus = None
            self._gpu_trouble = self._power_trouble = _words(error)
            return None
        return users

    def _open(self, now_s: float) -> Gpus | None:
        if self._gpus is None and now_s - self._opened_s >= REOPEN_S:
            self._opened_s = now_s
            self._gpus = self.opener()
            self._gpu_trouble = ""
        return self._gpus

    def _cap_power(self, gpus: Gpus) -> None:
        self._power_trouble = ""
        if not self.limits.power_cap_w:
            return
        try:
            gpus.cap_power(self.limits.power_cap_w)
        except HexcombError as error:
            self._power_trouble = _words(error)

    def _others(self, pids: Iterable[int]) -> tuple[str, ...] | None:
        """Names of those that are not this node's. In a container the driver may number processes as its host does:
        then they are somebody else's for certain only while this node has nothing on the GPU."""
        own = self.own()
        named = {pid: self.name_of(pid) for pid in pids if pid not in own}
        strangers = [pid for pid, name in named.items() if name is None]
        if strangers and len(own) > 1:
            self._gpu_trouble = "the driver's process numbers mean nothing here, as in a container"
            return None
        self._gpu_trouble = ""
        return tuple(sorted(name or f"process {pid}" for pid, name in named.items()))

    def _look_at_others(self, now_s: float, gpu_users: tuple[str, ...]) -> float:
        reading, before = self.cpu(), self._last_cpu
        self._last_cpu = reading
        share = others_share(before, reading) if before is not None else 0.0
        if self._busy_s is None or share > self.idle_cpu_share or gpu_users:
            self._busy_s = now_s
            self._busy_with = f"{gpu_users[0]} on the GPU" if gpu_users else ""
            if share > self.idle_cpu_share:
                self._busy_with = f"others use {share:.0%} of the processor"
        typed_s = self.typed_quiet_s()
        return min(now_s - self._busy_s, float("inf") if typed_s is None else typed_s)


def _own() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _memory_of(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _name_of(pid: int) -> str | None:
    """None where there is no such process."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return f"process {pid}"


def _words(error: HexcombError) -> str:
    return f"{error.what}, {error.why}" if error.why else error.what
