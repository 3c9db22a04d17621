"""Long lives: what large buffers took is given back, also when they passed through many threads."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, psutil
from protocol.heap import steady_heap
if sys.argv[1] == "steady" and not steady_heap():
    raise SystemExit("no mallopt")
def pass_through():
    parts = [bytearray(b"x" * 700_000) for _ in range(40)]
    kept.append(bytearray(60_000))
    del parts[::2], parts
kept = []
for _ in range(30):
    threads = [threading.Thread(target=pass_through) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these limits")
def test_large_buffers_of_many_threads_are_given_back() -> None:
    def rss_mb(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=60)
        return int(done.stdout)

    assert rss_mb("steady") < 150, "what is kept is 29 MB"
