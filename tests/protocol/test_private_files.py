import os
from pathlib import Path

import pytest

from protocol.errors import IdentityError, KeyFileExposedError
from protocol.private_files import MAX_PRIVATE_BYTES, create_private, read_private, write_private


def test_written_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "leaf.pem"
    write_private(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o600

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(path, b"new")
    assert read_private(path) == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["leaf.pem"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "leaf.pem"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    write_private(path, b"new")
    assert target.read_bytes() == b"precious"
    assert read_private(path) == b"new"


def test_creating_is_exclusive_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    create_private(path, b"one", mode=0o600)
    with pytest.raises(FileExistsError):
        create_private(path, b"two", mode=0o600)
    assert read_private(path) == b"one"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        create_private(tmp_path / "other", b"half", mode=0o600)
    assert not (tmp_path / "other").exists()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "missing")
    path = tmp_path / "file"
    write_private(path, bytes(MAX_PRIVATE_BYTES + 1))
    with pytest.raises(IdentityError, match="small plain file"):
        read_private(path)
    write_private(path, b"x", mode=0o640)
    with pytest.raises(KeyFileExposedError):
        read_private(path)
