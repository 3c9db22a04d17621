"""Gate 2 under bad callers: a rollout that does not hold is refused by its own code, and its neighbours are taken."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.grader import Grader
from coordinator.submissions import _segments_of
from protocol.errors import (
    UsageError,
)
from protocol.ids import LeaseId, Version
from protocol.keys import Identity, peer_id_of
from protocol.rollout import Piece, Rollout, pack_ids, pack_logprobs, sign_piece
from protocol.v1 import control_pb2
from protocol.wire import rollout_message
from tests.coordinator.office import DEADLINE_S, STOP_ID, Member, Office, serving, typed

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGER = Identity.from_seed(b"x" * 32)


Alter = Callable[[control_pb2.Rollout], None]


def piece_with(**changes: Any) -> Alter:
    """Changes fields of the only piece, whose signature then no longer holds."""

    def alter(message: control_pb2.Rollout) -> None:
        for name, value in changes.items():
            setattr(message.pieces[0], name, value)

    return alter


def tokens(*token_ids: int, reason: str = "stop", logprobs: tuple[float, ...] | None = None) -> Alter:
    """Other tokens and log-probabilities, unsigned."""

    def alter(message: control_pb2.Rollout) -> None:
        message.pieces[0].token_ids = pack_ids(token_ids)
        message.pieces[0].logprobs = pack_logprobs(logprobs or (-0.5,) * len(token_ids))
        message.finish_reason = reason

    return alter


def split(*starts: int) -> Alter:
    """The same piece again at other places."""

    def alter(message: control_pb2.Rollout) -> None:
        for start in starts:
            message.pieces.add().CopyFrom(message.pieces[0])
            message.pieces[-1].start = start

    return alter


def reason(text: str) -> Alter:
    return lambda message: setattr(message, "finish_reason", text)


MALFORMED: dict[str, Alter] = {
    "no pieces": lambda message: message.ClearField("pieces"),
    "empty piece": piece_with(token_ids=b"", logprobs=b""),
    "odd bytes of ids": piece_with(token_ids=b"\0" * 7),
    "odd bytes of log-probabilities": piece_with(logprobs=b"\0" * 5),
    "fewer log-probabilities": piece_with(logprobs=pack_logprobs((-0.5, -0.5))),
    "more log-probabilities": piece_with(logprobs=pack_logprobs((-0.5,) * 9)),
    "hole at the front": piece_with(start=1),
    "negative start": piece_with(start=-(2**31)),
    "overlap": split(0),
    "hole in the middle": split(4),
    "too long": tokens(7, 7, 7, 7, STOP_ID),
    "longer than any run": piece_with(token_ids=bytes(4 * 131_073), logprobs=bytes(4 * 131_073)),
    "token -1": tokens(-1, STOP_ID),
    "token V": tokens(64, STOP_ID),
    "token 2^31-1": tokens(2**31 - 1, STOP_ID),
    "positive log-probability": tokens(7, STOP_ID, logprobs=(0.5, -0.5)),
    "NaN": tokens(7, STOP_ID, logprobs=(float("nan"), -0.5)),
    "-inf": tokens(7, STOP_ID, logprobs=(float("-inf"), -0.5)),
    "+inf": tokens(7, STOP_ID, logprobs=(float("inf"), -0.5)),
    "tokens after the stop id": tokens(STOP_ID, 7, STOP_ID),
    "stop without a stop id": tokens(7, 7, 7, 7, reason="stop"),
    "length with a stop id": reason("length"),
    "length below the cap": tokens(7, 7, reason="length"),
    "unknown reason": reason("abort"),
    "no reason": reason(""),
    "long name of an environment": lambda message: setattr(message.slot.task, "environment", "x" * 70_000),
}

FORGED: dict[str, tuple[str, Alter]] = {
    "signature of zeros": ("UNAUTHENTICATED", piece_with(signature=bytes(64))),
    "short signature": ("UNAUTHENTICATED", piece_with(signature=bytes(63))),
    "no signature": ("UNAUTHENTICATED", piece_with(signature=b"")),
    "other tokens under the signature": ("UNAUTHENTICATED", tokens(9, 8, STOP_ID)),
    "other version under the signature": ("UNAUTHENTICATED", piece_with(version=-1)),
    "another key's name": ("UNAUTHENTICATED", piece_with(node=STRANGER.peer_id)),
    "another sample": ("UNAUTHENTICATED", lambda message: setattr(message.slot, "sample", 9)),
    "garbage for a name": ("KEY_REFUSED", piece_with(node="12D3KooW\0\x1b[2J")),
    "no name": ("KEY_REFUSED", piece_with(node="")),
    "a name of 60 kB": ("KEY_REFUSED", piece_with(node="1" * 60_000)),
    "a weak key": ("KEY_REFUSED", piece_with(node=peer_id_of(b"\1" + bytes(31)), signature=bytes(64))),
}


async def handed_in(member: Member, lease_id: LeaseId, *messages: control_pb2.Rollout) -> list[str]:
    request = control_pb2.SubmitRolloutsRequest(lease_id=lease_id, rollouts=messages)
    reply = await typed(member.control.stub.SubmitRollouts(request, timeout=DEADLINE_S))
    assert all(receipt.detail for receipt in reply.receipts if receipt.outcome != "ACCEPTED")
    return [receipt.outcome for receipt in reply.receipts]


async def test_a_malformed_or_forged_rollout_is_refused_and_its_neighbours_are_not(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(2)
    good = rollout_message(rollout.rollout(lease.slots[0].slot))
    cases = {name: ("ROLLOUT_MALFORMED", alter) for name, alter in MALFORMED.items()} | FORGED
    messages, expected, before = [], [], office.state()
    for name, (outcome, alter) in cases.items():
        message = control_pb2.Rollout()
        message.CopyFrom(good)
        alter(message)
        messages.append(message)
        expected.append(f"{name}: {outcome}")
    outcomes = await handed_in(rollout, lease.lease_id, *messages)
    assert [f"{name}: {outcome}" for name, outcome in zip(cases, outcomes, strict=True)] == expected
    assert office.state() == before
    refusals = office.coordinator.authority.refusals
    assert (refusals["ROLLOUT_MALFORMED"], refusals["UNAUTHENTICATED"], refusals["KEY_REFUSED"]) == (
        len(MALFORMED),
        7,
        4,
    )
    assert await handed_in(rollout, lease.lease_id, messages[0], good, messages[-1]) == [
        "ROLLOUT_MALFORMED",
        "ACCEPTED",
        "KEY_REFUSED",
    ]


def signed(member: Member, rollout: Rollout, *, signer: Identity | None = None, **changes: Any) -> control_pb2.Rollout:
    """The rollout with other values in its piece, and a signature that holds."""
    signer = signer or member.identity
    piece: Piece = dataclasses.replace(rollout.pieces[0], **{"node": signer.peer_id, **changes})
    piece = sign_piece(signer, run_id=member.office.home.run_id, slot=rollout.slot, piece=piece)
    return rollout_message(Rollout(rollout.slot, (piece,), rollout.finish_reason))


async def test_what_is_well_signed_may_still_be_impossible(office: Office) -> None:
    trainer, rollout = await office.swarm()
    lease, other = await rollout.lease(1), await rollout.lease(1)
    slot = lease.slots[0].slot
    honest = rollout.rollout(slot)
    elsewhere = rollout.rollout(dataclasses.replace(slot, sample=77))
    far_away = rollout.rollout(dataclasses.replace(slot, task=dataclasses.replace(slot.task, index=2**62)))
    cases: list[tuple[Member, LeaseId, control_pb2.Rollout, str]] = [
        (rollout, lease.lease_id, signed(rollout, honest, signer=STRANGER), "NOT_ENROLLED"),
        (rollout, lease.lease_id, signed(rollout, honest, version=Version(1)), "VERSION_FROM_FUTURE"),
        (rollout, lease.lease_id, signed(rollout, honest, version=Version(2**63 - 1)), "VERSION_FROM_FUTURE"),
        (rollout, lease.lease_id, signed(rollout, honest, version=Version(-1)), "ROLLOUT_MALFORMED"),
        (rollout, LeaseId("00" * 8), rollout_message(honest), "LEASE_UNKNOWN"),
        (rollout, LeaseId(""), rollout_message(honest), "LEASE_UNKNOWN"),
        (rollout, other.lease_id, rollout_message(honest), "LEASE_UNKNOWN"),
        (trainer, lease.lease_id, rollout_message(honest), "LEASE_UNKNOWN"),
        (rollout, lease.lease_id, rollout_message(elsewhere), "LEASE_UNKNOWN"),
        (rollout, lease.lease_id, rollout_message(far_away), "LEASE_UNKNOWN"),
    ]
    before = office.state()
    for member, lease_id, message, outcome in cases:
        assert await handed_in(member, lease_id, message) == [outcome]
        assert office.state() == before
    assert await rollout.outcome(lease, honest) == "ACCEPTED"


async def test_the_same_rollout_five_times_at_once_is_accepted_once(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(2)
    good, other = rollout.rollout(lease.slots[0].slot), rollout.rollout(lease.slots[0].slot, (9, STOP_ID))
    outcomes = await asyncio.gather(*(rollout.outcome(lease, good) for _ in range(5)))
    assert sorted(outcomes) == ["ACCEPTED", *["DUPLICATE"] * 4]
    await office.until(lambda: office.core.state.tally["scored"] == 1)
    before = office.state()
    assert await rollout.outcome(lease, good) == "DUPLICATE"
    assert await rollout.outcome(lease, other) == "ROLLOUT_CONFLICT"
    assert office.state() == before
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[1].slot)) == "ACCEPTED"
    assert await rollout.outcome(lease, good) == "DUPLICATE"  # the lease is over by now


async def test_a_rollout_that_comes_too_late_gives_its_slot_back(office: Office) -> None:
    trainer, rollout = await office.swarm()
    lease = await rollout.lease(2)
    late = rollout.rollout(lease.slots[0].slot)
    for _ in range(2):
        await trainer.make_version(rollout)
    assert await rollout.outcome(lease, late) == "VERSION_TOO_OLD"
    again = await rollout.lease(1)
    assert again.slots[0].slot == lease.slots[0].slot
    assert await rollout.outcome(again, rollout.rollout(again.slots[0].slot)) == "ACCEPTED"


async def test_a_lease_that_ran_out_takes_nothing(grader: Grader, base: Path, make_home: Callable[[], Path]) -> None:
    async with serving(grader, base, make_home, limits={"lease_s": 0.5}) as office:
        _, rollout = await office.swarm()
        lease = await rollout.lease(1)
        await office.until(lambda: not office.core.state.leases)
        assert await rollout.outcome(lease, rollout.rollout(lease.slots[0].slot)) == "LEASE_UNKNOWN"


async def test_too_many_rollouts_or_pieces_in_one_call_are_refused(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    good = rollout_message(rollout.rollout(lease.slots[0].slot))
    split_up = control_pb2.Rollout(slot=good.slot, pieces=[good.pieces[0]] * 2049, finish_reason="stop")
    for messages in ([good] * 1025, [split_up] * 2):
        with office.refuses(UsageError, match="smaller parts"):
            await handed_in(rollout, lease.lease_id, *messages)
    assert await handed_in(rollout, lease.lease_id, good) == ["ACCEPTED"]


async def test_the_state_keeps_one_segment_for_each_version(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(2)
    slot = lease.slots[0].slot
    many = Rollout(slot, rollout.pieces(slot, (9,), (9,), (8, STOP_ID)), "stop")
    assert await rollout.outcome(lease, many) == "ACCEPTED"
    assert office.core.state.find(slot).segments == ((0, 4),)
    pieces = [Piece(rollout.identity.peer_id, Version(v), n, (9,), (-0.5,)) for n, v in enumerate((0, 0, 1, 3, 3, 3))]
    assert _segments_of(Rollout(slot, tuple(pieces), "stop")) == ((0, 2), (1, 1), (3, 3))


async def test_fields_that_nobody_knows_are_not_kept(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    good = rollout_message(rollout.rollout(lease.slots[0].slot)).SerializeToString()
    stuffed = control_pb2.Rollout.FromString(good + b"\xf2\x7f\x03abc")  # field 2046, three bytes
    assert len(stuffed.SerializeToString()) > len(good)
    assert await handed_in(rollout, lease.lease_id, stuffed) == ["ACCEPTED"]
    assert await office.coordinator.authority.rollout_bodies([rollout.rollout(lease.slots[0].slot).slot]) == [good]


async def test_an_environment_without_replies_is_never_asked(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object, **__: object) -> None:
        raise AssertionError("a single turn costs a way to the grader")

    _, node = await office.swarm()
    lease = await node.lease(1)
    monkeypatch.setattr(Grader, "replies", ask)
    assert await node.outcome(lease, node.rollout(lease.slots[0].slot)) == "ACCEPTED"


async def test_where_nothing_replies_no_piece_is_the_environments(office: Office) -> None:
    """Not even one that the coordinator's key has signed."""
    _, node = await office.swarm()
    lease = await node.lease(1)
    slot = lease.slots[0].slot
    for identity in (node.identity, office.home.identity):
        said = Piece(identity.peer_id, Version(0), 2, (8,), ())
        said = sign_piece(identity, run_id=office.home.run_id, slot=slot, piece=said)
        first, last = node.pieces(slot, (7, STOP_ID)), node.pieces(slot, (STOP_ID,), start=3)
        assert await node.outcome(lease, Rollout(slot, (*first, said, *last), "stop")) == "ROLLOUT_MALFORMED"
