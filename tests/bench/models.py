"""The base folders that benches of engines run on. Impure: files, the cache folder."""

import subprocess
import sys
import tempfile
from pathlib import Path

from coordinator.demo_real import base_folder

TASK = ("--environment", "chain_sum", "--param=min_terms=2", "--param=max_terms=4", "--param=max_digits=2")


def base(name: str) -> Path:
    """`tiny`: the project's own model, untrained, made anew; `real`: SmolLM2-135M-Instruct, made once and cached where
    `make demo-real` looks for it."""
    if name == "tiny":
        folder = Path(tempfile.mkdtemp(prefix="hx-")) / "base"
        _create(folder, "--tiny", *TASK)
        return folder
    folder = base_folder()
    if not folder.is_dir():
        _create(folder, "--smollm2")
    return folder


def _create(folder: Path, *source: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "node.cli", "base", "create", str(folder), *source]
    subprocess.run(command, check=True, stdout=sys.stderr)
