"""The control plane under bad callers: each is refused as its own error, nothing changes, and honest work goes on."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from coordinator import control_service
from coordinator.authority import Authority
from coordinator.control_service import batch_messages
from coordinator.core.events import RolloutSubmitted, WorkRequested
from coordinator.hearsay import MAX_METRICS
from node.control import ControlClient
from node.orders import RoundAborted, Welcome, order_of
from protocol.certificates import Leaf, anchor_pem, certificate_request, issue_leaf, new_leaf_key
from protocol.errors import (
    EngineError,
    HexcombError,
    JournalError,
    KeyRefusedError,
    LeaseUnknownError,
    ManifestRefusedError,
    NotEnrolledError,
    RefusedError,
    RootMismatchError,
    RoundStaleError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
    VersionFromFutureError,
    VersionTooOldError,
    WorkRefusedError,
)
from protocol.grpc_options import CLIENT_OPTIONS, MAX_MESSAGE_BYTES
from protocol.ids import Digest, LeaseId, PeerId, RoundId, Version
from protocol.keys import Identity, peer_id_of
from protocol.rollout import Piece, Rollout, pack_ids, pack_logprobs, sign_piece
from protocol.round import TrainSample
from protocol.tls import channel_options
from protocol.v1 import control_pb2
from protocol.v1.control_pb2_grpc import ControlServiceStub
from protocol.wire import rollout_message
from tests.coordinator.office import DEADLINE_S, STOP_ID, Member, Office, typed

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGER = Identity.from_seed(b"x" * 32)
ROUND = RoundId("0.1")


def leaf_of(authority: Identity, peer_id: PeerId, *, now_ms: int) -> Leaf:
    key = new_leaf_key()
    request = certificate_request(key, peer_id=peer_id)
    return Leaf(issue_leaf(authority, request, peer_id=peer_id, now_ms=now_ms), key)


def dial(office: Office, leaf: Leaf | None) -> grpc.aio.Channel:
    """A channel to the control port that shows this leaf, or none."""
    key = office.home.identity.public_bytes
    pair = (leaf.key_pem, leaf.certificate_pem) if leaf else (None, None)
    credentials = grpc.ssl_channel_credentials(anchor_pem(key), *pair)
    options = [*CLIENT_OPTIONS, *channel_options(peer_id_of(key))]
    return grpc.aio.secure_channel(office.coordinator.addresses["control"], credentials, options=options)


async def test_two_versions_are_made(office: Office) -> None:
    trainer, rollout = await office.swarm()
    assert await trainer.make_version(rollout) == 1
    assert await trainer.make_version(rollout) == 2
    books = office.core.books()
    assert (books.issued, books.trained) == (8, 8)


# Who may call


@pytest.mark.parametrize("authority", [None, STRANGER], ids=["no certificate", "another authority's"])
async def test_a_caller_without_a_leaf_of_the_run_does_not_get_through_tls(
    office: Office, authority: Identity | None
) -> None:
    member = await office.join()
    leaf = leaf_of(authority, member.identity.peer_id, now_ms=office.clock()) if authority else None
    before = office.state()
    async with dial(office, leaf) as channel:
        with pytest.raises(UnreachableError):
            await typed(ControlServiceStub(channel).GetManifest(control_pb2.GetManifestRequest(version=0), timeout=5))
    assert office.state() == before
    assert (await member.control.get_manifest(None)).manifest


async def test_a_key_that_is_not_enrolled_is_told_so_at_every_door(office: Office) -> None:
    leaf = leaf_of(office.home.identity, STRANGER.peer_id, now_ms=office.clock())
    control = ControlClient(
        addresses=[office.coordinator.addresses["control"]],
        coordinator_key=office.home.identity.public_bytes,
        leaf=leaf,
    )
    calls: list[Callable[[], Any]] = [
        lambda: control.lease_work(version=Version(0), root=office.head[1], num_slots=1),
        lambda: control.submit(LeaseId("ff"), []),
        lambda: control.return_lease(LeaseId("ff"), reason=""),
        lambda: control.fetch_batch(ROUND),
        lambda: control.attest(ROUND, body=b"", metrics={}),
        lambda: control.fail_round(ROUND, suspects=[], reason=""),
        lambda: control.submit_evaluation(Version(0), tasks=[], completions=[]),
        lambda: control.get_manifest(None),
        lambda: control.renew_leaf(b""),
        lambda: typed(control.stub.Session().read()),
    ]
    for call in calls:
        with office.refuses(NotEnrolledError, match="no place in this run"):
            await call()
    await control.close()


async def test_a_leaf_that_ran_out_on_an_open_connection_is_refused(office: Office) -> None:
    member = await office.join()
    await member.control.get_manifest(None)
    office.clock.offset_ms = 25 * 3_600_000
    with office.refuses(UnauthenticatedError, match="it is valid from"):
        await member.control.get_manifest(None)
    office.clock.offset_ms = 0
    await member.control.get_manifest(None)


async def test_a_leaf_is_renewed_for_a_good_request_only(office: Office) -> None:
    member = await office.join()
    with office.refuses(KeyRefusedError):
        await member.control.renew_leaf(b"no request")
    key = new_leaf_key()
    certificate, stamp = await member.control.renew_leaf(certificate_request(key, peer_id=member.identity.peer_id))
    await member.control.use_leaf(Leaf(certificate, key))
    await member.control.get_manifest(None)
    assert stamp


# Gate 1


async def test_work_is_for_nodes_with_a_role_and_the_committed_weights(office: Office) -> None:
    idle = await office.join()
    version, root = office.head
    with office.refuses(WorkRefusedError, match="no open session"):
        await idle.lease()
    trainer, rollout = await office.swarm()
    with office.refuses(WorkRefusedError, match="its role is not to generate"):
        await trainer.lease()
    with office.refuses(RootMismatchError):
        await rollout.control.lease_work(version=version, root=Digest("0" * 64), num_slots=1)
    with office.refuses(RootMismatchError):
        await rollout.control.lease_work(version=version, root=Digest("é" * 10_000), num_slots=1)
    for future in (1, 2**63 - 1):
        with office.refuses(VersionFromFutureError):
            await rollout.control.lease_work(version=Version(future), root=root, num_slots=1)
    with office.refuses(VersionTooOldError):
        await rollout.control.lease_work(version=Version(-1), root=root, num_slots=1)
    for num_slots, num_given in ((2, 2), (-5, 1), (2**31 - 1, 8)):
        lease = await rollout.lease(num_slots)
        assert len(lease.slots) == num_given
        await rollout.control.return_lease(lease.lease_id, reason="a test")
    await trainer.make_version(rollout)
    await trainer.make_version(rollout)
    with office.refuses(VersionTooOldError, match="Fetch version 2"):
        await rollout.control.lease_work(version=version, root=root, num_slots=1)


async def test_a_lease_is_given_back_by_its_holder_once(office: Office) -> None:
    trainer, rollout = await office.swarm()
    lease = await rollout.lease(2)
    for member, lease_id in ((trainer, lease.lease_id), (rollout, LeaseId("ff" * 8))):
        with office.refuses(LeaseUnknownError, match="Drop its slots"):
            await member.control.return_lease(lease_id, reason="a test")
    await rollout.control.return_lease(lease.lease_id, reason="a test")
    with office.refuses(LeaseUnknownError):
        await rollout.control.return_lease(lease.lease_id, reason="a test")
    again = await rollout.lease(2)
    assert [work.slot for work in again.slots] == [work.slot for work in lease.slots]


async def test_nobody_holds_slots_whose_prompts_could_not_be_made(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = await office.swarm()

    async def fail(self: object, keys: object) -> None:
        raise EngineError("the grader is gone", why="a test")

    with monkeypatch.context() as patch:
        patch.setattr("coordinator.grader.Grader.prompts", fail)
        with pytest.raises(EngineError):
            await rollout.lease(2)
    assert office.core.books().open == 0
    assert len((await rollout.lease(2)).slots) == 2


async def test_a_coordinator_that_stops_is_away_not_refusing(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)

    submit = Authority.submit

    async def end(self: Authority, event: Any, attachments: Any = ()) -> Any:
        if isinstance(event, WorkRequested | RolloutSubmitted):
            raise JournalError("the coordinator takes no more events")
        return await submit(self, event, attachments)

    request = control_pb2.SubmitRolloutsRequest(
        lease_id=lease.lease_id, rollouts=[rollout_message(rollout.rollout(lease.slots[0].slot))]
    )
    with monkeypatch.context() as patch:
        patch.setattr(Authority, "submit", end)
        with pytest.raises(UnreachableError, match="back"):
            await rollout.lease(1)
        with pytest.raises(UnreachableError, match="back"):
            await typed(rollout.control.stub.SubmitRollouts(request))
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[0].slot)) == "ACCEPTED"


# Gate 2

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


async def test_a_lease_that_ran_out_takes_nothing(office: Office) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)
    office.clock.offset_ms = 601_000
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


async def test_messages_that_are_too_large_or_compressed_or_garbage_are_refused(office: Office) -> None:
    _, rollout = await office.swarm()
    lease, before = await rollout.lease(1), office.state()
    stub = rollout.control.stub
    large = control_pb2.AttestVersionRequest(round_id="0.1", body=bytes(MAX_MESSAGE_BYTES + 1))
    unlimited = [*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1), *channel_options(office.home.identity.peer_id)]
    member_leaf = leaf_of(office.home.identity, rollout.identity.peer_id, now_ms=office.clock())
    credentials = grpc.ssl_channel_credentials(
        anchor_pem(office.home.identity.public_bytes), member_leaf.key_pem, member_leaf.certificate_pem
    )
    address = office.coordinator.addresses["control"]
    async with grpc.aio.secure_channel(address, credentials, options=unlimited) as channel:
        with pytest.raises(WorkRefusedError, match="RESOURCE_EXHAUSTED"):
            await typed(ControlServiceStub(channel).AttestVersion(large, timeout=DEADLINE_S))
        raw = channel.unary_unary("/protocol.v1.ControlService/SubmitRollouts")
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x05\x12"):
            with pytest.raises(HexcombError):
                await typed(raw(garbage, timeout=DEADLINE_S))
    zeros = control_pb2.AttestVersionRequest(round_id="0.1", body=bytes(1 << 20))
    with pytest.raises(RefusedError, match="UNIMPLEMENTED"):
        await typed(stub.AttestVersion(zeros, timeout=DEADLINE_S, compression=grpc.Compression.Gzip))
    assert office.state() == before
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[0].slot)) == "ACCEPTED"


# Rounds


async def test_only_members_of_the_open_round_have_a_say_in_it(office: Office) -> None:
    trainer, rollout = await office.swarm()
    round_id = await trainer.open_round(rollout)
    body = trainer.next_body().to_bytes()
    for wrong in (RoundId("0.9"), RoundId(""), RoundId("x" * 100_000)):
        for call in (
            lambda name=wrong: trainer.control.fetch_batch(name),
            lambda name=wrong: trainer.control.attest(name, body=body, metrics={}),
            lambda name=wrong: trainer.control.fail_round(name, suspects=[], reason="a test"),
        ):
            with office.refuses(RoundStaleError, match="it is not the open one"):
                await call()
    for call in (
        lambda: rollout.control.fetch_batch(round_id),
        lambda: rollout.control.attest(round_id, body=body, metrics={}),
        lambda: rollout.control.fail_round(round_id, suspects=[trainer.identity.peer_id], reason="a test"),
    ):
        with office.refuses(NotEnrolledError, match="not a member"):
            await call()
    samples = await trainer.control.fetch_batch(round_id)
    assert [(sample.completion_ids, sample.mask, sample.advantage) for sample in samples] == [
        ((7, 8, STOP_ID), (True, True, True), 0.0)
    ] * 4
    await trainer.control.attest(round_id, body=body, metrics={})
    await office.until(lambda: office.head[0] == 1)


async def test_a_body_that_does_not_follow_the_head_is_refused(office: Office) -> None:
    trainer, rollout = await office.swarm()
    round_id = await trainer.open_round(rollout)
    good = trainer.next_body()
    wide = dataclasses.replace(good.tensors[0], shape=(2**60,) * 100_000)
    bodies = {
        "garbage": b"\xc1",
        "nothing": b"",
        "not canonical": good.to_bytes() + b"\xc0",
        "a shape that no machine could multiply": trainer.next_body(tensors=(wide,)).to_bytes(),
        "another run's": trainer.next_body(run_id="ab" * 16).to_bytes(),
        "of version 0": trainer.next_body(version=0, parent=None).to_bytes(),
        "two ahead": trainer.next_body(version=2).to_bytes(),
        "on another parent": trainer.next_body(parent="0" * 64).to_bytes(),
        "with other tensors": trainer.next_body(tensors=(dataclasses.replace(good.tensors[0], name="v"),)).to_bytes(),
        "with a file": trainer.next_body(chunk_bytes=2048).to_bytes(),
    }
    for name, body in bodies.items():
        with office.refuses(ManifestRefusedError):
            await trainer.control.attest(round_id, body=body, metrics={})
            pytest.fail(f"a body {name} was taken")
    await trainer.control.attest(round_id, body=good.to_bytes(), metrics={})
    await trainer.control.attest(round_id, body=good.to_bytes(), metrics={})  # its answer may have been lost
    await office.until(lambda: office.head == (1, good.root))


async def test_what_trainers_say_beside_the_weights_is_made_harmless(office: Office) -> None:
    trainer, rollout = await office.swarm()
    round_id = await trainer.open_round(rollout)
    ugly = "\x1b[2J\r\nforged line\u202e" + "x" * 10_000
    await trainer.control.fail_round(round_id, suspects=[PeerId("\0"), PeerId("x" * 10_000)], reason=ugly)
    aborted = await trainer.wait_for(RoundAborted)
    assert aborted.reason == "FAILED: [2Jforged line" + "x" * (200 - len("[2Jforged line"))
    round_id = await office.until(lambda: office.core.state.round and office.core.state.round.round_id)
    metrics = {f"m{n:03}": float(n) for n in range(100)} | {"bad name\n": 1.0, "y" * 65: 1.0, "nan": float("nan")}
    await trainer.control.attest(round_id, body=trainer.next_body().to_bytes(), metrics=metrics)
    await office.until(lambda: office.head[0] == 1)
    kept = [name for name in office.core.state.head.metrics if name.startswith("m") and name[1:].isdecimal()]
    assert len(kept) == MAX_METRICS
    assert not {"bad name\n", "y" * 65, "nan"} & set(office.core.state.head.metrics)


async def test_a_version_that_was_never_made_has_no_manifest(office: Office) -> None:
    member = await office.join()
    for version in (1, 2**63 - 1):
        with office.refuses(VersionFromFutureError):
            await member.control.get_manifest(Version(version))
    assert await member.control.get_manifest(Version(0)) == await member.control.get_manifest(None)


async def test_a_batch_is_cut_into_messages_that_grpc_takes() -> None:
    ids = tuple(range(131_072))
    sample = TrainSample("s", ids, ids, (0.0,) * len(ids), (True,) * len(ids), ((Version(0), len(ids)),), 0.5)
    messages = list(batch_messages([sample] * 9))
    assert sum(len(message.samples) for message in messages) == 9
    assert 1 < len(messages) < 9
    assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES // 2
    assert [len(message.samples) for message in batch_messages([])] == [0]


# Sessions


async def streaming(member: Member, *messages: control_pb2.SessionRequest) -> Any:
    """A raw session that has said `messages` and nothing more."""
    call = member.control.stub.Session()
    for message in messages:
        await call.write(message)
    return call


async def end_of(call: Any) -> HexcombError:
    """What a session ended with."""
    with pytest.raises(HexcombError) as caught:  # noqa: PT012 - messages before the end are read
        async with asyncio.timeout(DEADLINE_S):
            while await typed(call.read()) is not grpc.aio.EOF:
                pass
            await typed(call)
    return caught.value


HELLO = control_pb2.SessionRequest(hello=control_pb2.Hello(program="test"))


async def test_a_session_begins_with_a_hello(office: Office) -> None:
    member = await office.join()
    await member.hello()
    for first in (control_pb2.SessionRequest(), control_pb2.SessionRequest(heartbeat=control_pb2.Heartbeat())):
        with office.refuses(UsageError, match="not a hello"):
            raise await end_of(await streaming(member, first))
    call = await streaming(member)
    await call.done_writing()
    assert isinstance(await end_of(call), UsageError)
    assert member.session is not None
    assert (member.session.link.num_connects, member.session.link.is_up) == (1, True)


async def test_whoever_says_nothing_is_cut_off(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "HELLO_DEADLINE_S", 0.2)
    member = await office.join()
    with office.refuses(UnreachableError, match=r"said nothing for 0\.2 s"):
        raise await end_of(await streaming(member))
    assert member.identity.peer_id not in office.core.soft.live
    assert await member.hello()


async def test_a_second_session_takes_the_place_of_the_first(office: Office) -> None:
    member = await office.join()
    first = await streaming(member, HELLO)
    assert isinstance(order_of(await first.read()), Welcome)
    second = await streaming(member, HELLO)
    assert isinstance(order_of(await second.read()), Welcome)
    assert "took its place" in (await end_of(first)).why
    assert member.identity.peer_id in office.core.soft.live
    assert office.core.soft.live[member.identity.peer_id].ended_ms is None
    second.cancel()
    await office.until(lambda: office.core.soft.live[member.identity.peer_id].ended_ms)


async def test_nothing_comes_before_the_welcome(office: Office) -> None:
    member = await office.join()
    call = await streaming(member)
    noise = control_pb2.SessionResponse(role_assigned=control_pb2.RoleAssigned(role="idle"))
    office.coordinator.sessions.send([member.identity.peer_id], noise)
    await call.write(HELLO)
    assert isinstance(order_of(await call.read()), Welcome)
    call.cancel()


async def test_a_node_that_does_not_read_loses_its_stream_and_the_others_do_not(office: Office) -> None:
    reader, sleeper = await office.join(), await office.join()
    await reader.hello()
    call = await streaming(sleeper, HELLO)
    outboxes = office.coordinator.sessions._outboxes
    await office.until(lambda: sleeper.identity.peer_id in outboxes)
    loud = control_pb2.SessionResponse(round_aborted=control_pb2.RoundAborted(round_id="0.1", reason="x" * 65_536))
    heard, num_said = 0, 0
    async with asyncio.timeout(DEADLINE_S):
        while sleeper.identity.peer_id in outboxes:
            office.coordinator.sessions.broadcast(loud)
            num_said += 1
            await reader.wait_for(RoundAborted)
            heard += 1
    assert heard == num_said < 1000
    await office.until(lambda: office.core.soft.live[sleeper.identity.peer_id].ended_ms)
    call.cancel()
    again = await streaming(sleeper, HELLO)
    assert isinstance(order_of(await again.read()), Welcome)
    again.cancel()


async def test_hostile_words_in_hello_and_heartbeat_are_made_harmless(office: Office) -> None:
    member = await office.join()
    ugly = "<script>\x1b[2J\n" + "é" * 1_000_000
    hello = control_pb2.Hello(program=ugly, endpoint=ugly, trainer_endpoint="h:99999", name="<script>")
    hello.capability.decode_tokens_per_s = float("nan")
    hello.capability.train_tokens_per_s = float("inf")
    hello.capability.memory_bytes = -1
    hello.capability.device = ugly
    beat = control_pb2.Heartbeat(version=2**63 - 1, root=ugly, activity=ugly, tokens_per_s=-1.0, engine=ugly)
    beat.versions_held.extend(range(100_000))
    requests = [control_pb2.SessionRequest(hello=hello), control_pb2.SessionRequest(heartbeat=beat)]
    call, peer_id = await streaming(member, *requests), member.identity.peer_id
    live = office.core.soft.live
    await office.until(lambda: peer_id in live and live[peer_id].presence.version >= 0)
    presence, capability = office.core.soft.live[peer_id].presence, office.core.soft.capabilities[peer_id]
    assert (presence.name, presence.endpoint, presence.trainer_endpoint) == ("", "", "")
    assert presence.activity == presence.engine == capability.device == "script2J"
    assert (capability.decode_tokens_per_s, capability.train_tokens_per_s, capability.memory_bytes) == (0.0, 0.0, 0)
    assert (presence.tokens_per_s, len(presence.root), len(presence.versions_held)) == (0.0, 64, 16)
    call.cancel()
