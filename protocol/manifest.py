"""The description of a version: what its bytes are, and the coordinator's word that it is the one. Pure.

A version's *content* is the concatenation of its tensors in the order of `tensors`, cut into chunks of
`chunk_bytes`; each chunk is named by its BLAKE3 digest. `Body.root` names the content; `Body.digest` names the body,
which trainers attest; the coordinator adds a `Seal` and signs both as one document. Invariant: a document is parsed
only after its signature holds, and only if it is the canonical encoding of what it says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import blake3
import msgspec

from protocol.canary import NUM_SCORED_TOKENS
from protocol.errors import ManifestRefusedError, UnauthenticatedError
from protocol.ids import Digest, RunId, Version
from protocol.keys import Identity, verify

DType = Literal["F32", "BF16", "F16"]
DTYPE_BYTES: dict[str, int] = {"F32": 4, "BF16": 2, "F16": 2}
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",  # inert: nodes get token ids, and render nothing
)
"""The only file names that a manifest may carry beside tensors: no path from a peer touches the disk."""
MAX_TENSORS, MAX_CHUNKS = 100_000, 1_000_000
MAX_DIMENSIONS, MAX_SIZE = 8, 1 << 40
KIND = "manifest"

T = TypeVar("T")


def digest_of(data: bytes | memoryview) -> Digest:
    """The BLAKE3 name of some bytes."""
    return Digest(blake3.blake3(data).hexdigest())


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in the model, shape, and element type as safetensors calls it."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A small file of the model's folder, carried as one chunk."""

    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Body:
    """What trainers attest. `parent` is the root of the version before (None for version 0); `optimizer` names the
    optimizer's state after this version, so that a newcomer can check what it is given (None for version 0)."""

    run_id: RunId | None
    version: Version
    parent: Digest | None
    tensors: tuple[TensorSpec, ...]
    files: tuple[ModelFile, ...]
    chunk_bytes: int
    chunks: tuple[Digest, ...]
    optimizer: Digest | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the content."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def root(self) -> Digest:
        """The name of the content: schema and chunks, whatever version carries them."""
        return digest_of(msgspec.msgpack.encode((self.tensors, self.chunk_bytes, self.chunks)))

    @property
    def digest(self) -> Digest:
        """The name of the whole body."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Body":
        """A checked body. Raises `ManifestRefusedError`."""
        return _decode(data, Body, check=check_body)


class Seal(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the coordinator adds at commit. `secret` seeds the slots opened under this version; `previous` is the digest
    of the manifest before, so that manifests form a chain; `canary` is what the version's trainers compute of the probe
    (`protocol.canary`), empty where nobody does or they differ."""

    secret: bytes
    previous: Digest | None
    committed_ms: int
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed version: body and seal."""

    body: Body
    seal: Seal


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it travels: the bytes that were signed, and the coordinator's signature."""

    payload: bytes
    signature: bytes

    @property
    def digest(self) -> Digest:
        """The link that the next manifest's seal carries."""
        return digest_of(self.payload)


def sign_manifest(coordinator: Identity, manifest: Manifest) -> SignedManifest:
    """The coordinator's word that this version exists."""
    payload = msgspec.msgpack.encode(manifest)
    run_id = manifest.body.run_id or RunId("")
    return SignedManifest(payload, coordinator.sign(kind=KIND, run_id=run_id, payload=payload))


def open_manifest(signed: SignedManifest, *, coordinator_key: bytes, run_id: RunId) -> Manifest:
    """The manifest, once its signature holds. Raises `ManifestRefusedError`."""
    try:
        verify(coordinator_key, kind=KIND, run_id=run_id, payload=signed.payload, signature=signed.signature)
    except UnauthenticatedError as error:
        raise ManifestRefusedError("a manifest was refused", why="the coordinator did not sign it") from error
    manifest = _decode(signed.payload, Manifest, check=lambda m: check_body(m.body))
    if manifest.body.run_id != run_id or len(manifest.seal.secret) != 32:
        raise ManifestRefusedError("a manifest was refused", why="it belongs to another run or lacks its secret")
    if len(manifest.seal.canary) not in (0, NUM_SCORED_TOKENS):
        raise ManifestRefusedError("a manifest was refused", why="its canary is not of the probe")
    return manifest


def check_body(body: Body) -> None:
    """Raises `ManifestRefusedError` if the body does not describe one well-formed set of tensors."""

    def refuse(why: str) -> None:
        raise ManifestRefusedError("a manifest was refused", why=why)

    names = [tensor.name for tensor in body.tensors]
    if body.version < 0 or (body.version == 0) != (body.parent is None):
        refuse("version and parent do not fit")
    if not 0 < len(names) <= MAX_TENSORS or len(set(names)) != len(names):
        refuse("tensor names are missing, doubled or too many")
    if any(not name or len(name) > 256 or "/" in name or "\0" in name for name in names):
        refuse("a tensor's name is not allowed")
    if any(len(tensor.shape) > MAX_DIMENSIONS for tensor in body.tensors):
        refuse("a tensor has too many dimensions")
    if any(not 0 <= size <= MAX_SIZE for tensor in body.tensors for size in tensor.shape):
        refuse("a tensor's shape is negative or too large")
    if any(file.name not in MODEL_FILES for file in body.files):
        refuse("it carries a file that models do not have")
    if not 1 << 10 <= body.chunk_bytes <= 1 << 24:
        refuse("its chunk size is out of range")
    if len(body.chunks) > MAX_CHUNKS or len(body.chunks) != -(-body.num_bytes // body.chunk_bytes):
        refuse("the number of chunks does not fit the tensors")
    digests = [
        *body.chunks,
        *(file.digest for file in body.files),
        *([] if body.optimizer is None else [body.optimizer]),
    ]
    if any(len(digest) != 64 or set(digest) - set("0123456789abcdef") for digest in digests):
        refuse("a chunk's name is not a digest")


def _decode(data: bytes, kind: type[T], *, check: Callable[[T], None]) -> T:
    try:
        value = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestRefusedError("a manifest was refused", why=f"it cannot be read: {error}") from error
    if msgspec.msgpack.encode(value) != data:
        raise ManifestRefusedError("a manifest was refused", why="it is not in canonical form")
    check(value)
    return value
