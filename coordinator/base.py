"""The base model's folder, as far as the coordinator reads it: content, canary, what long slots cost. Impure: files."""

import json
from pathlib import Path

import msgspec

from coordinator.hearsay import canary_of
from coordinator.home import CoordinatorHome
from protocol.errors import ModelMissingError
from protocol.ids import Version
from protocol.manifest import Body


def read_base(folder: Path, home: CoordinatorHome) -> Body:
    """The base model's body, as this run's version 0. Raises `ModelMissingError` or `ManifestRefusedError`."""
    path = folder / "body.msgpack"
    if not path.is_file():
        raise ModelMissingError(
            f"the base model {folder} is not there",
            why="it has no body.msgpack",
            remedy=f"Make it with `hexcomb base create {folder}`, or name the right folder in the run file.",
        )
    base = Body.from_bytes(path.read_bytes())
    return Body(home.run_id, Version(0), None, base.tensors, base.files, base.chunk_bytes, base.chunks, base.optimizer)


def read_base_canary(folder: Path) -> tuple[float, ...]:
    """What the base's maker computed of the probe; nothing where that is not there or not sound."""
    path = folder / "canary.json"
    try:
        return canary_of(msgspec.json.decode(path.read_bytes(), type=list[float])) if path.is_file() else ()
    except msgspec.DecodeError:
        return ()


def read_square_cost(folder: Path, body: Body) -> float:
    """What attention adds for a trainer: L tokens cost as much as `L + square_cost * L * L` tokens without it. 0 where
    the model's config.json does not say how wide and deep it is.

    A forward pass takes `2 * parameters + 2 * layers * L * width` FLOPs per token, and a backward pass twice both
    (Kaplan et al. 2020, table 1).
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:  # whoever makes an engine of it says what is wrong
        config = {}
    said = config if isinstance(config, dict) else {}
    num_layers, width = said.get("num_hidden_layers"), said.get("hidden_size")
    num_parameters = sum(tensor.num_elements for tensor in body.tensors)
    if not isinstance(num_layers, int) or not isinstance(width, int) or min(num_layers, width, num_parameters) <= 0:
        return 0.0
    return num_layers * width / num_parameters
