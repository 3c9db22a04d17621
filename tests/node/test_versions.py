"""What a node knows and holds of versions: signed, chained, one root a number, and found again after a restart."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from node.base_folder import describe, seed_store
from node.holders import announced_holders, why_unheld
from node.home import Home
from node.state import RATE_WINDOW_S, Rate
from node.versions import Versions
from node.weights.blobs import BlobStore
from node.weights.content import body_of
from node.weights.fetch import Holder
from protocol.errors import (
    ChunkCorruptError,
    ManifestRefusedError,
    ModelMissingError,
    UnreachableError,
    VersionFromFutureError,
    VersionPastError,
)
from protocol.ids import Digest, Version
from protocol.keys import Identity
from protocol.manifest import Body, Manifest, Seal, SignedManifest, sign_manifest
from tests.node.fakes import COORDINATOR, RUN_ID, leaf_for

STRANGER = Identity.from_seed(b"x" * 32)


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


def versions_of(home: Home) -> Versions:
    async def find(version: Version) -> Sequence[Holder]:
        return ()

    leaf = leaf_for(home.peer_id)
    key = COORDINATOR.public_bytes
    return Versions(home, run_id=RUN_ID, coordinator_key=key, leaf=lambda: leaf, find=find)


def make_body(version: int, value: float, blobs: BlobStore, parent: Digest | None = None) -> Body:
    tensors = {"w": np.full((512,), value, np.float32)}
    return body_of(tensors, blobs, run_id=RUN_ID, version=Version(version), parent=parent, chunk_bytes=1024)


def signed(body: Body, previous: SignedManifest | None, by: Identity = COORDINATOR) -> SignedManifest:
    seal = Seal(bytes(32), previous.digest if previous else None, 1)
    return sign_manifest(by, Manifest(body, seal))


async def test_a_chain_is_learnt_held_and_made_ready(node_home: Home) -> None:
    versions = versions_of(node_home)
    body0 = make_body(0, 0.0, versions.blobs)
    body1 = make_body(1, 1.0, versions.blobs, body0.root)
    first = signed(body0, None)
    versions.learn(first)
    versions.learn(signed(body1, first))
    assert (versions.head, versions.held, versions.ready) == (1, [], None)
    assert versions.signed(Version(1)) is None
    path = await versions.make_ready(Version(1))
    assert path == versions.weights_path(Version(1))
    assert (versions.held, versions.ready, versions.root(Version(1))) == ([1], 1, body1.root)
    assert versions.signed(Version(-1)) == signed(body1, first)


def test_what_the_coordinator_did_not_sign_is_refused(node_home: Home) -> None:
    versions = versions_of(node_home)
    with pytest.raises(ManifestRefusedError):
        versions.learn(signed(make_body(0, 0.0, versions.blobs), None, by=STRANGER))
    assert versions.head is None


def test_a_number_never_stands_for_two_roots_and_links_must_fit(node_home: Home) -> None:
    versions = versions_of(node_home)
    body0 = make_body(0, 0.0, versions.blobs)
    first = signed(body0, None)
    versions.learn(first)
    with pytest.raises(ManifestRefusedError, match="second version 0"):
        versions.learn(signed(make_body(0, 5.0, versions.blobs), None))
    stranger_link = signed(make_body(0, 7.0, versions.blobs), None)
    with pytest.raises(ManifestRefusedError, match="does not follow"):
        versions.learn(signed(make_body(1, 1.0, versions.blobs, body0.root), stranger_link))
    assert (versions.head, versions.root(Version(0))) == (0, body0.root)


async def test_a_restart_finds_again_what_is_on_disk_and_drops_what_is_damaged(node_home: Home) -> None:
    versions = versions_of(node_home)
    body0 = make_body(0, 0.0, versions.blobs)
    first = signed(body0, None)
    versions.learn(first)
    versions.learn(signed(make_body(1, 1.0, versions.blobs, body0.root), first))
    await versions.fetch(Version(0))
    (node_home.path / "manifests" / "1.msgpack").write_bytes(b"torn")
    again = versions_of(node_home)
    assert (again.head, again.held) == (0, [0])
    assert not (node_home.path / "manifests" / "1.msgpack").exists()


async def test_lost_chunks_are_noticed_and_no_holder_is_an_error(node_home: Home) -> None:
    versions = versions_of(node_home)
    body0 = make_body(0, 0.0, versions.blobs)
    versions.learn(signed(body0, None))
    await versions.fetch(Version(0))
    (versions.blobs.folder / body0.chunks[0]).unlink()
    with pytest.raises(UnreachableError, match="nobody is known to hold"):
        await versions.fetch(Version(0))
    assert versions.held == []


def unheld(version: int, *, head: int | None, held: Sequence[int] = (), max_lag: int | None = 4) -> object:
    said = why_unheld(
        Version(version), head=None if head is None else Version(head), max_lag=max_lag, held=[Version(v) for v in held]
    )
    return said and (type(said), said.sentence())


def test_a_version_that_is_past_is_called_so_and_those_that_are_held_are_named() -> None:
    assert unheld(3, head=11, held=[0, 6, 7, 8, 9, 11]) == (
        VersionPastError,
        "version 3 is past because nodes keep the bytes of versions from 6 on; held now: 0, 6 to 9, 11. "
        "Name one of those; a version is to be exported while it is kept.",
    )
    assert unheld(12, head=11, held=[11]) == (
        VersionFromFutureError,
        "there is no version 12 yet because the newest that was heard of is 11.",
    )
    kind, sentence = unheld(3, head=11)  # type: ignore[misc]
    assert kind is VersionPastError
    assert "no node that could be asked" in sentence


def test_what_is_kept_but_not_reached_is_not_called_past() -> None:
    """Negative controls: within the retention, held after all, nothing known."""
    assert unheld(6, head=11, held=[11]) is None
    assert unheld(5, head=11, held=[5, 11]) is None, "its holder may be slow"
    assert unheld(3, head=None) is None
    assert unheld(3, head=None, held=[2, 9], max_lag=None) is None
    assert unheld(1, head=None, held=[2, 9], max_lag=None) is not None


async def test_retiring_removes_bytes_that_nobody_needs(node_home: Home) -> None:
    versions = versions_of(node_home)
    body0 = make_body(0, 0.0, versions.blobs)
    first = signed(body0, None)
    versions.learn(first)
    versions.learn(signed(make_body(1, 1.0, versions.blobs, body0.root), first))
    for number in (0, 1):
        await versions.make_ready(Version(number))
    await versions.retire(keep_from=Version(1), now_s=4e9)
    assert versions.held == [1]
    assert not versions.weights_path(Version(0)).exists()
    assert versions.weights_path(Version(1)).exists()
    assert set(versions.blobs.digests()) == set(versions.body(Version(1)).chunks)
    assert versions.manifest(Version(0)) is not None


async def test_disk_stays_bounded_however_fast_versions_come(node_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well within the grace for what is being fetched; four chunks of retired versions have room, and stay."""
    monkeypatch.setattr("node.versions.RETIRED_BYTES", 4096)
    versions, last, parent = versions_of(node_home), None, None
    for number in range(12):
        body = make_body(number, float(number), versions.blobs, parent)
        parent, last = body.root, signed(body, last)
        versions.learn(last)
        await versions.fetch(Version(number))
        staged = versions.blobs.put(b"not named by any manifest yet")
        await versions.retire(keep_from=Version(number - 1), now_s=time.time())
        assert versions.blobs.has(staged)
    kept = {digest for number in range(7, 12) for digest in versions.body(Version(number)).chunks}
    assert {digest for number in (10, 11) for digest in versions.body(Version(number)).chunks} <= kept
    assert len(set(versions.blobs.digests()) - {staged} - kept) <= 1
    assert len(list(versions.blobs.digests())) < 12


async def test_chunks_do_not_outlive_the_manifest_that_names_them(
    node_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was away long drops old manifests; killed then, it would not know again whose their chunks were.
    What a newer manifest still names stays."""
    monkeypatch.setattr("node.versions.MANIFESTS_KEPT", 3)
    versions = versions_of(node_home)
    bodies, last = list[Body](), None
    for number, value in ((0, 0.0), (1, 1.0), (2, 2.0), (8, 2.0)):
        bodies.append(make_body(number, value, versions.blobs, bodies[-1].root if bodies else None))
        last = signed(bodies[-1], last)
        versions.learn(last)
        await versions.fetch(Version(number))
    assert set(bodies[2].chunks) == set(bodies[3].chunks)
    await versions.retire(keep_from=Version(8), now_s=time.time())
    assert set(versions.blobs.digests()) == set(bodies[3].chunks)
    assert versions_of(node_home).held == [8]


async def test_what_a_killed_daemon_left_half_written_is_removed(node_home: Home) -> None:
    folder = versions_of(node_home).weights_path(Version(0)).parent
    (folder / ".v0.safetensors.0a.tmp").write_bytes(b"half")
    (node_home.path / "manifests" / ".0.msgpack.0a").write_bytes(b"half")
    versions_of(node_home)
    assert list(folder.iterdir()) == []
    assert list((node_home.path / "manifests").iterdir()) == []


def test_announced_holders_are_parsed_and_oneself_is_left_out() -> None:
    me, other = COORDINATOR.peer_id, STRANGER.peer_id
    texts = [f"{other}@127.0.0.1:5", f"{me}@127.0.0.1:6", "127.0.0.1:7", f"{other}@nowhere", "x@127.0.0.1:8"]
    assert announced_holders(texts, but=me) == (Holder(other, "127.0.0.1:5"),)


def test_a_base_folder_seeds_a_store(tmp_path: Path) -> None:
    folder, store = tmp_path / "base", BlobStore(tmp_path / "store")
    with pytest.raises(ModelMissingError, match="hexcomb base create"):
        seed_store(folder, store)
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": np.zeros(8, np.float32)}, folder / "model.safetensors")
    body = describe(folder).body
    assert (body.run_id, body.version, [file.name for file in body.files]) == (None, 0, ["config.json"])
    assert seed_store(folder, store) == 2
    assert all(store.has(digest) for digest in body.chunks)
    (folder / "blobs" / body.chunks[0]).write_bytes(b"spoilt")
    with pytest.raises(ChunkCorruptError):
        seed_store(folder, BlobStore(tmp_path / "other"))


def test_the_rate_forgets_what_is_old() -> None:
    rate = Rate()
    rate.add(100, now_s=0.0)
    rate.add(100, now_s=10.0)
    assert rate.per_s(now_s=10.0) == 200 / RATE_WINDOW_S
    assert rate.per_s(now_s=RATE_WINDOW_S + 5.0) == 100 / RATE_WINDOW_S
    assert (rate.per_s(now_s=1000.0), rate.total) == (0.0, 200)
