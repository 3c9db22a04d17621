"""The file of pieces: whole frames are read back, the first that is not ends it, and a new one comes at once or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.piece_file import PieceFile


def test_a_file_is_read_up_to_where_it_is_whole(tmp_path: Path) -> None:
    frames = [b"one", b"", b"three" * 100, b"four"]
    path = tmp_path / "whole"
    file = PieceFile(path)
    file.append(frames[:2])
    file.append(frames[2:])
    file.close()
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    ends = [sum(8 + len(frame) for frame in frames[:count]) for count in range(len(frames) + 1)]
    for length in range(len(whole) + 1):
        torn = tmp_path / "torn"
        torn.write_bytes(whole[:length])
        file = PieceFile(torn)
        num_whole = max(count for count, end in enumerate(ends) if end <= length)
        assert file.read() == frames[:num_whole]
        file.append([b"after"])
        file.close()
        file = PieceFile(torn)
        assert file.read() == [*frames[:num_whole], b"after"]
        file.close()


def test_a_damaged_frame_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = PieceFile(path)
    file.append([b"one", b"two", b"three"])
    data = bytearray(path.read_bytes())
    data[8 + 3 + 8] ^= 1
    path.write_bytes(data)
    assert file.read() == [b"one"]
    assert path.stat().st_size == file.num_bytes == 8 + 3
    file.close()
    path.write_bytes(b"\xff" * 100)
    file = PieceFile(path)
    assert file.read() == []
    file.close()


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = PieceFile(path)
    file.append([b"old"])

    def broken() -> Iterator[bytes]:
        yield b"x" * (2 << 20)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        file.replace(broken())
    assert file.read() == [b"old"]
    file.replace([b"new", b"er"])
    file.append([b"est"])
    file.close()
    file = PieceFile(path)
    assert file.read() == [b"new", b"er", b"est"]
    file.close()
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
