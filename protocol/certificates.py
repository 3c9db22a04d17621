"""TLS certificates of a run: the coordinator's anchor, requests, and P-256 leaves that carry a peer id.
Pure but for `new_leaf_key`, which draws a key.

The coordinator's Ed25519 key is the only trust root. The *anchor* is the CA certificate that anybody
builds from those 32 public bytes; being an anchor, its own signature is never checked by TLS, so nothing
has to be delivered beside the key. Leaves are P-256, since gRPC refuses Ed25519 ones. Invariant: a leaf
names exactly one peer id, in its URI, and the DNS name that follows from that id; the coordinator checks
the id before it signs.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, SignatureAlgorithmOID

from protocol.errors import IdentityError, KeyRefusedError, UnauthenticatedError
from protocol.ids import PeerId
from protocol.keys import Identity, checked_public_key, peer_id_of, public_key_of

LEAF_LIFETIME_HOURS = 24
BACKDATING = timedelta(hours=1)
MAX_REQUEST_BYTES = 2048
MAX_LEAF_BYTES = 8192

_DOMAIN = "peer.hexcomb"
_SCHEME = "hexcomb://"
_ANCHOR_FROM, _ANCHOR_UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_ANCHOR_SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(32))  # fills the field; not a secret, and trusted by nobody
_PARSE_ERRORS = (
    ValueError,
    TypeError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    x509.ExtensionNotFound,
    UnsupportedAlgorithm,
    CryptographyDeprecationWarning,  # raised where warnings are errors; elsewhere the checks below refuse the rest
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate and its private key, both PEM."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def server_name(peer_id: PeerId) -> str:
    """The DNS name in a peer's leaf: what TLS compares when somebody dials that peer."""
    return f"{hashlib.sha256(public_key_of(peer_id)).hexdigest()[:32]}.{_DOMAIN}"


def anchor_pem(coordinator_key: bytes) -> bytes:
    """The coordinator's CA certificate, the same bytes wherever it is built. Raises `KeyRefusedError`."""
    public_key = checked_public_key(coordinator_key)
    name = _authority_name(coordinator_key)
    builder = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=public_key, serial_number=1)
        .not_valid_before(_ANCHOR_FROM)
        .not_valid_after(_ANCHOR_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
    return builder.sign(_ANCHOR_SIGNER, None).public_bytes(serialization.Encoding.PEM)


def new_leaf_key() -> bytes:
    """A fresh P-256 private key, PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_request(key_pem: bytes, *, peer_id: PeerId) -> bytes:
    """A PKCS#10 request, DER, for a leaf of `peer_id`. Raises `IdentityError` if the key is not P-256."""
    key = _leaf_key(key_pem)
    name = _common_name(server_name(peer_id))
    request = x509.CertificateSigningRequestBuilder(subject_name=name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def issue_leaf(
    coordinator: Identity,
    request: bytes,
    *,
    peer_id: PeerId,
    now_ms: int,
    lifetime_hours: int = LEAF_LIFETIME_HOURS,
) -> bytes:
    """A leaf for the key in `request`, PEM, valid from an hour before `now_ms` for `lifetime_hours` after it.

    The caller has authenticated `peer_id`; of the request only the key is used. Raises `KeyRefusedError`
    unless the request is well-formed, signed by its own key, and that key is P-256.
    """
    key = _requested_key(request)
    now = datetime.fromtimestamp(now_ms // 1000, UTC)
    fingerprint = hashlib.sha256(b"%d" % now_ms + peer_id.encode() + request).digest()
    builder = (
        x509.CertificateBuilder(
            subject_name=_common_name(server_name(peer_id)),
            issuer_name=_authority_name(coordinator.public_bytes),
            public_key=key,
            serial_number=(int.from_bytes(fingerprint[:16], "big") >> 1) | 1,
        )
        .not_valid_before(now - BACKDATING)
        .not_valid_after(now + timedelta(hours=lifetime_hours))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(server_name(peer_id)), x509.UniformResourceIdentifier(_SCHEME + peer_id)]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(coordinator.private_key.public_key()),
            critical=False,
        )
    )
    return builder.sign(coordinator.private_key, None).public_bytes(serialization.Encoding.PEM)


def self_issued_leaf(coordinator: Identity, *, now_ms: int) -> Leaf:
    """A leaf for the coordinator's own servers."""
    key_pem = new_leaf_key()
    request = certificate_request(key_pem, peer_id=coordinator.peer_id)
    return Leaf(issue_leaf(coordinator, request, peer_id=coordinator.peer_id, now_ms=now_ms), key_pem)


def check_leaf(leaf: Leaf) -> None:
    """Raises `IdentityError` unless certificate and key are P-256 and belong together: gRPC would only
    fail later."""
    key = _leaf_key(leaf.key_pem)
    certificate = _parse(leaf.certificate_pem)
    if certificate.public_key() != key.public_key():
        raise IdentityError("a TLS leaf cannot be used", why="its certificate is not for its key")


def peer_id_of_leaf(certificate_pem: bytes) -> PeerId:
    """The peer id that a leaf claims, unverified. Raises `UnauthenticatedError` unless it claims exactly
    one."""
    return _claimed_peer_id(_parse(certificate_pem))


def verify_leaf(certificate_pem: bytes, *, coordinator_key: bytes, now_ms: int) -> PeerId:
    """The peer id of a leaf that the coordinator signed, that is P-256 and valid now. Raises
    `UnauthenticatedError`."""
    certificate = _parse(certificate_pem)
    issuer = checked_public_key(coordinator_key)
    try:
        issuer.verify(certificate.signature, certificate.tbs_certificate_bytes)
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except InvalidSignature as error:
        raise _refused(f"it is not signed by the coordinator {peer_id_of(coordinator_key)}") from error
    except _PARSE_ERRORS as error:
        raise _refused("it is malformed") from error
    if certificate.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        raise _refused("it names another signature algorithm than the one it is signed with")
    if is_authority or not _is_p256(certificate):
        raise _refused("it is not a P-256 leaf")
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not starts <= now <= ends:
        raise _refused(f"it is valid from {starts:%F %T} to {ends:%F %T} UTC and this clock says {now:%F %T}")
    return _claimed_peer_id(certificate)


def renew_leaf_at_ms(certificate_pem: bytes) -> int:
    """When half of the leaf's time is over: the moment to ask for the next. Raises `UnauthenticatedError`."""
    certificate = _parse(certificate_pem)
    issued = certificate.not_valid_before_utc + BACKDATING
    middle = issued + (certificate.not_valid_after_utc - issued) / 2
    return int(middle.timestamp() * 1000)


def check_request(request: bytes) -> None:
    """Raises `KeyRefusedError` unless `issue_leaf` would take the request."""
    _requested_key(request)


def _requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    if len(request) > MAX_REQUEST_BYTES:
        raise KeyRefusedError("a certificate request was refused", why=f"it is longer than {MAX_REQUEST_BYTES} bytes")
    try:
        parsed = x509.load_der_x509_csr(request)
        key, holds = parsed.public_key(), parsed.is_signature_valid
    except (*_PARSE_ERRORS, InvalidSignature) as error:
        raise KeyRefusedError("a certificate request was refused", why="it cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KeyRefusedError(
            "a certificate request was refused", why="its key is not P-256", remedy="Use a P-256 leaf."
        )
    if not holds:
        raise KeyRefusedError("a certificate request was refused", why="its signature does not hold")
    return key


def _claimed_peer_id(certificate: x509.Certificate) -> PeerId:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = names.get_values_for_type(x509.DNSName)
        addresses = names.get_values_for_type(x509.UniformResourceIdentifier)
    except _PARSE_ERRORS as error:
        raise _refused("its names cannot be read") from error
    if len(names) != 2 or len(hosts) != 1 or len(addresses) != 1 or not addresses[0].startswith(_SCHEME):
        raise _refused("it does not name exactly one peer")
    peer_id = PeerId(addresses[0].removeprefix(_SCHEME))
    try:
        expected = server_name(peer_id)
    except KeyRefusedError as error:
        raise _refused("the peer id in it is refused") from error
    if hosts[0] != expected:
        raise _refused("its DNS name is not the one of its peer id")
    return peer_id


def _parse(certificate_pem: bytes) -> x509.Certificate:
    if len(certificate_pem) > MAX_LEAF_BYTES:
        raise _refused(f"it is longer than {MAX_LEAF_BYTES} bytes")
    try:
        certificates = x509.load_pem_x509_certificates(certificate_pem)
    except _PARSE_ERRORS as error:
        raise _refused("it is not a certificate") from error
    if len(certificates) != 1:
        raise _refused("it is not exactly one certificate")
    return certificates[0]


def _is_p256(certificate: x509.Certificate) -> bool:
    try:
        key = certificate.public_key()
    except _PARSE_ERRORS:
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def _leaf_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except _PARSE_ERRORS as error:
        raise IdentityError(
            "the key of a TLS leaf cannot be read", remedy="Delete the leaf; a new one is made."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError(
            "the key of a TLS leaf cannot be used",
            why="gRPC accepts no such leaf",
            remedy="Use a P-256 leaf.",
        )
    return key


def _authority_name(coordinator_key: bytes) -> x509.Name:
    return _common_name(f"hexcomb {hashlib.sha256(coordinator_key).hexdigest()[:32]}")


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _refused(why: str) -> UnauthenticatedError:
    return UnauthenticatedError("a TLS certificate was refused", why=why)
