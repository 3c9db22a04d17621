"""A version's content between its two forms: chunks in a blob store, and a safetensors file. Impure: the
disk.

Invariants: the safetensors file of a body is a function of the body alone, header included, so that equal
versions are equal files; a header from a peer is never read, since the file is built from the manifest; the
flat content is the concatenation of the tensors in the body's order, which `body_of` makes the order of
sorted names.
"""

import json
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from node.weights.blobs import BlobStore
from protocol.errors import ChunkCorruptError, ModelMissingError, UsageError
from protocol.ids import Digest, RunId, Version
from protocol.manifest import DTYPE_BYTES, MODEL_FILES, Body, DType, ModelFile, TensorSpec

if TYPE_CHECKING:  # only what makes a version needs numpy; a daemon fetches and serves bytes
    import numpy as np

WEIGHTS_FILE = "model.safetensors"
DEFAULT_CHUNK_BYTES = 1 << 20
BASE_VERSION = Version(0)
MAX_HEADER_BYTES = 100 << 20
_ALIGNMENT = 8
_NUMPY_DTYPES: dict[str, DType] = {"<f4": "F32", "<f2": "F16"}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a safetensors file, and the position of its first byte in the file."""

    spec: TensorSpec
    start: int


def safetensors_header(tensors: Sequence[TensorSpec]) -> bytes:
    """The front of the file: length and JSON, padded so that the content starts on a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def assemble(body: Body, blobs: BlobStore, path: Path) -> None:
    """Writes the version as a safetensors file, whole or not at all; every chunk is checked by its hash.

    Raises `ChunkMissingError`, or `ChunkCorruptError` if a chunk has not the length that the manifest says.
    """
    with _replacing(path) as file:
        file.write(safetensors_header(body.tensors))
        for chunk in content(body, blobs):
            file.write(chunk)


def content(body: Body, blobs: BlobStore) -> Iterator[bytes]:
    """The checked chunks of the version, in order."""
    for index, digest in enumerate(body.chunks):
        chunk = blobs.get(digest)
        if len(chunk) != chunk_length(body, index):
            raise ChunkCorruptError(f"chunk {digest} was refused", why="it has not the length that the manifest says")
        yield chunk


def chunk_length(body: Body, index: int) -> int:
    """Bytes of a chunk: all are of one size but the last."""
    return min(body.chunk_bytes, body.num_bytes - index * body.chunk_bytes)


def materialize_model(body: Body, blobs: BlobStore, folder: Path) -> None:
    """Writes the model's small files (configuration, tokenizer) into `folder`, under allowed names alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for item in body.files:
        if item.name not in MODEL_FILES:
            raise ChunkCorruptError(f"a model file was refused: {item.name[:80]!a} is not a name that models have")
        data = blobs.get(item.digest)
        with _replacing(folder / item.name) as file:
            file.write(data)


def export_model(body: Body, blobs: BlobStore, folder: Path) -> None:
    """Writes the version as an ordinary model folder; the weights come last. Raises `UsageError` on a folder that holds
    something, and as `assemble` does."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder", remedy="Name a new one.")
    materialize_model(body, blobs, folder)
    assemble(body, blobs, folder / WEIGHTS_FILE)


def body_of(
    source: "Path | Mapping[str, np.ndarray[Any, Any]]",
    blobs: BlobStore,
    *,
    model_dir: Path | None = None,
    run_id: RunId | None = None,
    version: Version = BASE_VERSION,
    parent: Digest | None = None,
    optimizer: Digest | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Body:
    """Cuts tensors into chunks, stores them, and describes them; tensors lie in the order of sorted names.

    `source` is a safetensors file or arrays by name; the small files of `model_dir` come along. Raises
    `ModelMissingError` on a file that cannot be read and `UsageError` on an element type that runs do not
    have.
    """
    if isinstance(source, Path):
        with open_tensors(source) as (tensors, data):
            specs = tuple(item.spec for item in tensors)
            parts = (data[item.start : item.start + item.spec.num_bytes] for item in tensors)
            chunks = store_chunks(parts, blobs, chunk_bytes=chunk_bytes)
    else:
        import numpy as np

        arrays = [(name, np.ascontiguousarray(source[name])) for name in sorted(source)]
        specs = tuple(TensorSpec(name, source[name].shape, _dtype_of(name, array)) for name, array in arrays)
        buffers = (array.reshape(-1).view(np.uint8).data for _, array in arrays)
        chunks = store_chunks(buffers, blobs, chunk_bytes=chunk_bytes)
    files = store_model_files(model_dir, blobs) if model_dir is not None else ()
    return Body(run_id, version, parent, specs, files, chunk_bytes, chunks, optimizer)


def store_chunks(parts: Iterable[memoryview], blobs: BlobStore, *, chunk_bytes: int) -> tuple[Digest, ...]:
    """Stores the concatenation of byte views as chunks of one size, the last one shorter; copies only at
    the seams.
    """
    digests: list[Digest] = []
    rest = bytearray()
    for part in parts:
        position = min(len(part), chunk_bytes - len(rest)) if rest else 0
        rest += part[:position]
        if len(rest) == chunk_bytes:
            digests.append(blobs.put(bytes(rest)))
            rest.clear()
        while not rest and len(part) - position >= chunk_bytes:
            digests.append(blobs.put(part[position : position + chunk_bytes]))
            position += chunk_bytes
        rest += part[position:]
    if rest:
        digests.append(blobs.put(bytes(rest)))
    return tuple(digests)


def store_model_files(model_dir: Path, blobs: BlobStore) -> tuple[ModelFile, ...]:
    """Stores the small files that a manifest may carry. Raises `ModelMissingError` without a config.json."""
    present = [name for name in MODEL_FILES if (model_dir / name).is_file()]
    if "config.json" not in present:
        raise ModelMissingError(f"{model_dir} has no config.json", remedy="Name the folder of a model.")
    return tuple(ModelFile(name, blobs.put((model_dir / name).read_bytes())) for name in present)


@contextmanager
def open_tensors(path: Path) -> Iterator[tuple[list[FileTensor], memoryview]]:
    """The tensors of a local safetensors file by sorted name, and a view of the whole file while the
    context lasts.

    Raises `ModelMissingError` on what is not such a file, and `UsageError` on an element type that runs do
    not have.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelMissingError(f"the weights {path} cannot be opened", why=str(error.strerror)) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        tensors = _read_header(file, size, path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield tensors, view


def _read_header(file: IO[bytes], size: int, path: Path) -> list[FileTensor]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise _not_weights(path, "its header's length is out of range")
    try:
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        tensors = [_file_tensor(name, entries[name], 8 + length) for name in sorted(entries)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_weights(path, "its header cannot be read") from error
    position = 8 + length
    for item in sorted(tensors, key=lambda item: (item.start, item.spec.num_bytes)):
        if item.start != position:
            raise _not_weights(path, f"there is a hole or an overlap before {item.spec.name}")
        position += item.spec.num_bytes
    if position != size:
        raise _not_weights(path, "its tensors do not fill it")
    return tensors


def _file_tensor(name: str, entry: dict[str, Any], base: int) -> FileTensor:
    dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    if dtype not in DTYPE_BYTES:
        raise _unknown_dtype(name, dtype)
    spec = TensorSpec(name, shape, dtype)
    if min(shape, default=0) < 0 or start < 0 or stop - start != spec.num_bytes:
        raise ValueError(f"tensor {name} has not the length of its shape")
    return FileTensor(spec, base + start)


def _dtype_of(name: str, array: "np.ndarray[Any, Any]") -> DType:
    if array.dtype.str not in _NUMPY_DTYPES:
        raise _unknown_dtype(name, str(array.dtype))
    return _NUMPY_DTYPES[array.dtype.str]


def _unknown_dtype(name: str, dtype: str) -> UsageError:
    return UsageError(
        f"tensor {name} cannot be part of a version",
        why=f"its type is {dtype}",
        remedy="Convert it to float32.",
    )


def _not_weights(path: Path, why: str) -> ModelMissingError:
    return ModelMissingError(f"{path} is not a safetensors file", why=why)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the context ends well, and vanishes otherwise."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
