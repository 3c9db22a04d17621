"""Takes from this process what reward code must not have: network, other processes, files, memory. Impure: Linux calls.

Invariant: nothing here can be undone by what runs afterwards. Layers stand for each other: namespaces where the kernel
permits them, a Landlock domain, a seccomp filter. What a kernel does not have is named, never passed over in silence.
"""

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator import sandbox_filter

NEW_USER, NEW_NETWORK, NEW_IPC = 0x10000000, 0x40000000, 0x08000000
NO_NEW_PRIVILEGES = 38
SET_FILTER, ALL_THREADS = 1, 1
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Landlock's calls; their numbers are the same on every machine."""

READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""By Landlock's version, and 16 after."""

TCP_RIGHTS, SCOPES = 0b11, 0b11
CAPABILITY_VERSION = 0x20080522
MAX_FILES, MAX_THREADS = 64, 64

SYSTEM = (
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/dev/null", "/dev/zero"),
    *("/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
"""What Python and its libraries read, none of it secret."""


@dataclass(frozen=True, slots=True)
class Protection:
    """One promise of the sandbox, and what keeps it: empty where nothing does."""

    promise: str
    by: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For the log and the error."""
        return f"{self.promise} ({', '.join(self.by) or 'NOT on this kernel'})"


class Sandbox:
    """The steps in their order: `leave_world` while there is one thread and sockets are still to be had, then
    `close` once all that is needed is open."""

    def __init__(self) -> None:
        self._layers: set[str] = set()

    def leave_world(self) -> None:
        """Into a network without an interface, with no rights over anything outside."""
        uid, gid = os.geteuid(), os.getegid()
        if not self._try(lambda: _check(_libc().unshare(NEW_USER | NEW_NETWORK | NEW_IPC))):
            return
        self._layers.add("namespaces")
        with contextlib.suppress(OSError):  # the ids only lose their names
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")

    def close(self, readable: Sequence[Path], *, memory_bytes: int, written_bytes: int) -> tuple[Protection, ...]:
        """Everything else. `readable` are files and folders, with all below them; `written_bytes` is for each file."""
        with contextlib.suppress(OSError):  # the first to go when memory is short
            Path("/proc/self/oom_score_adj").write_text("1000")
        for limit, most in (
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, written_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, MAX_FILES),
        ):
            resource.setrlimit(limit, (most, most))
        if "namespaces" in self._layers:  # else it would count what the user runs elsewhere
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
        self._try(lambda: _check(_libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)))
        version = _landlock_version()
        if version and self._try(lambda: _restrict_files(readable, version)):
            self._layers |= {"Landlock"} | ({"Landlock scopes"} if version >= 6 else set())
        self._try(_drop_capabilities)
        if self._try(_install_filter):
            self._layers.add("seccomp")
        return self._protections()

    def _try(self, step: Callable[[], None]) -> bool:
        """Whether a step succeeded that not every kernel, and no other system, has."""
        if sys.platform != "linux":
            return False
        try:
            step()
        except (OSError, KeyError, AttributeError) as error:
            print(f"sandbox: not to be had here: {error}", file=sys.stderr)
            return False
        return True

    def _protections(self) -> tuple[Protection, ...]:
        keepers = {
            "no network": ("namespaces", "seccomp"),
            "no other process": ("seccomp",),
            "no signal to others": ("seccomp", "Landlock scopes"),
            "no file but Python's and its own": ("Landlock",),
        }
        return tuple(
            Protection(promise, tuple(layer for layer in layers if layer in self._layers))
            for promise, layers in keepers.items()
        )


def readable_by_python(folder: Path | None, hidden: Iterable[Path]) -> list[Path]:
    """What imports need: the system, the interpreter, each entry of the import path, the modules and packages of
    `folder`. Of an entry that holds a hidden folder only modules and packages, too, beside the names of its files."""
    secret = [path.resolve() for path in hidden]
    entries = {Path(entry).resolve() for entry in (*sys.path, sys.prefix, sys.base_prefix) if entry}
    found = [Path(name) for name in SYSTEM]
    for entry in sorted(entries):
        found += _modules_in(entry) if any(path.is_relative_to(entry) for path in secret) else [entry]
    return found if folder is None else [*found, *_modules_in(folder.resolve())]


def _modules_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.glob("*.py")
        yield from (path.parent for path in folder.glob("*/__init__.py"))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _call(number: int, *arguments: object) -> int:
    """A system call by number. Raises `OSError`."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc().syscall(ctypes.c_long(number), *words))
    _check(result)
    return result


def _landlock_version() -> int:
    """0 where the kernel has none."""
    try:
        return _call(CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0
    except OSError:
        return 0


def _restrict_files(readable: Sequence[Path], version: int) -> None:
    """Reading of what is named, listing of nothing else but the folders of the import path, writing of nothing."""
    handled = (1 << NUM_FILE_RIGHTS.get(version, 16)) - 1
    rules = struct.pack("QQQ", handled, TCP_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call(CREATE_RULESET, rules[:size], size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ_FILE | READ_FOLDER)
        for entry in sys.path:  # imports list them
            _allow(ruleset, Path(entry), READ_FOLDER)
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    try:
        rights = rights if path.is_dir() else rights & READ_FILE
        if rights:
            _call(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


def _drop_capabilities() -> None:
    header, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    _check(_libc().capset(header, none))


def _install_filter() -> None:
    """For all threads, those that a library may have begun among them."""
    machine = platform.machine()
    steps = sandbox_filter.program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(buffer))
    _call(sandbox_filter.SECCOMP[machine], SET_FILTER, ALL_THREADS, header)
