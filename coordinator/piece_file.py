"""Frames in an append-only file: what the pieces of running slots survive a restart in. Impure: files.

A frame is its length and CRC-32 (little-endian uint32 each) and its bytes. Nothing is synced: what the kernel has taken
outlives the process, and not the machine. Invariant: what is read back is a prefix of what was appended; the first
frame that is cut off or damaged ends it, and what follows is dropped.
"""

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import JournalError

HEAD = struct.Struct("<II")
MAX_FRAME_BYTES = 16 << 20
WRITE_BYTES = 1 << 20


class PieceFile:
    """One file; calls must not overlap. `num_bytes` is its length. To make one raises `JournalError` where it cannot be
    opened; `append` and `replace` may raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise JournalError(
                f"{path} cannot be opened", why=str(error), remedy="Mend that, or remove the file: it is not essential."
            ) from error
        self.num_bytes = os.fstat(self._descriptor).st_size

    def read(self) -> list[bytes]:
        """All whole frames, oldest first; the rest of the file is cut off."""
        data, frames, position = self._path.read_bytes(), list[bytes](), 0
        while position + HEAD.size <= len(data):
            length, checksum = HEAD.unpack_from(data, position)
            frame = data[position + HEAD.size : position + HEAD.size + length]
            if length > MAX_FRAME_BYTES or zlib.crc32(frame) != checksum:
                break
            frames.append(frame)
            position += HEAD.size + length
        os.ftruncate(self._descriptor, position)
        self.num_bytes = position
        return frames

    def append(self, frames: Iterable[bytes]) -> None:
        """Adds frames at the end."""
        self.num_bytes += _write(self._descriptor, frames)

    def replace(self, frames: Iterable[bytes]) -> None:
        """Puts a new file that holds only these frames in the place of the old one, at once or not at all."""
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.unlink(missing_ok=True)
        descriptor = _open(fresh)
        try:
            num_bytes = _write(descriptor, frames)
            fresh.replace(self._path)
        except BaseException:
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor, self.num_bytes = descriptor, num_bytes

    def close(self) -> None:
        """Ends the use of the file."""
        os.close(self._descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, frames: Iterable[bytes]) -> int:
    """The number of bytes written."""
    total, buffer = 0, bytearray()
    for frame in frames:
        buffer += HEAD.pack(len(frame), zlib.crc32(frame))
        buffer += frame
        if len(buffer) >= WRITE_BYTES:
            total += _write_all(descriptor, buffer)
            buffer = bytearray()
    return total + _write_all(descriptor, buffer)


def _write_all(descriptor: int, data: bytearray) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return len(data)
