from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import (
    DEFAULT_LIFETIME_MS,
    DEFAULT_SKEW_MS,
    MAX_LIFETIME_MS,
    Envelope,
    decode_envelope,
    encode_envelope,
    keep_nonce_until_ms,
    open_envelope,
    sign_envelope,
)
from protocol.errors import UnauthenticatedError
from protocol.ids import PeerId, RunId
from protocol.keys import Identity

RUN, OTHER_RUN = RunId("0f" * 16), RunId("f0" * 16)
NODE, OTHER, COORDINATOR = (Identity.from_seed(bytes([value]) * 32) for value in (1, 2, 3))
NOW = 1_800_000_000_000


def signed(payload: bytes = b"hello", *, lifetime_ms: int = DEFAULT_LIFETIME_MS) -> Envelope:
    return sign_envelope(
        NODE,
        payload,
        kind="renew",
        run_id=RUN,
        audience=COORDINATOR.peer_id,
        now_ms=NOW,
        nonce=b"n" * 16,
        lifetime_ms=lifetime_ms,
    )


def opened(
    envelope: Envelope,
    *,
    kind: str = "renew",
    run_id: RunId = RUN,
    audience: PeerId = COORDINATOR.peer_id,
    now_ms: int = NOW,
    signer: PeerId | None = None,
) -> bytes:
    return open_envelope(envelope, kind=kind, run_id=run_id, audience=audience, now_ms=now_ms, signer=signer)


@given(st.binary(max_size=300))
def test_round_trip(payload: bytes) -> None:
    envelope = decode_envelope(encode_envelope(signed(payload)))
    assert envelope == signed(payload)
    assert opened(envelope, signer=NODE.peer_id) == payload


def test_another_kind_run_audience_or_signer_is_refused() -> None:
    envelope = signed()
    changes: list[dict[str, Any]] = [
        {"kind": "join"},
        {"run_id": OTHER_RUN},
        {"audience": OTHER.peer_id},
        {"signer": OTHER.peer_id},
    ]
    for change in changes:
        with pytest.raises(UnauthenticatedError):
            opened(envelope, **change)


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": b"jello"},
        {"key_id": OTHER.peer_id},
        {"issued_ms": NOW - 1},
        {"not_after_ms": NOW + DEFAULT_LIFETIME_MS + 1},
        {"nonce": b"m" * 16},
        {"signature": bytes(64)},
        {"signature": b"short"},
        {"key_id": PeerId("nobody")},
    ],
)
def test_each_field_is_signed(changes: dict[str, object]) -> None:
    with pytest.raises(UnauthenticatedError):
        opened(replace(signed(), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["kind", "audience"])
def test_kind_and_audience_are_signed_and_not_only_compared(field: str) -> None:
    changed = {"kind": "other", "audience": OTHER.peer_id}[field]
    envelope = replace(signed(), **{field: changed})  # type: ignore[arg-type]
    with pytest.raises(UnauthenticatedError, match="over these bytes"):
        opened(envelope, **{field: changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset_ms", "accepted"),
    [
        (0, True),
        (-5_000, True),
        (-DEFAULT_SKEW_MS, True),
        (-DEFAULT_SKEW_MS - 1, False),
        (DEFAULT_LIFETIME_MS + DEFAULT_SKEW_MS, True),
        (DEFAULT_LIFETIME_MS + DEFAULT_SKEW_MS + 1, False),
        (600_000, False),
        (-600_000, False),
    ],
)
def test_time_window(offset_ms: int, accepted: bool) -> None:
    now_ms = NOW + offset_ms
    if accepted:
        assert opened(signed(), now_ms=now_ms) == b"hello"
        return
    with pytest.raises(UnauthenticatedError, match=str(now_ms)):
        opened(signed(), now_ms=now_ms)


def test_a_nonce_is_kept_until_time_alone_refuses_the_replay() -> None:
    forget_at = keep_nonce_until_ms(signed())
    assert opened(signed(), now_ms=forget_at - 1) == b"hello"
    with pytest.raises(UnauthenticatedError):
        opened(signed(), now_ms=forget_at)


def test_a_long_life_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="300 s"):
        signed(lifetime_ms=MAX_LIFETIME_MS + 1)
    bare = replace(signed(), not_after_ms=NOW + MAX_LIFETIME_MS + 1)
    forged = replace(bare, signature=NODE.private_key.sign(bare.signed_bytes(RUN)))
    with pytest.raises(UnauthenticatedError, match="lives for"):
        opened(forged)


@given(st.binary(max_size=400))
def test_random_bytes_are_no_envelope(raw: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        opened(decode_envelope(raw))


@given(st.integers(min_value=0), st.integers(1, 255))
def test_any_flipped_bit_is_refused(position: int, mask: int) -> None:
    raw = bytearray(encode_envelope(signed()))
    raw[position % len(raw)] ^= mask
    with pytest.raises(UnauthenticatedError):
        opened(decode_envelope(bytes(raw)))


@given(st.integers(0, 1000), st.binary(max_size=5))
def test_cut_or_longer_bytes_are_refused(length: int, tail: bytes) -> None:
    raw = encode_envelope(signed())
    changed = raw[: length % len(raw)] + tail if length else raw + tail + b"!"
    with pytest.raises(UnauthenticatedError):
        opened(decode_envelope(changed))


def test_an_envelope_is_not_a_plain_signature() -> None:
    """A signature over some payload never fits an envelope, whatever the payload."""
    envelope = signed()
    digest_part = envelope.signed_bytes(RUN)[len(b"hexcomb/v1/renew\0") + 16 :]
    plain = NODE.sign(kind="renew", run_id=RUN, payload=digest_part)
    with pytest.raises(UnauthenticatedError):
        opened(replace(envelope, signature=plain))
