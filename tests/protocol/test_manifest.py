"""Manifests: what is signed is what is read, and whatever else comes is the one typed error, quickly."""

import dataclasses
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ManifestRefusedError
from protocol.ids import Digest, RunId, Version
from protocol.keys import Identity
from protocol.manifest import (
    KIND,
    MAX_CHUNKS,
    MAX_DIMENSIONS,
    Body,
    Manifest,
    ModelFile,
    Seal,
    SignedManifest,
    TensorSpec,
    check_body,
    digest_of,
    open_manifest,
    sign_manifest,
)

COORDINATOR, STRANGER = Identity.from_seed(b"c" * 32), Identity.from_seed(b"x" * 32)
RUN_ID = RunId("ab" * 16)
CHUNK = digest_of(b"chunk")
GOOD = Body(
    run_id=RUN_ID,
    version=Version(3),
    parent=digest_of(b"parent"),
    tensors=(TensorSpec("w", (300, 2), "F32"), TensorSpec("b", (), "BF16")),
    files=(ModelFile("config.json", digest_of(b"{}")),),
    chunk_bytes=1024,
    chunks=(CHUNK,) * 3,
    optimizer=digest_of(b"optimizer"),
)
SEAL = Seal(b"s" * 32, digest_of(b"before"), 1_700_000_000_000)


def test_a_body_comes_back_as_it_was() -> None:
    assert Body.from_bytes(GOOD.to_bytes()) == GOOD
    assert (GOOD.num_bytes, len(GOOD.root), len(GOOD.digest)) == (2402, 64, 64)


def test_the_root_names_the_content_and_the_digest_the_whole() -> None:
    later = dataclasses.replace(GOOD, version=Version(4), parent=GOOD.root, optimizer=None)
    assert later.root == GOOD.root
    assert later.digest != GOOD.digest
    for change in ({"chunks": (CHUNK, CHUNK, digest_of(b"x"))}, {"tensors": GOOD.tensors[::-1]}, {"chunk_bytes": 1025}):
        assert dataclasses.replace(GOOD, **change).root != GOOD.root  # type: ignore[arg-type]


BAD: dict[str, dict[str, Any]] = {
    "negative version": {"version": -1},
    "version 0 with a parent": {"version": 0},
    "no parent": {"parent": None},
    "no tensors": {"tensors": (), "chunks": ()},
    "a name twice": {"tensors": GOOD.tensors * 2, "chunks": (CHUNK,) * 5},
    "no name": {"tensors": (TensorSpec("", (1,), "F32"),), "chunks": (CHUNK,)},
    "a path for a name": {"tensors": (TensorSpec("../x", (1,), "F32"),), "chunks": (CHUNK,)},
    "NUL in a name": {"tensors": (TensorSpec("a\0b", (1,), "F32"),), "chunks": (CHUNK,)},
    "a long name": {"tensors": (TensorSpec("x" * 257, (1,), "F32"),), "chunks": (CHUNK,)},
    "a negative size": {"tensors": (TensorSpec("w", (-1,), "F32"),)},
    "two negative sizes": {"tensors": (TensorSpec("w", (-1, -600), "F32"),)},
    "a size that no machine holds": {"tensors": (TensorSpec("w", (2**41,), "F32"),)},
    "too many dimensions": {"tensors": (TensorSpec("w", (1,) * (MAX_DIMENSIONS + 1), "F32"),), "chunks": (CHUNK,)},
    "a file of its own": {"files": (ModelFile("run.sh", CHUNK),)},
    "a path for a file": {"files": (ModelFile("../config.json", CHUNK),)},
    "small chunks": {"chunk_bytes": 1023},
    "large chunks": {"chunk_bytes": (1 << 24) + 1},
    "a chunk too few": {"chunks": (CHUNK,) * 2},
    "a chunk too many": {"chunks": (CHUNK,) * 4},
    "too many chunks": {
        "tensors": (TensorSpec("w", (256 * (MAX_CHUNKS + 1),), "F32"),),
        "chunks": (CHUNK,) * (MAX_CHUNKS + 1),
    },
    "a short digest": {"chunks": (CHUNK, CHUNK, CHUNK[:63])},
    "a digest in capitals": {"chunks": (CHUNK, CHUNK, "A" * 64)},
    "a path for a digest": {"chunks": (CHUNK, CHUNK, "/" * 64)},
    "a bad digest of a file": {"files": (ModelFile("config.json", Digest("x" * 64)),)},
}


@pytest.mark.parametrize("name", BAD)
def test_a_body_that_describes_no_model_is_refused(name: str) -> None:
    body = dataclasses.replace(GOOD, **BAD[name])
    with pytest.raises(ManifestRefusedError) as caught:
        Body.from_bytes(body.to_bytes())
    assert caught.value.why


def test_a_body_that_would_take_hours_to_multiply_is_refused_at_once() -> None:
    body = dataclasses.replace(GOOD, tensors=(TensorSpec("w", (2**40,) * 500_000, "F32"),))
    data, started_s = body.to_bytes(), time.monotonic()
    with pytest.raises(ManifestRefusedError):
        Body.from_bytes(data)
    assert time.monotonic() - started_s < 5


def other_encodings(data: bytes) -> dict[str, bytes]:
    """The same body spelled otherwise."""
    fields = msgspec.msgpack.decode(data)
    doubled = msgspec.msgpack.encode("version") + msgspec.msgpack.encode(9)
    return {
        "a field more": msgspec.msgpack.encode({**fields, "x": 1}),
        "another order": msgspec.msgpack.encode(dict(reversed(fields.items()))),
        "a long integer": data.replace(b"\xa7version\x03", b"\xa7version\xcc\x03"),
        "a field twice": bytes([data[0] + 1]) + doubled + data[1:],
        "something behind": data + b"\xc0",
        "a float for an integer": data.replace(b"\xa7version\x03", b"\xa7version\xcb\x40\x08" + bytes(6)),
    }


@pytest.mark.parametrize("name", list(other_encodings(GOOD.to_bytes())))
def test_one_body_has_one_spelling(name: str) -> None:
    data = other_encodings(GOOD.to_bytes())[name]
    assert data != GOOD.to_bytes()
    with pytest.raises(ManifestRefusedError):
        Body.from_bytes(data)


def test_a_signed_manifest_opens_for_its_run_and_its_coordinator_only() -> None:
    manifest = Manifest(GOOD, SEAL)
    signed = sign_manifest(COORDINATOR, manifest)
    key = COORDINATOR.public_bytes
    assert open_manifest(signed, coordinator_key=key, run_id=RUN_ID) == manifest
    wrong = [
        (signed, STRANGER.public_bytes, RUN_ID),
        (signed, key, RunId("cd" * 16)),
        (SignedManifest(signed.payload + b"\xc0", signed.signature), key, RUN_ID),
        (SignedManifest(signed.payload, bytes(64)), key, RUN_ID),
        (SignedManifest(signed.payload, b""), key, RUN_ID),
        (SignedManifest(b"", signed.signature), key, RUN_ID),
        (SignedManifest(signed.payload, STRANGER.sign(kind=KIND, run_id=RUN_ID, payload=signed.payload)), key, RUN_ID),
        (
            SignedManifest(signed.payload, COORDINATOR.sign(kind="x", run_id=RUN_ID, payload=signed.payload)),
            key,
            RUN_ID,
        ),
    ]
    for bad, coordinator_key, run_id in wrong:
        with pytest.raises(ManifestRefusedError):
            open_manifest(bad, coordinator_key=coordinator_key, run_id=run_id)


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(dataclasses.replace(GOOD, run_id=None), SEAL),
        Manifest(dataclasses.replace(GOOD, run_id=RunId("cd" * 16)), SEAL),
        Manifest(GOOD, msgspec.structs.replace(SEAL, secret=b"s" * 31)),
        Manifest(dataclasses.replace(GOOD, chunk_bytes=1), SEAL),
        Manifest(GOOD, msgspec.structs.replace(SEAL, canary=(-1.0,) * 27)),
    ],
    ids=["no run", "another run", "a short secret", "a bad body", "a canary of another length"],
)
def test_even_what_the_coordinator_signed_is_checked(manifest: Manifest) -> None:
    payload = msgspec.msgpack.encode(manifest)
    signed = SignedManifest(payload, COORDINATOR.sign(kind=KIND, run_id=RUN_ID, payload=payload))
    with pytest.raises(ManifestRefusedError):
        open_manifest(signed, coordinator_key=COORDINATOR.public_bytes, run_id=RUN_ID)


def test_a_canary_travels_in_the_seal_and_changes_no_root() -> None:
    seal = msgspec.structs.replace(SEAL, canary=(-1.25,) * 28)
    signed = sign_manifest(COORDINATOR, Manifest(GOOD, seal))
    opened = open_manifest(signed, coordinator_key=COORDINATOR.public_bytes, run_id=RUN_ID)
    assert opened.seal.canary == seal.canary
    assert (opened.body.root, opened.body.digest) == (GOOD.root, GOOD.digest)
    without = sign_manifest(COORDINATOR, Manifest(GOOD, SEAL))
    assert b"canary" not in without.payload  # as manifests were before there were canaries: those still open
    assert open_manifest(without, coordinator_key=COORDINATOR.public_bytes, run_id=RUN_ID).seal.canary == ()


def read(data: bytes) -> Body | None:
    """The body, or None where it was refused; nothing else may come out."""
    try:
        return Body.from_bytes(data)
    except ManifestRefusedError:
        return None


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert read(data) is None


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_body_is_refused_or_reads_as_what_it_says(data: st.DataObject) -> None:
    good = bytearray(GOOD.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "copy"])):
            case "set":
                good[position] = data.draw(st.integers(0, 255))
            case "cut":
                del good[position : position + data.draw(st.integers(1, 9))]
            case "insert":
                good[position:position] = data.draw(st.binary(min_size=1, max_size=9))
            case "copy":
                good += good[position:]
        if not good:
            good += b"\0"
    body = read(bytes(good))
    assert body is None or body.to_bytes() == bytes(good)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(field=st.sampled_from(list(Body.__slots__)), value=json_like)
def test_any_value_in_any_field_is_refused_or_reads_as_what_it_says(field: str, value: Any) -> None:
    fields = {**msgspec.msgpack.decode(GOOD.to_bytes()), field: value}
    data = msgspec.msgpack.encode(fields)
    body = read(data)
    assert body is None or body.to_bytes() == data


def test_deep_nesting_is_refused() -> None:
    for data in (
        b"\x91" * 100_000,
        b"\x81\xa7tensors" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ):
        assert read(data) is None


def test_optimizer_is_named_by_a_digest() -> None:
    """A trainer's own text in its place would travel with every announcement of the version."""
    check_body(dataclasses.replace(GOOD, optimizer=Digest("0" * 64)))
    for text in ("", "x", "0" * 65, "g" * 64, "0" * (16 << 20)):
        with pytest.raises(ManifestRefusedError):
            check_body(dataclasses.replace(GOOD, optimizer=Digest(text)))
