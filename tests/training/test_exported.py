"""An exported version computes what the trainer computes, and a version that does not is told apart."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.base import TinyShape, build_tiny_model, write_weights
from node.home import Home
from node.training.exported import compare_export
from node.weights.blobs import BlobStore
from node.weights.content import body_of, export_model
from protocol.errors import ManifestRefusedError, UsageError
from protocol.ids import Digest, RunId, Version
from protocol.keys import Identity
from protocol.manifest import Body, Manifest, Seal, sign_manifest

COORDINATOR = Identity.from_seed(b"c" * 32)
SHAPE = TinyShape(hidden=64, layers=2, heads=2, feed_forward=64)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    torch.set_num_threads(1)
    return Home.create(tmp_path_factory.mktemp("home") / "node")


@pytest.fixture(scope="module")
def body(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Body:
    """Version 3 of a run, as the home's daemon knows and holds it."""
    folder = tmp_path_factory.mktemp("model")
    model = build_tiny_model(SHAPE, num_tokens=20, seed=3)
    model.config.save_pretrained(folder)
    write_weights(model, folder / "model.safetensors")
    made = body_of(
        folder / "model.safetensors",
        BlobStore(home.blobs),
        model_dir=folder,
        run_id=RunId("ab" * 16),
        version=Version(3),
        parent=Digest("0" * 64),
    )
    signed = sign_manifest(COORDINATOR, Manifest(made, Seal(bytes(32), None, 1)))
    (home.path / "manifests").mkdir()
    (home.path / "manifests" / "3.msgpack").write_bytes(msgspec.msgpack.encode((signed.payload, signed.signature)))
    return made


def test_logits_of_an_export_are_the_trainers(home: Home, body: Body, tmp_path: Path) -> None:
    export_model(body, BlobStore(home.blobs), tmp_path / "out")
    found = compare_export(tmp_path / "out", home=home, version=3, root=body.root)
    assert (found.max_difference, found.dtype) == (0.0, "float32")
    assert found.num_logits >= 64 * 20


def test_one_changed_weight_is_seen(home: Home, body: Body, tmp_path: Path) -> None:
    export_model(body, BlobStore(home.blobs), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert compare_export(tmp_path / "out", home=home, version=3, root=body.root).max_difference > 0


def test_another_version_or_root_is_refused(home: Home, body: Body, tmp_path: Path) -> None:
    export_model(body, BlobStore(home.blobs), tmp_path / "out")
    with pytest.raises(ManifestRefusedError, match="another one"):
        compare_export(tmp_path / "out", home=home, version=3, root=Digest("1" * 64))
    with pytest.raises(ManifestRefusedError, match="not known"):
        compare_export(tmp_path / "out", home=home, version=4, root=body.root)


def test_a_folder_that_holds_something_is_not_overwritten(home: Home, body: Body, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        export_model(body, BlobStore(home.blobs), tmp_path)
    with pytest.raises(UsageError, match="not an empty folder"):
        export_model(body, BlobStore(home.blobs), tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
