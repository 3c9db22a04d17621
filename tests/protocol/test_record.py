import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RecordRefusedError
from protocol.ids import PeerId, RunId, Version
from protocol.keys import Identity
from protocol.membership import Membership, sign_membership
from protocol.record import (
    DEFAULT_LIFETIME_MS,
    MAX_LIFETIME_MS,
    MAX_RECORD_BYTES,
    OpenedRecord,
    Record,
    open_record,
    sign_record,
)

RUN = RunId("0f" * 16)
NODE, OTHER, COORDINATOR = (Identity.from_seed(bytes([value]) * 32) for value in (1, 2, 3))
NOW = 1_800_000_000_000


def stamp_for(identity: Identity, *, role: str = "rollout", expires_ms: int = NOW + 3_600_000) -> bytes:
    return sign_membership(
        COORDINATOR,
        Membership(RUN, identity.peer_id, role, NOW, expires_ms),  # type: ignore[arg-type]
    )


RECORD = Record(
    peer_id=NODE.peer_id,
    role="rollout",
    device="NVIDIA H200",
    decode_tokens_per_s=2500.5,
    train_tokens_per_s=0.0,
    memory_bytes=141 << 30,
    link_mbit_per_s=940.0,
    rtt_ms=12.5,
    endpoint="198.51.100.7:7001",
    trainer_endpoint="",
    versions=(Version(40), Version(41)),
    issued_ms=NOW,
    expires_ms=NOW + DEFAULT_LIFETIME_MS,
    stamp=stamp_for(NODE),
)
RAW = sign_record(NODE, RECORD, run_id=RUN)


def opened(raw: bytes, **changes: object) -> OpenedRecord:
    fields = {"run_id": RUN, "coordinator_key": COORDINATOR.public_bytes, "now_ms": NOW, **changes}
    return open_record(raw, **fields)  # type: ignore[arg-type]


def forged(fields: list[object], *, by: Identity = NODE) -> bytes:
    """Any array, signed rightly: what a malicious member can send."""
    body = msgspec.msgpack.encode(fields)
    return by.sign(kind="record", run_id=RUN, payload=body) + body


def fields_of(**changes: object) -> list[object]:
    return [changes.get(name, getattr(RECORD, name)) for name in RECORD.__struct_fields__]


def test_round_trip_and_size() -> None:
    result = opened(RAW, peer_id=NODE.peer_id)
    assert result.record == RECORD
    assert result.membership.role == "rollout"
    assert len(RAW) < 450


def test_the_largest_record_fits() -> None:
    largest = msgspec.structs.replace(
        RECORD,
        device="x" * 48,
        endpoint="h" * 114 + ":65535",
        trainer_endpoint="h" * 114 + ":65535",
        versions=tuple(Version(2**53 - 8 + step) for step in range(8)),
    )
    raw = sign_record(NODE, largest, run_id=RUN)
    assert opened(raw).record == largest
    assert len(raw) <= MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"peer_id": OTHER.peer_id},
        {"run_id": RunId("f0" * 16)},
        {"coordinator_key": OTHER.public_bytes},
        {"now_ms": NOW + DEFAULT_LIFETIME_MS + 30_000},
        {"now_ms": NOW - 30_001},
    ],
)
def test_refused_for_another_owner_run_coordinator_or_time(changes: dict[str, object]) -> None:
    with pytest.raises(RecordRefusedError):
        opened(RAW, **changes)


BAD_VALUES: list[tuple[str, object]] = [
    *[
        (name, value)
        for name in ("decode_tokens_per_s", "train_tokens_per_s", "link_mbit_per_s", "rtt_ms")
        for value in (math.nan, math.inf, -math.inf, -1.0, 1e13, "5", True, None)
    ],
    ("memory_bytes", -1),
    ("memory_bytes", 2**60),
    ("memory_bytes", 1.5),
    ("device", ""),
    ("device", "x" * 49),
    ("device", "\x1b[2J"),
    ("device", "<script>"),
    ("device", "a\n"),
    ("role", "coordinator"),
    ("role", "trainer"),
    ("endpoint", "no port"),
    ("endpoint", "a:0"),
    ("endpoint", "a:65536"),
    ("endpoint", "h" * 115 + ":65535"),
    ("trainer_endpoint", "http://x:1"),
    ("versions", list(range(9))),
    ("versions", [2, 1]),
    ("versions", [1, 1]),
    ("versions", [-1]),
    ("versions", [2**60]),
    ("versions", [1.5]),
    ("issued_ms", -1),
    ("issued_ms", NOW + DEFAULT_LIFETIME_MS),
    ("expires_ms", NOW + MAX_LIFETIME_MS + 1),
    ("expires_ms", math.inf),
    ("expires_ms", 2**63),
    ("stamp", b""),
    ("stamp", bytes(130)),
    ("stamp", stamp_for(OTHER)),
    ("stamp", stamp_for(NODE, expires_ms=NOW - 60_000)),
    ("peer_id", "nobody"),
    ("peer_id", OTHER.peer_id),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_rightly_signed_lie_about_form_is_refused(name: str, value: object) -> None:
    assert name in RECORD.__struct_fields__
    with pytest.raises(RecordRefusedError):
        opened(forged(fields_of(**{name: value})))


def test_the_control_of_the_forger() -> None:
    assert opened(forged(fields_of())).record == RECORD
    assert opened(forged(fields_of(expires_ms=NOW + MAX_LIFETIME_MS))).record.expires_ms == NOW + MAX_LIFETIME_MS


def test_missing_extra_and_nested_fields_are_refused() -> None:
    nested: object = 0
    for _ in range(150):
        nested = [nested]
    for fields in (fields_of()[:-1], [*fields_of(), 0], [nested], [], [nested, *fields_of()[1:]]):
        with pytest.raises(RecordRefusedError):
            opened(forged(fields))


def test_a_member_may_act_up_to_its_grant() -> None:
    for grant in ("trainer", "auto"):
        assert opened(forged(fields_of(role="trainer", stamp=stamp_for(NODE, role=grant))))
    assert opened(forged(fields_of(role="idle")))


def test_a_record_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RecordRefusedError, match="1025 bytes"):
        opened(RAW + bytes(MAX_RECORD_BYTES + 1 - len(RAW)))


def test_a_record_that_nobody_would_take_is_not_signed() -> None:
    with pytest.raises(RecordRefusedError):
        sign_record(NODE, msgspec.structs.replace(RECORD, rtt_ms=math.nan), run_id=RUN)
    with pytest.raises(RecordRefusedError):
        sign_record(OTHER, RECORD, run_id=RUN)
    with pytest.raises(RecordRefusedError):
        sign_record(NODE, msgspec.structs.replace(RECORD, stamp=bytes(1000)), run_id=RUN)


def test_a_small_order_owner_is_refused() -> None:
    with pytest.raises(RecordRefusedError):
        opened(forged(fields_of(peer_id=PeerId("1" * 52))))


@given(st.binary(max_size=1100))
def test_random_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(RecordRefusedError):
        opened(raw)


@given(st.binary(max_size=900))
def test_a_rightly_signed_random_body_is_refused(body: bytes) -> None:
    with pytest.raises(RecordRefusedError):
        opened(NODE.sign(kind="record", run_id=RUN, payload=body) + body)


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_any_flipped_bit_is_refused(position: int, mask: int) -> None:
    raw = bytearray(RAW)
    raw[position] ^= mask
    with pytest.raises(RecordRefusedError):
        opened(bytes(raw))


@given(st.integers(64, len(RAW) - 1), st.integers(1, 255))
def test_a_flipped_bit_under_a_right_signature_raises_nothing_else(position: int, mask: int) -> None:
    body = bytearray(RAW[64:])
    body[position - 64] ^= mask
    raw = NODE.sign(kind="record", run_id=RUN, payload=bytes(body)) + bytes(body)
    try:
        record = opened(raw).record
    except RecordRefusedError:
        return
    assert record.peer_id == NODE.peer_id
    assert all(math.isfinite(rate) and rate >= 0 for rate in (record.decode_tokens_per_s, record.rtt_ms))
