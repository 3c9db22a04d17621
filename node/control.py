"""The calls that a node makes to the coordinator, with deadlines, retries and errors of the tree. Impure:
gRPC.

`ControlClient` holds one channel, to one of the coordinator's addresses; the session moves it on to the
next when an address is silent. Invariant: only calls that may be repeated without effect are repeated here,
and a call that the coordinator answered, with whatever error, is never repeated.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from node.backoff import backoff_s
from node.orders import (
    Lease,
    PiecesReceived,
    Receipt,
    VersionAnnounced,
    announcement_of,
    lease_of,
    pieces_received_of,
    receipt_of,
)
from node.pieces import SlotProgress
from protocol.certificates import Leaf
from protocol.errors import UnreachableError
from protocol.grpc_errors import from_rpc_error
from protocol.grpc_options import CLIENT_OPTIONS
from protocol.grpc_reads import read_message
from protocol.ids import Digest, LeaseId, PeerId, RoundId, TaskKey, Version
from protocol.keys import peer_id_of
from protocol.rollout import Rollout
from protocol.round import TrainSample
from protocol.tls import channel_credentials, channel_options
from protocol.v1 import control_pb2
from protocol.v1.control_pb2_grpc import ControlServiceStub
from protocol.wire import piece_message, prompt_messages, rollout_message, sample_of, slot_message

CALL_DEADLINE_S = 15.0
BATCH_DEADLINE_S = 120.0
MAX_ATTEMPTS = 6

T = TypeVar("T")


class ControlClient:
    """Typed calls of `ControlService`. `address` says where it dials now; `rtt_s` is the quickest answer so
    far."""

    def __init__(self, *, addresses: Sequence[str], coordinator_key: bytes, leaf: Leaf) -> None:
        self._addresses, self._coordinator_key, self._leaf = tuple(addresses), coordinator_key, leaf
        self._position = 0
        self._retired: list[grpc.aio.Channel] = []
        self.rtt_s = 0.0
        self._channel, self._stub = self._dial()

    @property
    def address(self) -> str:
        """host:port of the coordinator's control service in use."""
        return self._addresses[self._position % len(self._addresses)]

    @property
    def stub(self) -> Any:
        """The stub of the channel in use, for the session."""
        return self._stub

    async def move_on(self) -> None:
        """Dials the next address, anew if there is only one."""
        self._position += 1
        await self._redial()

    async def use_leaf(self, leaf: Leaf) -> None:
        """Shows a renewed leaf from the next connection on."""
        self._leaf = leaf
        await self._redial()

    async def close(self) -> None:
        """Ends the channel and what runs on it."""
        for channel in (*self._retired, self._channel):
            await channel.close(None)

    async def lease_work(self, *, version: Version, root: Digest, num_slots: int) -> Lease:
        """A lease. Raises `NoWorkError`, `VersionTooOldError` and their like."""
        request = control_pb2.LeaseWorkRequest(version=version, root=root, num_slots=num_slots)
        return lease_of(await self._call(lambda: self._stub.LeaseWork, request, "asking for work"))

    async def submit(self, lease_id: LeaseId, rollouts: Sequence[Rollout]) -> list[Receipt]:
        """One receipt for each rollout, in order; repeated until the coordinator answers."""
        request = control_pb2.SubmitRolloutsRequest(
            lease_id=lease_id, rollouts=[rollout_message(rollout) for rollout in rollouts]
        )
        reply = await self._retried(lambda: self._stub.SubmitRollouts, request, "handing in rollouts")
        return [receipt_of(receipt) for receipt in reply.receipts]

    async def submit_pieces(self, progress: Sequence[SlotProgress]) -> PiecesReceived:
        """Hands in what slots under way have got; tried once, since the next call can say the same and more."""
        request = control_pb2.SubmitPiecesRequest(
            progress=[
                control_pb2.SlotProgress(
                    lease_id=item.lease_id,
                    slot=slot_message(item.slot),
                    pieces=[piece_message(piece) for piece in item.pieces],
                )
                for item in progress
            ]
        )
        return pieces_received_of(await self._call(lambda: self._stub.SubmitPieces, request, "handing in pieces"))

    async def return_lease(self, lease_id: LeaseId, *, reason: str, is_fault: bool = False) -> None:
        """Gives the unfilled slots back; `is_fault` says that this node tried and could not fill them."""
        request = control_pb2.ReturnLeaseRequest(lease_id=lease_id, reason=reason, is_fault=is_fault)
        await self._call(lambda: self._stub.ReturnLease, request, "giving a lease back", deadline_s=5.0)

    async def fetch_batch(self, round_id: RoundId) -> tuple[TrainSample, ...]:
        """This node's share of the round's batch."""
        request = control_pb2.FetchBatchRequest(round_id=round_id)
        samples: list[TrainSample] = []
        try:
            call = self._stub.FetchBatch(request, timeout=BATCH_DEADLINE_S)
            while (part := await read_message(call)) is not grpc.aio.EOF:
                samples += [sample_of(sample) for sample in part.samples]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, doing="fetching the batch") from error
        return tuple(samples)

    async def attest(
        self, round_id: RoundId, *, body: bytes, metrics: dict[str, float], canary: Sequence[float] = ()
    ) -> None:
        """This trainer's word on the version that it made; repeated until the coordinator answers."""
        request = control_pb2.AttestVersionRequest(round_id=round_id, body=body, metrics=metrics, canary=canary)
        await self._retried(lambda: self._stub.AttestVersion, request, "attesting a version")

    async def fail_round(self, round_id: RoundId, *, suspects: Sequence[PeerId], reason: str) -> None:
        """This trainer's word that the round cannot be finished."""
        request = control_pb2.FailRoundRequest(round_id=round_id, suspects=suspects, reason=reason[:500])
        await self._retried(lambda: self._stub.FailRound, request, "failing a round")

    async def submit_evaluation(
        self, version: Version, *, tasks: Sequence[TaskKey], completions: Sequence[tuple[int, ...]]
    ) -> None:
        """Greedy completions of held-out tasks, for the coordinator to score."""
        prompts = prompt_messages(list(zip(tasks, completions, strict=True)))
        request = control_pb2.SubmitEvaluationRequest(version=version, completions=prompts)
        await self._retried(lambda: self._stub.SubmitEvaluation, request, "handing in an evaluation")

    async def get_manifest(self, version: Version | None) -> VersionAnnounced:
        """A committed version as it would be announced; None = the newest."""
        request = control_pb2.GetManifestRequest(version=-1 if version is None else version)
        reply = await self._call(lambda: self._stub.GetManifest, request, "asking for a manifest")
        return announcement_of(reply.announced)

    async def renew_leaf(self, certificate_request: bytes) -> tuple[bytes, bytes]:
        """A fresh leaf certificate (PEM) and stamp of membership."""
        request = control_pb2.RenewLeafRequest(certificate_request=certificate_request)
        reply = await self._retried(lambda: self._stub.RenewLeaf, request, "renewing the TLS leaf")
        return reply.leaf_certificate, reply.membership

    def _dial(self) -> tuple[grpc.aio.Channel, Any]:
        credentials = channel_credentials(self._leaf, coordinator_key=self._coordinator_key)
        options = [*CLIENT_OPTIONS, *channel_options(peer_id_of(self._coordinator_key))]
        channel = grpc.aio.secure_channel(self.address, credentials, options=options)
        return channel, ControlServiceStub(channel)

    async def _redial(self) -> None:
        """A new channel; the one before goes on with its running calls until the next redial."""
        retired, self._retired = self._retired, [self._channel]
        self._channel, self._stub = self._dial()
        for channel in retired:
            await channel.close(CALL_DEADLINE_S)

    async def _call(
        self, method: Callable[[], Any], request: Any, doing: str, *, deadline_s: float = CALL_DEADLINE_S
    ) -> Any:
        started_s = time.monotonic()
        try:
            reply = await method()(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, doing=doing) from error
        took_s = time.monotonic() - started_s
        self.rtt_s = min(self.rtt_s or took_s, took_s)
        return reply

    async def _retried(self, method: Callable[[], Any], request: Any, doing: str) -> Any:
        async def once() -> Any:
            return await self._call(method, request, doing)

        return await retried(once, chance=random.random)


async def retried(
    call: Callable[[], Awaitable[T]],
    *,
    chance: Callable[[], float],
    max_attempts: int = MAX_ATTEMPTS,
    base_s: float = 0.25,
) -> T:
    """What `call` returns; it is called again while nobody answers (`UnreachableError`), `max_attempts`
    times in all."""
    for attempt in range(max_attempts - 1):
        try:
            return await call()
        except UnreachableError:
            await asyncio.sleep(backoff_s(attempt, chance=chance(), base_s=base_s))
    return await call()
