"""Waiting for the end of processes that are not ours, by the kernel's word."""

import os
import select


def is_gone(pid: int, *, deadline_s: float = 20.0) -> bool:
    """Whether the process ends within the deadline; waits on the kernel's handle of it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], deadline_s)[0])
    finally:
        os.close(handle)
