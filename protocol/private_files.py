"""Files and folders that only their owner may see: read, write and lock them, or say why not. Impure: files.

Invariant: what is judged is what is opened. A file that others could read, or a folder that others could
enter, is refused and never repaired, since what it held may be known already.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import HomeInUseError, IdentityError, KeyFileExposedError

MAX_PRIVATE_BYTES = 1 << 20

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_private_folder(folder: Path) -> None:
    """Raises `IdentityError` or `KeyFileExposedError` unless the folder is ours and closed to others, who
    could else swap the key in it or connect to a socket."""
    status = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        raise IdentityError(f"{folder} cannot be used", why="it is a link or a file", remedy="Name the folder itself.")
    if status.st_uid != os.geteuid():
        raise IdentityError(
            f"{folder} cannot be used",
            why=f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}",
            remedy="Run as its owner, or name another folder.",
        )
    if status.st_mode & _OTHERS:
        raise KeyFileExposedError(
            f"{folder} is open to other users",
            why=f"its mode is {stat.S_IMODE(status.st_mode):04o}",
            remedy=f"Run `chmod 700 {folder}` if it holds hexcomb's files alone; else name another folder.",
        )


def read_private(path: Path) -> bytes:
    """The bytes of a file of ours that nobody else can read.

    Raises `KeyFileExposedError` on an open mode, `IdentityError` on a link, another owner or no plain
    file, and `FileNotFoundError`.
    """
    descriptor = _open_itself(path)
    try:
        _check_private_file(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_PRIVATE_BYTES)
    finally:
        os.close(descriptor)


def _open_itself(path: Path) -> int:
    """A descriptor of the file and of nothing that it points to; does not wait for the writer of a pipe."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IdentityError(
                f"{path} cannot be used", why="it is a symbolic link", remedy="Put the file itself there."
            ) from error
        if error.errno == errno.EACCES:
            raise IdentityError(
                f"{path} cannot be read", why="it belongs to another user", remedy="Run as its owner."
            ) from error
        raise


def _check_private_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PRIVATE_BYTES:
        raise IdentityError(
            f"{path} cannot be used", why="it is not a small plain file", remedy="Move it out of the way."
        )
    if status.st_uid != os.geteuid():
        raise IdentityError(
            f"{path} cannot be used",
            why=f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}",
            remedy="Run as its owner.",
        )
    if status.st_mode & _OTHERS:
        raise KeyFileExposedError(
            f"{path} can be read by other users",
            why=f"its mode is {stat.S_IMODE(status.st_mode):04o}",
            remedy=f"Run `chmod 600 {path}`; if others use this machine, make a new key instead.",
        )


def write_private(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Puts `data` at `path` at once or not at all, readable by the owner alone, and durable."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        create_private(temporary, data, mode=mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def create_private(path: Path, data: bytes, *, mode: int) -> None:
    """Creates `path` with `data`, durable; raises `FileExistsError`, and leaves nothing after another
    error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds an advisory lock that ends with the process, however it ends; the file holds the process id."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "r+b") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(32).decode("ascii", errors="replace").strip() or "unknown"
            raise HomeInUseError(
                f"{what} is in use by the daemon with process id {holder}",
                why="two daemons with one key would speak with one name",
                remedy="Stop that daemon, or give this one another folder with --home.",
            ) from error
        file.truncate(0)
        file.write(b"%d\n" % os.getpid())
        file.flush()
        yield
