"""The one door for entries of the DHT: takes a node's own record in its place, refuses all else, never raises
else.
"""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.directory.layout import NUM_BUCKETS, bucket_key, bucket_of, expiration_s, open_entry
from protocol.errors import RecordRefusedError
from protocol.ids import RunId
from protocol.keys import Identity
from protocol.record import OpenedRecord
from tests.directory.swarm import COORDINATOR, RUN_ID, STRANGER, record_of, signed, stamp_of

NOW_MS = 1_800_000_000_000
NODE = Identity.from_seed(b"n" * 32)
RAW, RECORD = signed(NODE, at_ms=NOW_MS)
pack = msgspec.msgpack.encode


def entry(**changes: object) -> OpenedRecord:
    good: dict[str, object] = {
        "bucket": bucket_of(NODE.peer_id),
        "subkey": pack(NODE.peer_id),
        "value": pack(RAW),
        "expiration_s": expiration_s(RECORD.expires_ms),
        "run_id": RUN_ID,
        "coordinator_key": COORDINATOR.public_bytes,
        "now_ms": NOW_MS,
    }
    return open_entry(**(good | changes))  # type: ignore[arg-type]


def test_a_node_in_its_place_is_taken() -> None:
    assert entry().record == RECORD
    assert entry(now_ms=RECORD.expires_ms + 5).record == RECORD, "an entry may expire on its way"


OTHER_RAW, OTHER = signed(STRANGER, at_ms=NOW_MS)
FORGED = {
    "bit flipped": {"value": pack(RAW[:-1] + bytes([RAW[-1] ^ 1]))},
    "under another's name": {"subkey": pack(STRANGER.peer_id), "bucket": bucket_of(STRANGER.peer_id)},
    "another's record": {"value": pack(OTHER_RAW), "expiration_s": expiration_s(OTHER.expires_ms)},
    "another bucket": {"bucket": (bucket_of(NODE.peer_id) + 1) % NUM_BUCKETS},
    "prolonged": {"expiration_s": expiration_s(RECORD.expires_ms) + 100},
    "shortened": {"expiration_s": expiration_s(RECORD.expires_ms) - 1},
    "infinite": {"expiration_s": math.inf},
    "not a number": {"expiration_s": math.nan},
    "ten years": {"expiration_s": NOW_MS / 1000 + 10 * 365.25 * 86400},
    "whole number": {"expiration_s": 1},
    "too large": {"value": pack(RAW + bytes(1024))},
    "sub-key spelt otherwise": {"subkey": b"\xda\x00" + bytes([len(NODE.peer_id)]) + NODE.peer_id.encode()},
    "sub-key as bytes": {"subkey": pack(NODE.peer_id.encode())},
    "plain value": {"subkey": pack(None)},
    "whole dictionary": {"subkey": b""},
    "value as text": {"value": pack("hello")},
    "not bytes at all": {"value": ["x"]},
    "another run": {"run_id": RunId("f" * 32)},
    "another coordinator": {"coordinator_key": STRANGER.public_bytes},
    "long over": {"now_ms": RECORD.expires_ms + 31_000},
    "from the future": {"now_ms": NOW_MS - 31_000},
}


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED.keys())
def test_forgeries_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecordRefusedError):
        entry(**changes)


@pytest.mark.parametrize(
    "stamp",
    [
        b"",
        stamp_of(STRANGER, at_ms=NOW_MS),
        stamp_of(NODE, at_ms=NOW_MS, by=STRANGER),
        stamp_of(NODE, at_ms=NOW_MS - 7_200_000),
    ],
    ids=["none", "of another node", "self-made", "run out"],
)
def test_a_node_without_a_good_stamp_is_refused(stamp: bytes) -> None:
    raw, record = signed(NODE, at_ms=NOW_MS, stamp=stamp)
    with pytest.raises(RecordRefusedError):
        entry(value=pack(raw), expiration_s=expiration_s(record.expires_ms))


def test_a_record_that_would_live_too_long_cannot_stand() -> None:
    body = pack(record_of(NODE, at_ms=NOW_MS, lifetime_ms=301_000))
    raw = NODE.sign(kind="record", run_id=RUN_ID, payload=body) + body
    with pytest.raises(RecordRefusedError):
        entry(value=pack(raw), expiration_s=expiration_s(NOW_MS + 301_000))


@given(
    subkey=st.binary(max_size=90) | st.just(pack(NODE.peer_id)),
    value=st.binary(max_size=1100) | st.binary(max_size=900).map(pack),
    expiration=st.floats() | st.integers(),
)
def test_whatever_comes_is_refused_in_one_way(subkey: bytes, value: bytes, expiration: float) -> None:
    with pytest.raises(RecordRefusedError):
        entry(subkey=subkey, value=value, expiration_s=expiration)


def test_nodes_spread_over_the_buckets() -> None:
    counts = Counter(bucket_of(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(256))
    assert set(counts) == set(range(NUM_BUCKETS))
    assert max(counts.values()) < 3 * 256 / NUM_BUCKETS
    assert len({bucket_key(RUN_ID, bucket) for bucket in counts}) == NUM_BUCKETS
