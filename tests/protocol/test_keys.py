import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import KeyRefusedError, UnauthenticatedError
from protocol.ids import PeerId, RunId
from protocol.keys import (
    Identity,
    check_public_key,
    peer_id_of,
    public_key_of,
    run_id_bytes,
    sign,
    statement,
    verify,
)

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
RUN, OTHER_RUN = RunId("0f" * 16), RunId("f0" * 16)
ALICE, BOB = Identity.from_seed(b"\1" * 32), Identity.from_seed(b"\2" * 32)


def order_of(point: tuple[int, int]) -> int:
    """The order of a point, by adding it to itself: independent of the list under test."""
    d = -121665 * pow(121666, -1, P) % P

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        product = d * a[0] * b[0] * a[1] * b[1] % P
        x = (a[0] * b[1] + a[1] * b[0]) * pow(1 + product, -1, P) % P
        return x, (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, P) % P

    total, order = point, 1
    while total != (0, 1):
        total, order = add(total, point), order + 1
        assert order <= 8
    return order


def root(square: int) -> int:
    candidate = pow(square, (P + 3) // 8, P)
    if candidate * candidate % P != square % P:
        candidate = candidate * pow(2, (P - 1) // 4, P) % P
    assert candidate * candidate % P == square % P
    return candidate


def small_order_points() -> list[tuple[int, int]]:
    """All 8, from the curve's equation: y of order 8 solves d*y^4 + 2*y^2 - 1 = 0."""
    d = -121665 * pow(121666, -1, P) % P
    discriminant = root(1 + d)
    points = [(0, 1), (0, P - 1), (root(-1), 0), (-root(-1) % P, 0)]
    for sign_of_root in (1, -1):
        square = (-1 + sign_of_root * discriminant) * pow(d, -1, P) % P
        if pow(square, (P - 1) // 2, P) != 1:
            continue
        y = root(square)
        x = root((square - 1) * pow(d * square + 1, -1, P) % P)
        points += [(x, y), (x, -y % P), (-x % P, y), (-x % P, -y % P)]
    return points


def encodings(point: tuple[int, int]) -> list[bytes]:
    """Every 32-byte spelling of a point: canonical or not, with either sign where x is 0."""
    x, y = point
    ys = [value for value in (y, y + P) if value < 2**255]
    signs = (0, 1) if x == 0 else (x & 1,)
    return [(value | sign_bit << 255).to_bytes(32, "little") for value in ys for sign_bit in signs]


def test_there_are_eight_small_order_points() -> None:
    points = small_order_points()
    assert sorted(order_of(point) for point in points) == [1, 2, 4, 4, 8, 8, 8, 8]
    assert len(set(points)) == 8


@pytest.mark.parametrize("raw", [raw for point in small_order_points() for raw in encodings(point)])
def test_small_order_keys_and_their_twins_are_refused(raw: bytes) -> None:
    with pytest.raises(KeyRefusedError):
        check_public_key(raw)
    with pytest.raises(KeyRefusedError):
        public_key_of(peer_id_of(raw))
    with pytest.raises(KeyRefusedError):
        verify(raw, kind="join", run_id=RUN, payload=b"anything", signature=bytes(64))


def test_the_library_alone_would_accept_a_forgery() -> None:
    """The negative control: why `check_public_key` stands in front."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    identity_point = (1).to_bytes(32, "little")
    Ed25519PublicKey.from_public_bytes(identity_point).verify(identity_point + bytes(32), b"any message")


@pytest.mark.parametrize("excess", range(19))
def test_non_canonical_keys_are_refused(excess: int) -> None:
    for sign_bit in (0, 1):
        with pytest.raises(KeyRefusedError):
            check_public_key((P + excess | sign_bit << 255).to_bytes(32, "little"))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(KeyRefusedError, match=f"{length} bytes"):
        check_public_key(b"\5" * length)


def test_peer_id_is_the_libp2p_id_of_a_known_key() -> None:
    """The example of libp2p's peer-id specification."""
    seed = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    identity = Identity.from_seed(seed)
    assert identity.public_bytes == public
    assert identity.libp2p_bytes() == bytes.fromhex("08011240") + seed + public
    assert re.fullmatch(r"12D3Koo\w{45}", identity.peer_id)
    assert public_key_of(identity.peer_id) == public


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_round_trip(seed: bytes) -> None:
    identity = Identity.from_seed(seed)
    assert public_key_of(identity.peer_id) == identity.public_bytes
    assert len(identity.peer_id) == 52


@given(st.text(max_size=80) | st.text(alphabet="123456789ABCDEFGHJKLMNPQRSTUVWXYZabc", max_size=80))
def test_nothing_else_is_a_peer_id(text: str) -> None:
    with pytest.raises(KeyRefusedError):
        public_key_of(PeerId(text))


@given(st.integers(0, 51), st.sampled_from("123ABCxyz0OIl é"))
def test_a_changed_peer_id_is_refused_or_is_another_one(position: int, character: str) -> None:
    text = PeerId(ALICE.peer_id[:position] + character + ALICE.peer_id[position + 1 :])
    try:
        key = public_key_of(text)
    except KeyRefusedError:
        return
    assert peer_id_of(key) == text


@pytest.mark.parametrize("text", ["1" + ALICE.peer_id, ALICE.peer_id[1:], ALICE.peer_id + "1", ""])
def test_a_peer_id_has_one_spelling(text: str) -> None:
    with pytest.raises(KeyRefusedError):
        public_key_of(PeerId(text))


def test_signature_binds_kind_run_payload_and_key() -> None:
    good = sign(ALICE, kind="piece", run_id=RUN, payload=b"x")
    verify(ALICE.public_bytes, kind="piece", run_id=RUN, payload=b"x", signature=good)
    for key, kind, run_id, payload in [
        (BOB.public_bytes, "piece", RUN, b"x"),
        (ALICE.public_bytes, "join", RUN, b"x"),
        (ALICE.public_bytes, "piece", OTHER_RUN, b"x"),
        (ALICE.public_bytes, "piece", RUN, b"y"),
    ]:
        with pytest.raises(UnauthenticatedError):
            verify(key, kind=kind, run_id=run_id, payload=payload, signature=good)


@pytest.mark.parametrize(
    "mangle",
    [
        lambda s: bytes(64),
        lambda s: s[:63],
        lambda s: s + b"\0",
        lambda s: b"",
        lambda s: s[:32] + (int.from_bytes(s[32:], "little") + L).to_bytes(32, "little"),
    ],
    ids=["all zero", "63 bytes", "65 bytes", "empty", "S+L"],
)
def test_malformed_signatures_are_refused(mangle) -> None:  # type: ignore[no-untyped-def]
    good = ALICE.sign(kind="piece", run_id=RUN, payload=b"x")
    with pytest.raises(UnauthenticatedError):
        verify(ALICE.public_bytes, kind="piece", run_id=RUN, payload=b"x", signature=mangle(good))


@given(st.binary(max_size=80))
def test_random_signatures_are_refused(signature: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        verify(ALICE.public_bytes, kind="piece", run_id=RUN, payload=b"x", signature=signature)


@pytest.mark.parametrize("kind", ["", "a\0b", "Join", "a" * 33, "join/x", "join\n"])
def test_a_malformed_kind_is_a_bug_of_the_caller(kind: str) -> None:
    with pytest.raises(ValueError, match="a kind is"):
        statement(kind=kind, run_id=RUN)


@pytest.mark.parametrize("run_id", ["", "0f" * 15, "0F" * 16, "0f" * 17, "0f" * 16 + "\n"])
def test_a_malformed_run_id_is_a_bug_of_the_caller(run_id: str) -> None:
    with pytest.raises(ValueError, match="a run id is"):
        run_id_bytes(RunId(run_id))


def test_the_seed_is_not_shown() -> None:
    assert ALICE.seed.hex() not in repr(ALICE)
    assert "private_key" not in repr(ALICE)
