"""`make bench-coordinator`: all figures of the coordinator in one table; status 1 if one misses its threshold.

Each part is a process of its own, so that what one leaves behind is not measured by the next.
"""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict

from tests.bench.table import Figure, print_table

PARTS = ("simulation", "throughput", "scale", "resume", "recovery")


def run_part(name: str) -> list[Figure]:
    """The figures of one part. Its own words go to standard error."""
    command = [sys.executable, "-m", "tests.bench.coordinator", "--part", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return [Figure(f"{name} did not finish", float(done.returncode), "", "status 0", False, "its own process")]
    return [Figure(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main(arguments: list[str]) -> int:
    """Status 0 if every threshold was reached. `--part NAME` measures one part and prints it as JSON; names of parts
    choose them."""
    if arguments[:1] == ["--part"]:
        figures = importlib.import_module(f"tests.bench.{arguments[1]}").figures()
        print(json.dumps([asdict(figure) for figure in figures]))
        return 0
    unknown = set(arguments) - set(PARTS)
    if unknown:
        print(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    measured: list[Figure] = []
    for name in arguments or PARTS:
        print(f"==> {name}", file=sys.stderr, flush=True)
        measured += run_part(name)
    return 0 if print_table(measured) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
