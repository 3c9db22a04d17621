"""Long lives: what large buffers took is given back, also when they passed through many threads."""

import subprocess
import sys

import pytest

SCRIPT = """
import random, sys, threading, psutil
from protocol.heap import steady_heap
if sys.argv[1] == "steady" and not steady_heap():
    raise SystemExit("no mallopt")
kept = []
def pass_through(seed):
    chance = random.Random(seed)
    for _ in range(3):
        parts = [bytearray(chance.choice([13_000_000, 1_400_000, 300_000, 4_000_000])) for _ in range(4)]
        kept.append(bytearray(chance.randint(1000, 60_000)))
        chance.shuffle(parts)
        del parts[1::2]
        kept.append(bytearray(chance.randint(1000, 60_000)))
for turn in range(8):
    threads = [threading.Thread(target=pass_through, args=(100 * turn + index,)) for index in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these limits")
def test_large_buffers_of_many_threads_are_given_back() -> None:
    def rss_mb(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(done.stdout)

    steady, plain = rss_mb("steady"), rss_mb("plain")
    assert steady < 120, "what is kept is 59 MB"
    assert plain > steady + 20, "the control: without it the heaps keep holes"
