"""The C heap of a process that lives long: large buffers go back to the system as soon as they are free. Impure.

glibc raises its threshold for mapped buffers to the largest that was ever freed, and has a heap for each of many
threads; weights and gradients that pass through threads would then stay in all these heaps, in holes. Other C libraries
have no such call, and need none.
"""

import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MMAP_THRESHOLD_BYTES, NUM_ARENAS = 256 << 10, 2


def steady_heap() -> bool:
    """Fixes both limits for this process; whether its C library knows them. To be called before threads are started."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    fixed = (mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), mallopt(M_ARENA_MAX, NUM_ARENAS))
    return all(done == 1 for done in fixed)
