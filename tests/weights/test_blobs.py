"""The chunk store: names are hashes and nothing else, and bytes are what their names say."""

import os
from pathlib import Path

import pytest

from node.weights.blobs import MAX_BLOB_BYTES, BlobStore
from protocol.errors import ChunkCorruptError, ChunkMissingError
from protocol.ids import Digest
from protocol.manifest import digest_of


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_what_is_put_is_got(blobs: BlobStore) -> None:
    for data in (b"", b"abc", bytes(100_000)):
        digest = blobs.put(data)
        assert digest == digest_of(data)
        assert blobs.has(digest)
        assert blobs.get(digest) == data
        assert blobs.put(memoryview(data)) == digest
    assert len(list(blobs.digests())) == len(list(blobs.folder.iterdir())) == 3


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "a\0b",
        "a" * 300,
        "",
        ".",
        "A" * 64,
        "g" * 64,
        "0" * 63,
        "0" * 63 + "/",
        "..".ljust(64, "a"),
    ],
)
def test_a_name_that_is_no_digest_reaches_no_file(blobs: BlobStore, name: str) -> None:
    for operation in (blobs.get, blobs.has):
        with pytest.raises(ChunkMissingError, match="not the name of a chunk"):
            operation(Digest(name))


@pytest.mark.parametrize("change", ["flip", "truncate", "extend"])
def test_damage_is_found_and_the_chunk_can_be_stored_again(blobs: BlobStore, change: str) -> None:
    data = bytes(range(256))
    digest = blobs.put(data)
    path = blobs.folder / digest
    damaged = {"flip": bytes([1, *data[1:]]), "truncate": data[:-1], "extend": data + b"x"}[change]
    path.write_bytes(damaged)
    with pytest.raises(ChunkCorruptError):
        blobs.get(digest)
    assert not blobs.has(digest)
    with pytest.raises(ChunkMissingError):
        blobs.get(digest)
    blobs.put(data)
    assert blobs.get(digest) == data


def test_links_and_pipes_in_place_of_a_chunk_are_refused(blobs: BlobStore, tmp_path: Path) -> None:
    data = b"secret"
    digest = digest_of(data)
    (tmp_path / "elsewhere").write_bytes(data)
    (blobs.folder / digest).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ChunkCorruptError):
        blobs.get(digest)
    os.mkfifo(blobs.folder / digest)
    with pytest.raises(ChunkCorruptError):
        blobs.get(digest)
    assert blobs.put(data) == digest
    assert blobs.get(digest) == data
    assert (tmp_path / "elsewhere").read_bytes() == data


def test_only_old_and_unreferenced_files_go(blobs: BlobStore) -> None:
    kept, old, fresh = blobs.put(b"kept"), blobs.put(b"old"), blobs.put(b"fresh")
    (blobs.folder / ".dead.tmp").write_bytes(b"half")
    (blobs.folder / "README").write_bytes(b"not ours")
    for name in (kept, old, ".dead.tmp", "README"):
        os.utime(blobs.folder / name, (1000.0, 1000.0))
    os.utime(blobs.folder / fresh, (1900.0, 1900.0))
    assert blobs.delete_unreferenced({kept}, now_s=2000.0, grace_s=600.0) == 2
    assert set(blobs.digests()) == {kept, fresh}
    assert (blobs.folder / "README").exists()
    os.utime(blobs.folder / fresh, (1000.0, 1000.0))
    blobs.put(b"fresh")  # renews its time
    assert blobs.delete_unreferenced(set(), now_s=2000.0, grace_s=600.0) == 1
    assert set(blobs.digests()) == {fresh}


def test_a_chunk_over_the_limit_is_a_fault(blobs: BlobStore) -> None:
    with pytest.raises(ValueError, match="at most"):
        blobs.put(bytes(MAX_BLOB_BYTES + 1))
    assert list(blobs.folder.iterdir()) == []
