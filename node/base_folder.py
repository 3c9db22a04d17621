"""The folder that `hexcomb base create` makes: model files, `body.msgpack`, `canary.json`, and the chunks in `blobs/`.
Impure: files.

A run file names this folder as its base; the coordinator reads `body.msgpack` and gives version 0 its run
id, which changes no chunk. Imports torch inside functions alone, and only where weights are made.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node.weights.blobs import BlobStore
from node.weights.content import WEIGHTS_FILE, body_of
from protocol.errors import ModelMissingError, UsageError
from protocol.manifest import MODEL_FILES, Body
from protocol.run import EnvironmentSpec

BODY_FILE, BLOBS_FOLDER, CANARY_FILE = "body.msgpack", "blobs", "canary.json"


@dataclass(frozen=True, slots=True)
class BaseFolder:
    """What was made."""

    folder: Path
    body: Body


def create_tiny(
    folder: Path,
    spec: EnvironmentSpec,
    *,
    seed: int,
    warm_up: bool,
    say: Callable[[str], None],
) -> BaseFolder:
    """A tiny model for the environment, warmed up if wanted. Raises `UsageError`, `EngineError`."""
    check_vacant(folder)
    from node.base import create_tiny_base, use_one_thread
    from protocol.gym_tasks import make_environment

    use_one_thread()
    base = create_tiny_base(
        folder,
        make_environment(spec),
        seed=seed,
        warm_up_first=warm_up,
        progress=lambda p: say(f"step {p.step}: loss {p.loss:.3f}, held-out accuracy {p.accuracy:.2f}"),
    )
    write_canary(folder)
    say(f"{base.num_parameters} parameters, {base.warm_up_steps} steps, accuracy {base.accuracy:.2f}")
    return describe(folder)


def adopt_model(folder: Path, model_dir: Path) -> BaseFolder:
    """An existing Hugging Face model, its weights converted to float32, as its configuration says from then on.
    Raises `ModelMissingError`.
    """
    check_vacant(folder)
    if not (model_dir / "config.json").is_file():
        raise ModelMissingError(f"{model_dir} has no config.json", remedy="Name the folder of a model.")
    from node.base import convert_weights

    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, folder / name)
    _say_float32(folder / "config.json")
    convert_weights(model_dir, folder / WEIGHTS_FILE)
    write_canary(folder)
    return describe(folder)


def _say_float32(config: Path) -> None:
    """Else whoever loads an exported version by its configuration would round it to what the model once was."""
    settings = json.loads(config.read_text())
    settings.pop("torch_dtype", None)
    config.write_text(json.dumps({**settings, "dtype": "float32"}, indent=2) + "\n")


def write_canary(folder: Path) -> None:
    """What transformers computes of the probe (`protocol.canary`) under the folder's weights: version 0's canary."""
    from node.rollout.reference import Reference

    canary = Reference.load(folder, folder / WEIGHTS_FILE).score_own_probe()
    (folder / CANARY_FILE).write_text(json.dumps(canary))


def describe(folder: Path) -> BaseFolder:
    """Cuts the folder's weights into chunks and writes the body that names them."""
    body = body_of(folder / WEIGHTS_FILE, BlobStore(folder / BLOBS_FOLDER), model_dir=folder)
    (folder / BODY_FILE).write_bytes(body.to_bytes())
    return BaseFolder(folder, body)


def seed_store(folder: Path, blobs: BlobStore) -> int:
    """Puts a base folder's chunks into a node's store, so that it is a first seed; returns how many it named.

    Raises `ModelMissingError` where the folder is not one, `ChunkCorruptError` where a chunk in it is
    damaged.
    """
    path = folder / BODY_FILE
    if not path.is_file():
        raise ModelMissingError(
            f"{folder} is no base folder",
            why=f"it has no {BODY_FILE}",
            remedy=f"Make it with `hexcomb base create {folder}`.",
        )
    body, source = Body.from_bytes(path.read_bytes()), BlobStore(folder / BLOBS_FOLDER)
    digests = {*body.chunks, *(file.digest for file in body.files)}
    for digest in digests:
        if not blobs.has(digest):
            blobs.put(source.get(digest))
    return len(digests)


def check_vacant(folder: Path) -> None:
    """Raises `UsageError` where a base model is already: what a run was made from is not overwritten."""
    if (folder / BODY_FILE).exists():
        raise UsageError(
            f"{folder} holds a base model already", remedy="Choose another folder, or remove that one first."
        )
