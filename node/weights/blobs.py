"""A folder of chunks, each named by the BLAKE3 digest of its bytes. Impure: the disk.

Invariant: `get` returns bytes that have the digest that names them, or raises; a file that does not is
removed, so that it is fetched again. Several processes may share the folder: a chunk appears whole or not
at all. Nothing is synced to the disk, since a torn chunk is found out when it is read.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from protocol.errors import ChunkCorruptError, ChunkMissingError
from protocol.ids import Digest
from protocol.manifest import digest_of

DIGEST_CHARACTERS = 64
DEFAULT_GRACE_S = 600.0
MAX_BLOB_BYTES = 64 << 20
"""No chunk or model file is larger; a file that is was not written by this store."""


def is_digest(name: str) -> bool:
    """Whether `name` is 64 lowercase hex digits, and so can be nothing but a file's name."""
    return len(name) == DIGEST_CHARACTERS and not set(name) - set("0123456789abcdef")


class BlobStore:
    """The chunks in one folder, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, data: bytes | memoryview) -> Digest:
        """Stores the bytes and returns their name. Storing what is there already only renews its time."""
        if len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"a chunk has at most {MAX_BLOB_BYTES} bytes, not {len(data)}")
        digest = digest_of(data)
        path = self.folder / digest
        if self.has(digest) and path.stat().st_size == len(data):
            os.utime(path)
            return digest
        temporary = self.folder / f".{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return digest

    def get(self, digest: Digest) -> bytes:
        """The bytes of a chunk. Raises `ChunkMissingError`, or `ChunkCorruptError` once the bad file is
        removed.
        """
        path = self._path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ChunkMissingError(f"chunk {digest} is not in this node's store") from None
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _corrupt(digest, f"its file cannot be opened: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_sound = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BLOB_BYTES
            data = file.read(status.st_size + 1) if is_sound else b""  # room for no more than that
        if not is_sound or digest_of(data) != digest:
            path.unlink(missing_ok=True)
            raise _corrupt(digest, "its bytes do not have the hash that names them")
        return data

    def has(self, digest: Digest) -> bool:
        """Whether a chunk of this name is stored; its bytes are checked only when they are read."""
        return self._path(digest).is_file()

    def digests(self) -> Iterator[Digest]:
        """The names of all chunks stored."""
        for entry in os.scandir(self.folder):
            if is_digest(entry.name):
                yield Digest(entry.name)

    def delete(self, digests: Iterable[Digest]) -> None:
        """Removes these chunks, as far as they are here."""
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)

    def delete_unreferenced(
        self,
        keep: Set[Digest],
        *,
        now_s: float,
        grace_s: float = DEFAULT_GRACE_S,
        retired: Set[Digest] = frozenset(),
        retired_bytes: int = 0,
    ) -> int:
        """Removes what `keep` does not name and what has been there for `grace_s`; of chunks in `retired`, whose
        versions are past, the oldest sooner, so that `retired_bytes` of them stay. Returns how many files went.

        The grace is for chunks of a version that is being written or fetched, which no manifest names yet.
        `now_s` is the time since 1970. Leftovers of writers that died go too.
        """
        doomed, past = list[str](), list[tuple[float, int, str]]()
        for entry in os.scandir(self.folder):
            is_ours = is_digest(entry.name) or entry.name.endswith(".tmp")
            if not is_ours or entry.name in keep:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                status = entry.stat(follow_symlinks=False)
                if now_s - status.st_mtime >= grace_s:
                    doomed.append(entry.path)
                elif entry.name in retired:
                    past.append((status.st_mtime, status.st_size, entry.path))
        num_bytes = sum(size for _, size, _ in past)
        for _, size, path in sorted(past):
            if num_bytes <= retired_bytes:
                break
            doomed.append(path)
            num_bytes -= size
        num_removed = 0
        for path in doomed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                num_removed += 1
        return num_removed

    def _path(self, digest: Digest) -> Path:
        if not is_digest(digest):
            raise ChunkMissingError(
                f"{digest[:80]!a} is not the name of a chunk", why="a name is 64 lowercase hex digits"
            )
        return self.folder / digest


def _corrupt(digest: Digest, why: str) -> ChunkCorruptError:
    return ChunkCorruptError(f"chunk {digest} was refused", why=why, remedy="It is fetched again when needed.")
