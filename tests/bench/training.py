"""`make bench-training`: figures of the training plane in one table; status 1 if one misses its threshold."""

import importlib
import json
import sys
from dataclasses import asdict

from tests.bench.parts import run_parts

PARTS = ("averaging", "exactness")


def main(arguments: list[str]) -> int:
    """Status 0 if every threshold was reached. `--part NAME` measures one part and prints it as JSON; names of parts
    choose them."""
    if arguments[:1] == ["--part"]:
        figures = importlib.import_module(f"tests.bench.{arguments[1]}").figures()
        print(json.dumps([asdict(figure) for figure in figures]))
        return 0
    return run_parts("tests.bench.training", arguments, PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
