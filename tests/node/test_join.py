"""Joining: a good invite leaves a joined home; each bad one its own error, and nothing but the identity."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from node.home import Home
from node.join import join
from node.joined import read_joined, read_leaf
from node.renewal import is_expired
from protocol.certificates import peer_id_of_leaf
from protocol.errors import (
    HexcombError,
    IdentityError,
    InviteExpiredError,
    InviteMangledError,
    InviteUnknownError,
    InviteUsedUpError,
    NotJoinedError,
    RefusedError,
    UnauthenticatedError,
    UnreachableError,
)
from protocol.invite import encode_invite
from protocol.keys import Identity
from protocol.v1 import join_pb2
from tests.node.fakes import (
    COORDINATOR,
    RUN_ID,
    Door,
    invite_for,
    joined_home,
    leaf_for,
    now_ms,
    serving,
    stamp_for,
)

STRANGER = Identity.from_seed(b"x" * 32)


@pytest.fixture
def node_home(home: Path) -> Home:
    return Home.create(home)


def silent_address() -> str:
    """An address where nobody listens: a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def assert_untouched(home: Home) -> None:
    assert sorted(path.name for path in home.path.iterdir()) == ["blobs", "identity.key"]
    with pytest.raises(NotJoinedError):
        read_joined(home)


async def test_a_good_invite_joins(node_home: Home) -> None:
    async with serving(Door()) as address:
        text = encode_invite(invite_for(address))
        joined = await join(node_home, f"  {text}\n")
    assert joined == read_joined(node_home)
    assert (joined.run_id, joined.coordinator_key) == (RUN_ID, COORDINATOR.public_bytes)
    assert joined.control_addresses == ("127.0.0.1:1",)
    leaf = read_leaf(node_home)
    assert peer_id_of_leaf(leaf.certificate_pem) == node_home.peer_id
    assert node_home.leaf_file.stat().st_mode & 0o777 == 0o600
    key = COORDINATOR.public_bytes
    assert not is_expired(leaf, coordinator_key=key, now_ms=now_ms())
    assert is_expired(leaf, coordinator_key=key, now_ms=now_ms() + 25 * 3_600_000)
    assert is_expired(leaf, coordinator_key=STRANGER.public_bytes, now_ms=now_ms())


async def test_a_silent_address_is_passed_over(node_home: Home) -> None:
    async with serving(Door()) as address:
        await join(node_home, encode_invite(invite_for(silent_address(), address)))
    assert read_joined(node_home).run_id == RUN_ID


async def test_an_impostor_is_passed_over_and_told_of_if_it_is_alone(node_home: Home) -> None:
    impostor, door = Door(), Door()
    async with serving(impostor, identity=STRANGER) as wrong, serving(door) as right:
        with pytest.raises(UnauthenticatedError, match="not the coordinator"):
            await join(node_home, encode_invite(invite_for(silent_address(), wrong)))
        assert_untouched(node_home)
        await join(node_home, encode_invite(invite_for(wrong, right)))
    assert (impostor.num_calls, door.num_calls) == (0, 1)


@pytest.mark.parametrize("kind", [InviteUnknownError, InviteExpiredError, InviteUsedUpError])
async def test_a_refusal_ends_it_at_once(node_home: Home, kind: type[HexcombError]) -> None:
    door = Door()
    door.refusal = kind("the invite was refused", why="a test", remedy="Ask for another.")
    async with serving(door) as address:
        with pytest.raises(kind, match=r"because a test\. Ask for another"):
            await join(node_home, encode_invite(invite_for(address, address)))
    assert door.num_calls == 1
    assert_untouched(node_home)


async def test_nobody_answers(node_home: Home) -> None:
    with pytest.raises(UnreachableError):
        await join(node_home, encode_invite(invite_for(silent_address())), deadline_s=1.0)
    assert_untouched(node_home)


async def test_a_mangled_invite(node_home: Home) -> None:
    text = encode_invite(invite_for("127.0.0.1:1"))
    spoiled = text[:40] + ("a" if text[40] != "a" else "b") + text[41:]
    with pytest.raises(InviteMangledError):
        await join(node_home, spoiled)
    assert_untouched(node_home)


def swap_leaf(response: join_pb2.RedeemResponse) -> None:
    response.leaf_certificate = leaf_for(STRANGER.peer_id).certificate_pem


def swap_stamp(response: join_pb2.RedeemResponse) -> None:
    response.membership = stamp_for(STRANGER.peer_id)


def drop_addresses(response: join_pb2.RedeemResponse) -> None:
    del response.control_addresses[:]


def spoil_address(response: join_pb2.RedeemResponse) -> None:
    response.control_addresses[0] = "nowhere"


def spoil_role(response: join_pb2.RedeemResponse) -> None:
    response.role = "emperor"


@pytest.mark.parametrize("alter", [swap_leaf, swap_stamp, drop_addresses, spoil_address, spoil_role])
async def test_an_answer_that_does_not_hold_is_refused(
    node_home: Home, alter: Callable[[join_pb2.RedeemResponse], None]
) -> None:
    door = Door()
    door.alter = alter
    async with serving(door) as address:
        with pytest.raises(RefusedError):
            await join(node_home, encode_invite(invite_for(address)))
    assert_untouched(node_home)


async def test_a_home_takes_part_in_one_run(node_home: Home) -> None:
    joined_home(node_home, "127.0.0.1:1")
    known = read_joined(node_home)
    other = invite_for("127.0.0.1:1")
    text = encode_invite(type(other)(**{**_fields(other), "run_id": "cd" * 16}))
    with pytest.raises(IdentityError, match="another run"):
        await join(node_home, text)
    assert read_joined(node_home) == known


async def test_the_same_home_may_redeem_again(node_home: Home) -> None:
    async with serving(Door()) as address:
        text = encode_invite(invite_for(address))
        await join(node_home, text)
        before = read_leaf(node_home)
        await join(node_home, text)
    assert read_leaf(node_home).key_pem != before.key_pem


def _fields(value: object) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__slots__}  # type: ignore[attr-defined]
