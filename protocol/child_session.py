"""The process group of one child, its guard, its run-time folder and its log. Impure.

Invariant: nothing in the group outlives the daemon. The child leads a session of its own; a guard, a shell that
reads from a pipe of which only the daemon holds the other end, kills the child's group when that pipe closes, however
the daemon ended. So what a child starts (a network daemon, engine workers) goes too, as long as it stays in the group.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Self

from protocol.errors import MachineUnfitError

MAX_LOG_BYTES = 8 * 2**20
NUM_TAIL_LINES = 20
_GUARD = 'read -r _; kill -s KILL -- "-$1"'


class ProcessGroup:
    """The group that a child leads, with its guard."""

    def __init__(self, group_id: int, guard: asyncio.subprocess.Process, lifeline: int) -> None:
        self.group_id, self._guard, self._lifeline = group_id, guard, lifeline

    @classmethod
    async def around(cls, leader: asyncio.subprocess.Process) -> Self:
        """Guards the group of `leader`, which was started in a session of its own."""
        read_end, lifeline = os.pipe()  # neither is inherited, except the one end by the guard
        try:
            guard = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _GUARD, "guard", str(leader.pid)),
                stdin=read_end,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(read_end)
        return cls(leader.pid, guard, lifeline)

    def kill(self) -> None:
        """SIGKILL to everyone in the group; may be called again."""
        try:
            os.killpg(self.group_id, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS answers PermissionError for a group of zombies
            return

    async def close(self) -> None:
        """Kills the group, then the guard, which else would kill whoever gets the group's number next; to be called
        once."""
        self.kill()
        self._guard.kill()
        os.close(self._lifeline)
        await self._guard.wait()


def check_private(run_dir: Path) -> None:
    """Creates the run-time folder, or raises MachineUnfitError when others can enter it."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = run_dir.stat()
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise MachineUnfitError(
            f"The run-time folder {run_dir} is not private",
            why="others could enter it",
            remedy=f"Run `chmod 700 {run_dir}` as its owner.",
        )


def open_log(log_path: Path) -> tuple[int, int]:
    """A descriptor that appends to the log, and the log's length; too long a log is set aside first."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
        log_path.replace(log_path.with_suffix(f"{log_path.suffix}.old"))
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return descriptor, os.fstat(descriptor).st_size


def read_tail(log_path: Path, *, start: int, max_bytes: int = 8192) -> list[str]:
    """The last lines of the log that were written after its first `start` bytes."""
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - max_bytes))
        return log.read().decode(errors="replace").splitlines()[-NUM_TAIL_LINES:]
