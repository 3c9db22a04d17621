"""`make bench-training`: figures of the training plane in one table; status 1 if one misses its threshold."""

import sys

from tests.bench.parts import main

PARTS = ("averaging", "exactness")

if __name__ == "__main__":
    sys.exit(main("tests.bench.training", sys.argv[1:], PARTS))
