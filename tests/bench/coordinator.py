"""`make bench-coordinator`: all figures of the coordinator in one table; status 1 if one misses its threshold."""

import sys

from tests.bench.parts import main

PARTS = ("simulation", "throughput", "scale", "resume", "recovery")

if __name__ == "__main__":
    sys.exit(main("tests.bench.coordinator", sys.argv[1:], PARTS))
