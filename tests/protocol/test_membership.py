import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import NotEnrolledError, UnauthenticatedError
from protocol.ids import RunId
from protocol.keys import Identity
from protocol.membership import STAMP_BYTES, Membership, open_membership, sign_membership

RUN = RunId("0f" * 16)
NODE, OTHER, COORDINATOR = (Identity.from_seed(bytes([value]) * 32) for value in (1, 2, 3))
NOW = 1_800_000_000_000
MEMBERSHIP = Membership(RUN, NODE.peer_id, "rollout", NOW, NOW + 3_600_000)
STAMP = sign_membership(COORDINATOR, MEMBERSHIP)


def opened(stamp: bytes, **changes: object) -> Membership:
    fields = {
        "coordinator_key": COORDINATOR.public_bytes,
        "run_id": RUN,
        "now_ms": NOW,
        "peer_id": NODE.peer_id,
        **changes,
    }
    return open_membership(stamp, **fields)  # type: ignore[arg-type]


def test_round_trip_and_size() -> None:
    assert opened(STAMP) == MEMBERSHIP
    assert opened(STAMP, peer_id=None) == MEMBERSHIP
    assert len(STAMP) == STAMP_BYTES == 130


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run_id": RunId("f0" * 16)}, UnauthenticatedError),
        ({"coordinator_key": OTHER.public_bytes}, UnauthenticatedError),
        ({"peer_id": OTHER.peer_id}, NotEnrolledError),
        ({"now_ms": NOW - 30_001}, NotEnrolledError),
        ({"now_ms": NOW + 3_630_000}, NotEnrolledError),
    ],
)
def test_refused(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        opened(STAMP, **changes)


def test_skew_is_allowed_for() -> None:
    assert opened(STAMP, now_ms=NOW - 30_000) == opened(STAMP, now_ms=NOW + 3_629_999)


def test_a_node_cannot_stamp_itself() -> None:
    with pytest.raises(UnauthenticatedError):
        opened(sign_membership(NODE, MEMBERSHIP))


def test_what_a_grant_allows() -> None:
    expected = {
        "rollout": {"rollout", "idle"},
        "trainer": {"trainer", "idle"},
        "auto": {"rollout", "trainer", "idle"},
    }
    for grant, roles in expected.items():
        member = Membership(RUN, NODE.peer_id, grant, 0, 1)  # type: ignore[arg-type]
        assert {role for role in ("rollout", "trainer", "idle") if member.allows(role)} == roles


@given(st.binary(max_size=300) | st.binary(min_size=STAMP_BYTES, max_size=STAMP_BYTES))
def test_random_bytes_are_no_stamp(raw: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        opened(raw)


@given(st.integers(0, STAMP_BYTES - 1), st.integers(1, 255))
def test_any_flipped_bit_is_refused(position: int, mask: int) -> None:
    raw = bytearray(STAMP)
    raw[position] ^= mask
    with pytest.raises(UnauthenticatedError):
        opened(bytes(raw))


@given(st.binary(min_size=STAMP_BYTES - 64, max_size=STAMP_BYTES - 64))
def test_a_signed_body_of_another_version_is_refused_and_not_misread(body: bytes) -> None:
    stamp = body + COORDINATOR.sign(kind="membership", run_id=RUN, payload=body)
    with pytest.raises(UnauthenticatedError):
        opened(stamp)
