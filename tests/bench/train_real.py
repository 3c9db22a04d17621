"""`make train-real`: does SmolLM2-135M-Instruct learn? A swarm trains it on sums; then version 0 and the last version,
exported, answer the same held-out tasks greedily by plain transformers, and the difference is judged task by task.

The first held-out tasks are left out: the swarm shows its accuracy on them, and its settings were chosen by them.
Prints the table, and ends with status 1 where a threshold is missed.
"""

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from coordinator.demo_real import ENVIRONMENT, MAX_NEW_TOKENS, TASK, RealSettings, base_folder, train_real, verdict
from coordinator.demo_view import View
from tests.bench.table import Figure, at_least, print_table, reported

NUM_TASKS = 400
NUM_SEEN = 228
"""Held-out tasks that are not judged by, because the settings were chosen by them."""
LEAST_GAIN = 0.10
Z_95 = 1.96

SETTINGS = RealSettings(
    num_versions=40,
    groups=24,
    group_size=8,
    max_lag=1,
    lr=1e-5,
    evaluate_every=10,
    num_held_out=64,
    engines=("vllm",),
    deadline_s=3600.0,
)


def solved(model_dir: Path, *, num_tasks: int) -> list[bool]:
    """Whether the model in the folder solves each of the held-out tasks after `NUM_SEEN`, greedily."""
    from node.torch_guard import block_broken_extras

    block_broken_extras()
    from transformers import AutoModelForCausalLM

    from node.training.evaluation import greedy_completions
    from protocol.gym_tasks import make_environment
    from protocol.run import EnvironmentSpec
    from protocol.tasks import load_tokenizer

    environment = make_environment(EnvironmentSpec(ENVIRONMENT, dict(TASK)))
    tasks = environment.held_out(NUM_SEEN + num_tasks)[NUM_SEEN:]
    tokenizer = load_tokenizer(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False).eval()
    completions = greedy_completions(
        model,
        [environment.prompt_ids(task, tokenizer) for task in tasks],
        stop_ids=tokenizer.stop_ids,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_id=tokenizer.pad_id,
    )
    return [environment.score(t, tokenizer.decode(c)) >= 1.0 for t, c in zip(tasks, completions, strict=True)]


def paired(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, float]:
    """The mean difference task by task, and the half width of its 95 % interval."""
    differences = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    return fmean(differences), Z_95 * stdev(differences) / math.sqrt(len(differences))


def judge(before: Sequence[bool], after: Sequence[bool], *, max_logit_difference: float) -> list[Figure]:
    """The figures with their thresholds."""
    gain, half = paired(before, after)
    anchor = f"version 0, the same {len(before)} held-out tasks, greedy"
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    won = sum(b and not a for a, b in zip(before, after, strict=True))
    return [
        reported("held-out accuracy, version 0", fmean(before), anchor=f"{len(before)} tasks, greedy"),
        reported("held-out accuracy, last version", fmean(after), anchor=f"{len(after)} tasks, greedy"),
        at_least("rise of held-out accuracy", gain, LEAST_GAIN, anchor=anchor),
        Figure("lower end of its 95 % interval", gain - half, "", "> 0", gain - half > 0, f"{anchor}, paired"),
        reported("upper end of its 95 % interval", gain + half, anchor=f"{anchor}, paired"),
        reported("tasks solved anew, lost", won, unit=f", {lost}", anchor=anchor),
        Figure(
            "largest difference of a logit", max_logit_difference, "", "0", max_logit_difference == 0.0,
            "trainer's weights, exported and loaded by transformers",
        ),
    ]  # fmt: skip


def main() -> int:
    """The bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=SETTINGS.num_versions)
    parser.add_argument("--tasks", type=int, default=NUM_TASKS)
    parser.add_argument("--deadline-s", type=float, default=SETTINGS.deadline_s)
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    chosen = parser.parse_args()

    settings = replace(SETTINGS, num_versions=chosen.versions, deadline_s=chosen.deadline_s)
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="hexcomb-train-"))
    with View(Console()) as view:
        run = train_real(settings, folder=folder, view=view)
        sound = verdict(run, settings, view)
    before, after = (solved(place, num_tasks=chosen.tasks) for place in (base_folder(), run.exported))
    passed = print_table(judge(before, after, max_logit_difference=run.max_logit_difference)) and sound
    if passed and chosen.keep is None:
        shutil.rmtree(folder)
    print(f"took {run.seconds:.0f} s; {'PASS' if passed else f'FAIL; the logs are in {folder}'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
