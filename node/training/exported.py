"""Whether an exported version computes what the trainer computes. Impure: reads a home and a folder.

Two ways to one model: a trainer's, from the manifest's chunks, and everybody's, by plain transformers from the exported
folder, whose own configuration decides the precision. Invariant: both compute the same prompt in one process and one
thread count, so that equal weights give equal logits, bit for bit.

Shape letters: L positions, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from node.home import Home
from node.torch_guard import block_broken_extras
from node.training.optimizer import OptimizerState
from node.training.trainer import TrainedVersion, Trainer, build_model
from node.weights.blobs import BlobStore
from node.weights.content import content
from protocol.errors import ManifestRefusedError
from protocol.ids import Digest
from protocol.manifest import Body, Manifest

NUM_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference between two logits of one place, over `num_logits` of them, and the exported dtype."""

    max_difference: float
    num_logits: int
    dtype: str


def compare_export(folder: Path, *, home: Home, version: int, root: Digest) -> Comparison:
    """Loads both models and compares their logits. Raises `ManifestRefusedError` when the home does not know the
    version by this root, and `ChunkMissingError` when it has not all of it."""
    block_broken_extras()
    from transformers import AutoModelForCausalLM

    body = body_in(home, version=version, root=root)
    exported = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
    generator = torch.Generator().manual_seed(version)
    ids_1L = torch.randint(exported.config.vocab_size, (1, NUM_POSITIONS), generator=generator)
    with torch.inference_mode():
        theirs_1LV = exported(input_ids=ids_1L, use_cache=False).logits
        ours = trainer_model(folder, body, home=home)
        ours_1LV = ours(input_ids=ids_1L.to(next(ours.parameters()).device), use_cache=False).logits.cpu()
    difference = float((ours_1LV.double() - theirs_1LV.double()).abs().max())
    return Comparison(difference, theirs_1LV.numel(), str(theirs_1LV.dtype).removeprefix("torch."))


def trainer_model(model_dir: Path, body: Body, *, home: Home) -> torch.nn.Module:
    """The model of a trainer that holds the version: the flat content of its chunks, bound to the parameters."""
    weights_P = np.empty(sum(tensor.num_elements for tensor in body.tensors), np.float32)
    into, position = weights_P.view(np.uint8).data, 0
    for chunk in content(body, BlobStore(home.blobs)):
        into[position : position + len(chunk)] = chunk
        position += len(chunk)
    model, device = build_model(model_dir)
    none_P = weights_P[:0]
    trainer = Trainer(model, TrainedVersion(body, OptimizerState(weights_P, none_P, none_P)), device=device)
    assert isinstance(trainer.model, torch.nn.Module)
    return trainer.model


def body_in(home: Home, *, version: int, root: Digest) -> Body:
    """The body of a version that the home's daemon knows by this root. Raises `ManifestRefusedError`."""
    path = home.path / "manifests" / f"{version}.msgpack"
    try:
        payload, _ = msgspec.msgpack.decode(path.read_bytes(), type=tuple[bytes, bytes])
        body = msgspec.msgpack.decode(payload, type=Manifest).body
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise ManifestRefusedError(f"version {version} is not known in {home.path}", why=str(error)) from error
    if body.root != root:
        raise ManifestRefusedError(f"version {version} in {home.path} is another one", why=f"its root is {body.root}")
    return body
