"""`make bench-rollout`: what a daemon adds to what its engine does alone; status 1 if a threshold is missed.

Each part is a process of its own (`--part NAME`). The daemon and the bare engine sample the same slots with the same
noise, one after the other and more than once, so that both meet the same machine; that they give the same text is
checked on the way.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

import msgspec

from tests.bench.bare_vllm import Bare
from tests.bench.fed_daemon import Fed, Plan, feed
from tests.bench.parts import run_parts
from tests.bench.table import Figure, at_least, at_most, reported

PARTS = ("tiny", "real", "swap", "engines")
BARE_DEADLINE_S = 600.0
NUM_PAIRS = 2
PLANS = {"tiny": Plan(groups=256, max_new_tokens=64), "real": Plan(groups=8, max_new_tokens=64)}
LEAST = {"tiny": 0.85, "real": 0.95}
MIN_SAME = 0.9
"""Of the samples, whose texts must be equal: batches of another make-up round differently, which turns near ties."""


def speed(name: str, base: Path) -> list[Figure]:
    """The figures of one model."""
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        pairs = [_pair(Path(folder) / str(number), base, PLANS[name]) for number in range(NUM_PAIRS)]
        engines = Path(folder) / "transformers"
        engines.mkdir()
        slow = feed(engines, base, Plan(groups=PLANS[name].groups // 4, max_new_tokens=64), engine="transformers")
    rates = [(_tokens(fed.token_ids) / fed.seconds, _tokens(bare.token_ids) / bare.seconds) for fed, bare in pairs]
    ratio = median(ours / theirs for ours, theirs in rates)
    same = min(_share_same(fed, bare) for fed, bare in pairs)
    cost = median(bare.with_noise_s / bare.without_noise_s for _, bare in pairs) - 1
    shown = ", ".join(f"{ours:.0f} / {theirs:.0f}" for ours, theirs in rates)
    what = f"{PLANS[name].num_slots} samples of at most {PLANS[name].max_new_tokens} tokens; tokens/s {shown}"
    cost_of = "noise of every token, 64 at once"
    found = [
        at_least(f"{name}: a fed daemon over vllm.LLM.generate", ratio, LEAST[name], unit="x", anchor=what),
        at_least(f"{name}: samples that are the same in both", same, MIN_SAME, anchor="same seeds, other batches"),
        reported(
            f"{name}: vLLM engine over transformers engine",
            median(ours for ours, _ in rates) * slow.seconds / _tokens(slow.token_ids),
            unit="x",
            anchor="both as fed daemons, 64 seats",
        ),
    ]
    if name == "real":
        return [*found, at_most(f"{name}: cost of the seeded noise", cost, 0.25, anchor=cost_of)]
    return [*found, reported(f"{name}: cost of the seeded noise", cost, anchor=cost_of)]


def _pair(folder: Path, base: Path, plan: Plan) -> tuple[Fed, Bare]:
    folder.mkdir()
    fed = feed(folder, base, plan, engine="vllm")
    (folder / "work.json").write_bytes(msgspec.json.encode(fed.work))
    command = [sys.executable, "-m", "tests.bench.bare_vllm", str(folder / "work.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=BARE_DEADLINE_S, check=True)
    return fed, msgspec.json.decode(done.stdout.splitlines()[-1], type=Bare)


def _tokens(samples: list[list[int]]) -> int:
    return sum(map(len, samples))


def _share_same(fed: Fed, bare: Bare) -> float:
    return sum(ours == theirs for ours, theirs in zip(fed.token_ids, bare.token_ids, strict=True)) / len(fed.token_ids)


def part(name: str) -> list[Figure]:
    """The figures of one part."""
    models = importlib.import_module("tests.bench.models")
    if name in ("swap", "engines"):
        return list(importlib.import_module(f"tests.bench.{name}").figures())
    return speed(name, models.base(name))


def main(arguments: list[str]) -> int:
    """Status 0 if every threshold was reached."""
    if arguments[:1] == ["--part"]:
        print(json.dumps([asdict(figure) for figure in part(arguments[1])]))
        return 0
    return run_parts("tests.bench.rollout", arguments, PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
