"""The system calls that reward code must do without, as a seccomp program. Pure: bytes alone.

Invariant: under the program a process makes no other process and no network socket, runs no other program, signals and
limits nobody but itself, holds no memory outside its address space, and changes neither owner nor mode of a file.
Threads, and pairs of sockets within the process, stay possible.
"""

import struct

LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER_AT, MACHINE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
OTHER_ABI = 0x40000000
"""x86's second numbering of the same calls starts here."""

CLONE_THREAD = 0x10000

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}


def _table(text: str) -> tuple[dict[str, int], ...]:
    """Calls by name, one mapping for each machine, from `name x86_64 aarch64, …`; `-` = there is no such call."""
    rows = [row.split() for row in text.split(",")]
    return tuple({row[0]: int(row[column]) for row in rows if row[column] != "-"} for column in (1, 2))


REFUSED = _table("""
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, io_uring_setup 425 425, bpf 321 280,
    perf_event_open 298 241, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
    pidfd_open 434 434, pidfd_send_signal 424 424, pidfd_getfd 438 438, tkill 200 130, process_madvise 440 440,
    move_pages 279 239, migrate_pages 256 238, setpriority 141 140, sched_setparam 142 118,
    sched_setscheduler 144 119, sched_setattr 314 274, ioprio_set 251 30, unshare 272 97, setns 308 268,
    mount 165 40, umount2 166 39, pivot_root 155 41, memfd_create 319 279, shmget 29 194, mq_open 240 180,
    userfaultfd 323 282, add_key 248 217, request_key 249 218, keyctl 250 219, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, setxattr 188 5,
    lsetxattr 189 6, fsetxattr 190 7, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
""")
ON_ITSELF = _table("""
    kill 62 129, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, prlimit64 302 261,
    sched_setaffinity 203 122
""")
"""Allowed where the first argument is 0 or the process itself."""

CLONE, CLONE3 = (56, 220), 435
SECCOMP = {"x86_64": 317, "aarch64": 277}
"""The call that installs the program."""


def program(machine: str, pid: int) -> bytes:
    """The program for process `pid`; raises KeyError on a machine whose calls are not known here."""
    column = _COLUMN[machine]
    steps = [
        _step(LOAD, MACHINE_AT),
        _step(EQUAL, MACHINES[machine], yes=1),
        _step(ANSWER, KILL),
        _step(LOAD, NUMBER_AT),
        _step(AT_LEAST, OTHER_ABI, no=1),
        _step(ANSWER, REFUSE | EPERM),
    ]
    for number in REFUSED[column].values():
        steps += [_step(EQUAL, number, no=1), _step(ANSWER, REFUSE | EPERM)]
    # The C library asks for threads by `clone3`, whose arguments cannot be read here, and falls back to `clone`.
    steps += [_step(EQUAL, CLONE3, no=1), _step(ANSWER, REFUSE | ENOSYS)]
    steps += [
        _step(EQUAL, CLONE[column], no=4),
        _step(LOAD, FIRST_ARGUMENT_AT),
        _step(ANY_BIT, CLONE_THREAD, yes=1),
        _step(ANSWER, REFUSE | EPERM),
        _step(ANSWER, ALLOW),
    ]
    for number in ON_ITSELF[column].values():
        steps += [
            _step(EQUAL, number, no=5),
            _step(LOAD, FIRST_ARGUMENT_AT),
            _step(EQUAL, pid, yes=2),
            _step(EQUAL, 0, yes=1),
            _step(ANSWER, REFUSE | EPERM),
            _step(ANSWER, ALLOW),
        ]
    return b"".join([*steps, _step(ANSWER, ALLOW)])


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are how many it leaps over."""
    return struct.pack("HBBI", code, yes, no, value)
