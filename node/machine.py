"""What this machine is and how fast: the quick check before joining, and the probe, once per machine and
model.

Impure: looks at the system; the probe runs in a compute child. Nothing here imports torch.
"""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil

from node.compute.messages import Probe, Probed
from node.context import Node
from node.state import Capability
from protocol.errors import MachineUnfitError
from protocol.manifest import digest_of

PROBE_DEADLINE_S = 180.0
MIN_DISK_BYTES = 1 << 30
MIN_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `is_blocker` means that the node cannot work like this."""

    what: str
    is_good: bool
    remedy: str = ""
    is_blocker: bool = False


def quick_check(folder: Path) -> list[Finding]:
    """A look at the machine that takes no time and imports nothing heavy; `folder` is where the home will
    be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes, memory_bytes = shutil.disk_usage(existing).free, psutil.virtual_memory().total
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    engines = [name for name in ("vllm", "transformers") if find_spec(name) is not None]
    install = "Install hexcomb[cpu] or hexcomb[gpu] into this environment."
    return [
        Finding(f"Python {platform.python_version()}", sys.version_info >= (3, 11), "Use Python 3.11 or newer.", True),
        Finding(f"missing: {', '.join(missing)}" if missing else "torch is installed", not missing, install,
        True), Finding(f"rollout engines: {', '.join(engines) or 'none'}", bool(engines), install),
        Finding("directory library is " + ("installed" if find_spec("hivemind") else "missing"),
        find_spec("hivemind") is not None, install), Finding(f"{free_bytes / 1e9:.1f} GB free on the disk",
        free_bytes >= MIN_DISK_BYTES, "Free some space."), Finding(f"{memory_bytes / 1e9:.1f} GB of memory",
        memory_bytes >= MIN_MEMORY_BYTES, "Add memory."), ]  # fmt: skip


def require_fit(findings: list[Finding]) -> None:
    """Raises `MachineUnfitError` that names the first blocker."""
    for finding in findings:
        if finding.is_blocker and not finding.is_good:
            raise MachineUnfitError(f"this machine cannot take part: {finding.what}", remedy=finding.remedy)


async def measure(node: Node, model_dir: Path) -> Capability:
    """The node's rates on the run's model, from the home's cache or by a probe in a child of its own.

    Raises `EngineError` or `MachineUnfitError`.
    """
    cache = node.home.path / "probe.json"
    key = machine_key(model_dir)
    known = _read_cache(cache).get(key)
    if known is None:
        child = await node.start_compute()
        try:
            known = await child.request(
                Probe(str(model_dir), node.settings.limits.gpu_memory_share), Probed, deadline_s=PROBE_DEADLINE_S
            )
        finally:
            await child.terminate()
        cache.write_bytes(msgspec.json.encode({key: known}))
    allowed = node.settings.limits.memory_bytes or known.memory_bytes
    memory_bytes = min(known.memory_bytes, allowed)
    return Capability(known.decode_tokens_per_s, known.train_tokens_per_s, memory_bytes, known.device)


def machine_key(model_dir: Path) -> str:
    """Names what a measurement depends on: processor and graphics cards, version of torch, shape of the
    model."""
    cards = sorted(str(path) for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    torch_version = metadata.version("torch") if find_spec("torch") else "none"
    parts = [platform.machine(), platform.processor(), str(os.cpu_count()), *cards, torch_version]
    return digest_of("|".join(parts).encode() + (model_dir / "config.json").read_bytes())


def _read_cache(path: Path) -> dict[str, Probed]:
    """What was measured; nothing if the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Probed])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
