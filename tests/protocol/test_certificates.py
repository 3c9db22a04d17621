import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from protocol.certificates import (
    Leaf,
    anchor_pem,
    certificate_request,
    check_leaf,
    issue_leaf,
    new_leaf_key,
    peer_id_of_leaf,
    renew_leaf_at_ms,
    self_issued_leaf,
    server_name,
    verify_leaf,
)
from protocol.errors import IdentityError, KeyRefusedError, UnauthenticatedError
from protocol.ids import PeerId
from protocol.keys import Identity

NODE, OTHER, COORDINATOR = (Identity.from_seed(bytes([value]) * 32) for value in (1, 2, 3))
NOW = 1_800_000_000_000
HOUR_MS = 3_600_000
KEY = new_leaf_key()
REQUEST = certificate_request(KEY, peer_id=NODE.peer_id)
LEAF = issue_leaf(COORDINATOR, REQUEST, peer_id=NODE.peer_id, now_ms=NOW)


def verified(certificate: bytes, *, coordinator_key: bytes = COORDINATOR.public_bytes, now_ms: int = NOW) -> PeerId:
    return verify_leaf(certificate, coordinator_key=coordinator_key, now_ms=now_ms)


def handmade(
    *,
    names: list[x509.GeneralName],
    signer: Identity = COORDINATOR,
    is_authority: bool = False,
    key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | None = None,
) -> bytes:
    """A certificate as a coordinator's key could sign it, with any names."""
    now = datetime.fromtimestamp(NOW / 1000, UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = (
        x509.CertificateBuilder(
            issuer_name=name,
            subject_name=name,
            public_key=key or ec.generate_private_key(ec.SECP256R1()).public_key(),
            serial_number=1,
        )
        .not_valid_before(now)
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer.private_key, None).public_bytes(serialization.Encoding.PEM)


def names_of(peer_id: PeerId) -> list[x509.GeneralName]:
    return [x509.DNSName(server_name(peer_id)), x509.UniformResourceIdentifier(f"hexcomb://{peer_id}")]


def test_a_leaf_carries_its_peer_id() -> None:
    assert peer_id_of_leaf(LEAF) == verified(LEAF) == NODE.peer_id
    assert verified(handmade(names=names_of(NODE.peer_id))) == NODE.peer_id
    check_leaf(Leaf(LEAF, KEY))


def test_issuing_is_a_function_of_its_arguments() -> None:
    assert issue_leaf(COORDINATOR, REQUEST, peer_id=NODE.peer_id, now_ms=NOW) == LEAF
    assert anchor_pem(COORDINATOR.public_bytes) == anchor_pem(COORDINATOR.public_bytes)
    serials = {
        x509.load_pem_x509_certificate(issue_leaf(COORDINATOR, REQUEST, peer_id=peer, now_ms=now)).serial_number
        for peer in (NODE.peer_id, OTHER.peer_id)
        for now in (NOW, NOW + 1000)
    }
    assert len(serials) == 4


@pytest.mark.parametrize(
    ("offset_ms", "accepted"),
    [
        (0, True),
        (-30 * 60_000, True),
        (-HOUR_MS, True),
        (-HOUR_MS - 10 * 60_000, False),
        (24 * HOUR_MS, True),
        (24 * HOUR_MS + 1000, False),
    ],
)
def test_validity(offset_ms: int, accepted: bool) -> None:
    if accepted:
        assert verified(LEAF, now_ms=NOW + offset_ms) == NODE.peer_id
        return
    with pytest.raises(UnauthenticatedError, match="this clock says"):
        verified(LEAF, now_ms=NOW + offset_ms)


def test_renewal_is_due_at_half_time() -> None:
    assert renew_leaf_at_ms(LEAF) == NOW + 12 * HOUR_MS


@pytest.mark.parametrize(
    "certificate",
    [
        handmade(names=names_of(NODE.peer_id), signer=OTHER),
        handmade(names=names_of(NODE.peer_id), signer=NODE),
        handmade(names=names_of(NODE.peer_id), is_authority=True),
        handmade(names=names_of(NODE.peer_id), key=NODE.private_key.public_key()),
        handmade(names=[]),
        handmade(names=names_of(NODE.peer_id)[:1]),
        handmade(names=names_of(NODE.peer_id)[1:]),
        handmade(names=[*names_of(NODE.peer_id), *names_of(OTHER.peer_id)]),
        handmade(names=[*names_of(NODE.peer_id), x509.RFC822Name("a@b.c")]),
        handmade(names=[names_of(NODE.peer_id)[0], names_of(OTHER.peer_id)[1]]),
        handmade(names=[names_of(NODE.peer_id)[0], x509.UniformResourceIdentifier("hexcomb://nobody")]),
        handmade(names=[names_of(NODE.peer_id)[0], x509.UniformResourceIdentifier(f"x://{NODE.peer_id}")]),
        LEAF + LEAF,
        anchor_pem(COORDINATOR.public_bytes),
        b"",
        LEAF + b" " * 9000,
    ],
    ids=[
        "another signer",
        "signed by its own identity",
        "authority",
        "Ed25519",
        "no names",
        "DNS name alone",
        "URI alone",
        "two peers",
        "third name",
        "names of two peers",
        "no peer id",
        "another scheme",
        "two certificates",
        "the anchor",
        "empty",
        "too long",
    ],
)
def test_no_leaf_of_a_member(certificate: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        verified(certificate)


def test_a_leaf_of_another_coordinator_is_refused() -> None:
    with pytest.raises(UnauthenticatedError, match="not signed by the coordinator"):
        verified(LEAF, coordinator_key=OTHER.public_bytes)


def test_only_the_key_of_a_request_is_used() -> None:
    """A request that asks for another's names gets a leaf with its own."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server_name(COORDINATOR.peer_id))])
    greedy = (
        x509.CertificateSigningRequestBuilder(subject_name=name)
        .add_extension(x509.SubjectAlternativeName(names_of(COORDINATOR.peer_id)), critical=False)
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    leaf = issue_leaf(COORDINATOR, greedy, peer_id=NODE.peer_id, now_ms=NOW)
    assert verified(leaf) == NODE.peer_id
    assert server_name(COORDINATOR.peer_id).encode() not in x509.load_pem_x509_certificate(leaf).public_bytes(
        serialization.Encoding.DER
    )


def request_of(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder(subject_name=x509.Name([])).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    "key",
    [
        NODE.private_key,
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["Ed25519", "P-384", "RSA"],
)
def test_a_request_for_another_kind_of_key_is_refused(
    key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey,
) -> None:
    with pytest.raises(KeyRefusedError, match="P-256"):
        issue_leaf(COORDINATOR, request_of(key), peer_id=NODE.peer_id, now_ms=NOW)


def test_an_ed25519_leaf_is_refused_before_grpc_sees_it() -> None:
    key_pem = NODE.private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(IdentityError, match="Use a P-256 leaf"):
        check_leaf(Leaf(handmade(names=names_of(NODE.peer_id), key=NODE.private_key.public_key()), key_pem))


def test_certificate_and_key_must_belong_together() -> None:
    with pytest.raises(IdentityError, match="not for its key"):
        check_leaf(Leaf(LEAF, new_leaf_key()))
    with pytest.raises(IdentityError):
        check_leaf(Leaf(LEAF, b"no key"))


def test_the_key_of_a_leaf_is_not_shown() -> None:
    assert "PRIVATE" not in repr(self_issued_leaf(COORDINATOR, now_ms=NOW))


@given(st.binary(max_size=300))
def test_random_bytes_are_neither_leaf_nor_request(raw: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        verified(raw)
    with pytest.raises(KeyRefusedError):
        issue_leaf(COORDINATOR, raw, peer_id=NODE.peer_id, now_ms=NOW)


@given(st.integers(min_value=0), st.integers(1, 255))
def test_a_flipped_bit_of_a_request_never_changes_its_key(position: int, mask: int) -> None:
    raw = bytearray(REQUEST)
    raw[position % len(raw)] ^= mask
    try:
        leaf = issue_leaf(COORDINATOR, bytes(raw), peer_id=NODE.peer_id, now_ms=NOW)
    except KeyRefusedError:
        return
    check_leaf(Leaf(leaf, KEY))


DER = x509.load_pem_x509_certificate(LEAF).public_bytes(serialization.Encoding.DER)


@given(st.integers(min_value=0), st.integers(1, 255))
def test_a_flipped_bit_of_a_leaf_never_makes_another_peer(position: int, mask: int) -> None:
    raw = bytearray(DER)
    raw[position % len(raw)] ^= mask
    try:
        peer_id = verified(ssl.DER_cert_to_PEM_cert(bytes(raw)).encode())
    except UnauthenticatedError:
        return
    assert peer_id == NODE.peer_id


def test_the_algorithm_named_outside_the_signed_part_is_checked() -> None:
    ed25519_oid = bytes.fromhex("06032b6570")
    raw = bytearray(DER)
    raw[raw.rindex(ed25519_oid) + 4] ^= 1
    with pytest.raises(UnauthenticatedError, match=r"algorithm|malformed|not a certificate"):
        verified(ssl.DER_cert_to_PEM_cert(bytes(raw)).encode())
