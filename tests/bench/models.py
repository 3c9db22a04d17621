"""The base folders that benches of engines run on. Impure: files, the cache folder."""

import subprocess
import sys
import tempfile
from pathlib import Path

TASK = ("--environment", "chain_sum", "--param=min_terms=2", "--param=max_terms=4", "--param=max_digits=2")


def base(name: str) -> Path:
    """`tiny`: the project's own model, untrained, made anew; `real`: SmolLM2-135M-Instruct, made once and cached."""
    if name == "real":
        from node.smollm2 import cached_base

        return cached_base()
    folder = Path(tempfile.mkdtemp(prefix="hx-")) / "base"
    command = [sys.executable, "-m", "node.cli", "base", "create", str(folder), "--tiny", *TASK]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder
