"""Benches in parts, each in a process of its own, so that what one leaves behind is not measured by the next."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tests.bench.table import Figure, print_table


def main(module: str, arguments: list[str], parts: Sequence[str]) -> int:
    """A bench whose parts are modules beside it; status 0 if every threshold was reached. `--part NAME` measures one
    part and prints it as JSON; names of parts choose them."""
    if arguments[:1] == ["--part"]:
        figures = importlib.import_module(f"tests.bench.{arguments[1]}").figures()
        print(json.dumps([asdict(figure) for figure in figures]))
        return 0
    return run_parts(module, arguments, parts)


def run_parts(module: str, names: Sequence[str], parts: Sequence[str]) -> int:
    """Runs `python -m MODULE --part NAME` for each of `names` (none = all), which prints its figures as JSON in its
    last line, and prints one table; status 0 if every threshold was reached."""
    unknown = set(names) - set(parts)
    if unknown:
        print(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    measured: list[Figure] = []
    for name in names or parts:
        print(f"==> {name}", file=sys.stderr, flush=True)
        measured += _run_part(module, name)
    return 0 if print_table(measured) else 1


def _run_part(module: str, name: str) -> list[Figure]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--part", name], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        return [Figure(f"{name} did not finish", float(done.returncode), "", "status 0", False, "its own process")]
    return [Figure(**row) for row in json.loads(done.stdout.splitlines()[-1])]
