import base64
import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InviteMangledError
from protocol.ids import InviteId, RunId
from protocol.invite import (
    Grant,
    Invite,
    decode_invite,
    encode_invite,
    redemption_mac,
    redemption_mac_holds,
    redemption_statement,
    stored_secret,
)
from protocol.keys import Identity

COORDINATOR = Identity.from_seed(b"\3" * 32)
INVITE = Invite(
    run_id=RunId("0f" * 16),
    coordinator_key=COORDINATOR.public_bytes,
    invite_id=InviteId("1a" * 8),
    secret=b"s" * 16,
    expires_s=1_900_000_000,
    role="rollout",
    addresses=("coordinator.example:7443", "[2001:db8::1]:7443"),
    bootstraps=(f"/ip4/192.0.2.1/tcp/4001/p2p/{COORDINATOR.peer_id}",),
)
LINE = encode_invite(INVITE)


def spelled(body: bytes) -> str:
    """A line with a right checksum over any body: what a forger can always make."""
    checksum = hashlib.sha256(b"hexcomb1" + body).digest()[:4]
    return "hexcomb1" + base64.b32encode(body + checksum).decode().rstrip("=").lower()


def body_of(line: str) -> bytes:
    digits = line.removeprefix("hexcomb1").upper()
    return base64.b32decode(digits + "=" * (-len(digits) % 8))[:-4]


def test_round_trip() -> None:
    assert decode_invite(LINE) == INVITE
    assert decode_invite(f"  {LINE}\n") == INVITE
    assert LINE.isascii()
    assert LINE.isalnum()
    assert len(LINE) < 350


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["auto", "trainer", "rollout"]),
    st.lists(st.sampled_from(["a:1", "10.0.0.1:65535", "[::1]:80", "x-y.z:9"]), min_size=1, max_size=8),
    st.lists(st.just("/dns4/a.b/tcp/1"), max_size=8),
)
def test_round_trip_of_any(
    secret: bytes, expires_s: int, role: Grant, addresses: list[str], bootstraps: list[str]
) -> None:
    invite = replace(
        INVITE,
        secret=secret,
        expires_s=expires_s,
        role=role,
        addresses=tuple(addresses),
        bootstraps=tuple(bootstraps),
    )
    assert decode_invite(encode_invite(invite)) == invite


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "does not begin"),
        ("hexcomb2" + LINE[8:], "does not begin"),
        (LINE.upper(), "does not begin"),
        (LINE[1:], "does not begin"),
        ("hexcomb1", "checksum"),
        (LINE[:40] + " " + LINE[40:], "character 41"),
        (LINE[:40] + "\n" + LINE[40:], "character 41"),
        (LINE[:-10] + "0" + LINE[-9:], "which no invite contains"),
        (LINE[:40] + ("a" if LINE[40] != "a" else "b") + LINE[41:], "checksum"),
        (LINE + "a" * 5000, "longer than"),
        (spelled(b"short"), "too short"),
        (spelled(body_of(LINE) + b"x"), "follows its end"),
        (spelled(body_of(LINE)[:76] + b"\7" + body_of(LINE)[77:]), "role 7"),
        (spelled(body_of(LINE)[:16] + bytes(32) + body_of(LINE)[48:]), "key in it is refused"),
        (spelled(body_of(LINE)[:77] + b"\0\0"), "names no address"),
        (spelled(body_of(LINE)[:77] + b"\1\4a:b\n\0"), "not one"),
        (spelled(body_of(LINE)[:77] + b"\1\3\xff:1\0"), "not one"),
        (spelled(body_of(LINE)[:77] + b"\x09"), "too long"),
        (spelled(body_of(LINE)[:77] + b"\1\x50a:1"), "cut short"),
    ],
)
def test_mangled_invites_say_what_is_wrong(line: str, named: str) -> None:
    with pytest.raises(InviteMangledError, match=named):
        decode_invite(line)


def test_a_second_spelling_is_refused() -> None:
    """The unused bits of the last character must be zero."""
    padding_bits = len(LINE.removeprefix("hexcomb1")) * 5 % 8
    assert padding_bits, "choose another invite: this one fills its last character"
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    twin = LINE[:-1] + alphabet[alphabet.index(LINE[-1]) + 1]
    with pytest.raises(InviteMangledError, match="last character"):
        decode_invite(twin)


@given(st.integers(0, len(LINE) - 1), st.sampled_from("abcxyz234567 01!é"))
def test_any_changed_character_is_refused(position: int, character: str) -> None:
    changed = LINE[:position] + character + LINE[position + 1 :]
    if changed.strip() != LINE:
        with pytest.raises(InviteMangledError):
            decode_invite(changed)


@given(st.text(max_size=200) | st.text(alphabet="abcdefgh234567").map(lambda text: "hexcomb1" + text))
def test_random_text_is_no_invite(text: str) -> None:
    with pytest.raises(InviteMangledError):
        decode_invite(text)


@given(st.binary(max_size=200) | st.binary(max_size=120).map(lambda tail: body_of(LINE)[:77] + tail))
def test_a_right_checksum_over_a_random_body(body: bytes) -> None:
    try:
        invite = decode_invite(spelled(body))
    except InviteMangledError:
        return
    assert encode_invite(invite) == spelled(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ()},
        {"addresses": ("a:1",) * 9},
        {"addresses": ("no port",)},
        {"bootstraps": ("tcp/1",)},
        {"secret": b"short"},
        {"invite_id": "1a"},
        {"expires_s": -1},
        {"expires_s": 2**32},
        {"bootstraps": ("/dns4/" + "a" * 180,) * 8, "addresses": ("b" * 240 + ":1",) * 8},
    ],
)
def test_an_invite_that_cannot_be_read_is_not_written(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"invite|host:port|multiaddress"):
        encode_invite(replace(INVITE, **changes))  # type: ignore[arg-type]


def test_the_secret_is_not_shown() -> None:
    assert "ssss" not in repr(INVITE)
    with pytest.raises(InviteMangledError) as caught:
        decode_invite(LINE[:-1] + "!")
    assert LINE[10:40] not in caught.value.sentence()


def test_redemption_proof_binds_every_part() -> None:
    fields = {
        "run_id": INVITE.run_id,
        "invite_id": INVITE.invite_id,
        "public_key": b"k" * 32,
        "nonce": b"n" * 16,
        "certificate_request": b"csr",
    }
    stored = stored_secret(INVITE.secret)
    mac = redemption_mac(INVITE.secret, **fields)  # type: ignore[arg-type]
    assert redemption_mac_holds(stored, mac, **fields)  # type: ignore[arg-type]
    assert not redemption_mac_holds(stored_secret(b"t" * 16), mac, **fields)  # type: ignore[arg-type]
    for name, other in {
        "run_id": "f0" * 16,
        "invite_id": "1b" * 8,
        "public_key": b"j" * 32,
        "nonce": b"m" * 16,
        "certificate_request": b"cs",
    }.items():
        assert not redemption_mac_holds(stored, mac, **{**fields, name: other})  # type: ignore[arg-type]
    for wrong in (b"", mac[:-1], mac + b"\0", bytes(32)):
        assert not redemption_mac_holds(stored, wrong, **fields)  # type: ignore[arg-type]


def test_redemption_statement_has_no_ambiguous_borders() -> None:
    def of(public_key: bytes, nonce: bytes) -> bytes:
        return redemption_statement(
            invite_id=INVITE.invite_id, public_key=public_key, nonce=nonce, mac=b"", certificate_request=b""
        )

    assert of(b"ab", b"c") != of(b"a", b"bc")
