"""Version content to chunks and back, read by the library that everybody uses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load_file, save_file

from node.weights.blobs import BlobStore
from node.weights.content import assemble, body_of, content, materialize_model, open_tensors, store_chunks
from protocol.errors import ChunkCorruptError, ChunkMissingError, ModelMissingError, UsageError
from protocol.ids import Digest
from protocol.manifest import ModelFile, check_body

NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=20)
TENSORS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.one_of(
        arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=17))
        for dtype in (np.float32, np.float16)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=TENSORS, chunk_bytes=st.sampled_from([1024, 1500, 4096]))
def test_round_trip(tmp_path: Path, tensors: dict[str, np.ndarray], chunk_bytes: int) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    body = body_of(tensors, blobs, chunk_bytes=chunk_bytes)
    check_body(body)
    assert [tensor.name for tensor in body.tensors] == sorted(tensors)
    flat = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    assert b"".join(content(body, blobs)) == flat
    path = tmp_path / "weights.safetensors"
    assemble(body, blobs, path)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    first = path.read_bytes()
    again = body_of(path, blobs, chunk_bytes=chunk_bytes)
    assert (again.root, again.digest) == (body.root, body.digest)
    assemble(again, blobs, path)
    assert path.read_bytes() == first


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 16))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_chunks_are_cuts_of_the_concatenation(tmp_path: Path, parts: list[bytes], chunk_bytes: int) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    digests = store_chunks(map(memoryview, parts), blobs, chunk_bytes=chunk_bytes)
    chunks = [blobs.get(digest) for digest in digests]
    assert b"".join(chunks) == b"".join(parts)
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    assert all(chunks)


def test_a_file_written_by_the_library_in_another_order_has_the_same_root(tmp_path: Path) -> None:
    tensors = {name: np.full(7, i, np.float32) for i, name in enumerate(["zebra", "ape", "cow"])}
    save_file(tensors, tmp_path / "theirs.safetensors")
    blobs = BlobStore(tmp_path / "blobs")
    assert body_of(tmp_path / "theirs.safetensors", blobs).root == body_of(tensors, blobs).root


def test_bfloat16_comes_through_without_conversion(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = {"b": torch.randn(33, dtype=torch.bfloat16), "a": torch.randn(2, 3)}
    save_torch(tensors, tmp_path / "in.safetensors")
    blobs = BlobStore(tmp_path / "blobs")
    body = body_of(tmp_path / "in.safetensors", blobs)
    assert [tensor.dtype for tensor in body.tensors] == ["F32", "BF16"]
    assemble(body, blobs, tmp_path / "out.safetensors")
    loaded = load_torch(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_missing_tampered_or_short_chunk_leaves_no_file(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    tensors = {"w": np.arange(1000, dtype=np.float32)}
    body = body_of(tensors, blobs, chunk_bytes=1024)
    path = tmp_path / "weights.safetensors"
    victim = blobs.folder / body.chunks[1]
    victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ChunkCorruptError):
        assemble(body, blobs, path)
    with pytest.raises(ChunkMissingError):
        assemble(body, blobs, path)
    short = replace(body, chunks=(*body.chunks[:1], blobs.put(b"short"), *body.chunks[2:]))
    with pytest.raises(ChunkCorruptError, match="length"):
        assemble(short, blobs, path)
    assert [item.name for item in tmp_path.iterdir()] == ["blobs"]


def test_model_files_travel_by_allowed_names_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    source.mkdir()
    with pytest.raises(ModelMissingError):
        body_of({"w": np.zeros(1, np.float32)}, BlobStore(tmp_path / "blobs"), model_dir=source)
    for name in ("config.json", "tokenizer.json", "modeling_evil.py"):
        (source / name).write_text(f'"{name}"')
    blobs = BlobStore(tmp_path / "blobs")
    body = body_of({"w": np.zeros(1, np.float32)}, blobs, model_dir=source)
    materialize_model(body, blobs, target)
    assert {item.name for item in target.iterdir()} == {"config.json", "tokenizer.json"}
    assert json.loads((target / "config.json").read_text()) == "config.json"
    for name in ("../evil.json", "modeling_evil.py", "/etc/passwd", "config.json\0"):
        evil = replace(body, files=(ModelFile(name, blobs.put(b"x")),))
        with pytest.raises(ChunkCorruptError, match="not a name that models have"):
            materialize_model(evil, blobs, target)
    gone = replace(body, files=(ModelFile("config.json", Digest("0" * 64)),))
    with pytest.raises(ChunkMissingError):
        materialize_model(gone, blobs, target)


def file_with(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, *, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234567",
        file_with(b"{}", length=2**63),
        file_with(b"{}", length=200 << 20),
        file_with(b"not json"),
        file_with(b"[" * 100_000),
        file_with([1]),
        file_with({"a": 3}),
        file_with({"a": entry(0, 8)}, bytes(4)),
        file_with({"a": entry(0, 8)}, bytes(12)),
        file_with({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        file_with({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
        file_with({"a": entry(0, 8, shape=[3])}, bytes(8)),
        file_with({"a": entry(0, 8, shape=[-1, -2])}, bytes(8)),
        b"\x80\x04\x95pickle" + bytes(40),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "weights"
    path.write_bytes(raw)
    with pytest.raises(ModelMissingError), open_tensors(path):
        pass


def test_element_types_that_runs_do_not_have_are_refused(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    with pytest.raises(UsageError, match="float64"):
        body_of({"w": np.zeros(2)}, blobs)
    (tmp_path / "w").write_bytes(file_with({"a": entry(0, 8, dtype="I64")}, bytes(8)))
    with pytest.raises(UsageError, match="I64"):
        body_of(tmp_path / "w", blobs)
    with pytest.raises(ModelMissingError):
        body_of(tmp_path / "nothing", blobs)
