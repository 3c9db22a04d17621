"""The control plane under bad callers: each is refused as its own error, nothing changes, and honest work goes on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.authority import Authority
from coordinator.batches import Cutter
from coordinator.core.events import RolloutSubmitted, WorkRequested
from coordinator.grader import Grader
from coordinator.hearsay import MAX_METRICS
from node.control import ControlClient
from node.orders import RoundAborted, RoundSealed
from protocol.certificates import Leaf, anchor_pem, certificate_request, issue_leaf, new_leaf_key
from protocol.errors import (
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
    VersionFromFutureError,
    VersionTooOldError,
    WorkRefusedError,
)
from protocol.grpc_options import CLIENT_OPTIONS, MAX_MESSAGE_BYTES
from protocol.ids import Digest, LeaseId, PeerId, RoundId, Version
from protocol.keys import Identity, peer_id_of
from protocol.round import TrainSample, open_plan
from protocol.tls import channel_options
from protocol.v1 import control_pb2
from protocol.v1.control_pb2_grpc import ControlServiceStub
from protocol.wire import rollout_message, sample_message
from tests.coordinator.office import DEADLINE_S, STOP_ID, Office, serving, typed

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


async def test_the_plan_carries_the_wire_of_the_run_file(
    grader: Grader, base: Path, make_home: Callable[[], Path]
) -> None:
    async with serving(grader, base, make_home, averaging={"wire": "bf16"}) as office:
        trainer, rollout = await office.swarm()
        await trainer.open_round(rollout)
        signed = (await trainer.wait_for(RoundSealed)).plan
        key = office.home.identity.public_bytes
        assert open_plan(signed, coordinator_key=key, run_id=office.home.run_id).wire == "bf16"


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
        lambda: control.submit_pieces([]),
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


async def test_a_coordinator_that_stops_is_away_not_refusing(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollout = await office.swarm()
    lease = await rollout.lease(1)

    submit_all = Authority.submit_all

    async def end(self: Authority, wishes: Any) -> Any:
        if any(isinstance(event, WorkRequested | RolloutSubmitted) for event, _ in wishes):
            raise JournalError("the coordinator takes no more events")
        return await submit_all(self, wishes)

    request = control_pb2.SubmitRolloutsRequest(
        lease_id=lease.lease_id, rollouts=[rollout_message(rollout.rollout(lease.slots[0].slot))]
    )
    with monkeypatch.context() as patch:
        patch.setattr(Authority, "submit_all", end)
        with pytest.raises(UnreachableError, match="back"):
            await rollout.lease(1)
        with pytest.raises(UnreachableError, match="back"):
            await typed(rollout.control.stub.SubmitRollouts(request))
    assert await rollout.outcome(lease, rollout.rollout(lease.slots[0].slot)) == "ACCEPTED"


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
    sample = sample_message(
        TrainSample("s", ids, ids, (0.0,) * len(ids), (True,) * len(ids), ((Version(0), len(ids)),), 0.5)
    )
    cutter = Cutter()
    messages = [full for _ in range(9) if (full := cutter.add(sample)) is not None] + [cutter.part]
    assert sum(len(message.samples) for message in messages) == 9
    assert 1 < len(messages) < 9
    assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES // 2
    assert len(Cutter().part.samples) == 0
