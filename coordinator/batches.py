"""A trainer's share of a round, put together part by part and cut into messages. Impure: the journal, the grader.

Invariant: what a member gets is its share as it was when it asked, however long it takes to send: the rollouts of a
batch are kept until versions after that of the batch are past. Tokens travel as the bytes that were handed in.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from coordinator.authority import Authority
from coordinator.core.shares import ShareItem
from coordinator.grader import Grader
from coordinator.join_service import counted
from protocol.ids import PeerId, RoundId
from protocol.rollout import pack_ids
from protocol.v1 import control_pb2

MAX_BATCH_MESSAGE_BYTES = 4 << 20
SLOTS_A_READ = 64
"""So many are read at once, and put together before others have their turn."""


async def share_messages(
    authority: Authority, grader: Grader, round_id: RoundId, peer_id: PeerId
) -> AsyncIterator[control_pb2.FetchBatchResponse]:
    """What a member trains on, in messages that gRPC takes, whatever their length; at least one message. Raises
    `RoundStaleError` or `NotEnrolledError`, and as `Grader.prompts` does."""
    with counted(authority):
        items = authority.core.share_of(round_id, peer_id)
    cutter = Cutter()
    for start in range(0, len(items), SLOTS_A_READ):
        for sample in await _samples(authority, grader, items[start : start + SLOTS_A_READ]):
            if (full := cutter.add(sample)) is not None:
                yield full
        await asyncio.sleep(0)
    yield cutter.part


class Cutter:
    """Cuts a stream of samples into messages. `part` is the one that is being filled."""

    def __init__(self) -> None:
        self.part, self._num_bytes = control_pb2.FetchBatchResponse(), 0

    def add(self, sample: control_pb2.TrainSample) -> control_pb2.FetchBatchResponse | None:
        """The message that was full before this sample, if it was."""
        full, num_bytes = None, sample.ByteSize()
        if self.part.samples and self._num_bytes + num_bytes > MAX_BATCH_MESSAGE_BYTES:
            full, self.part, self._num_bytes = self.part, control_pb2.FetchBatchResponse(), 0
        self.part.samples.append(sample)
        self._num_bytes += num_bytes
        return full


async def _samples(authority: Authority, grader: Grader, items: Sequence[ShareItem]) -> list[control_pb2.TrainSample]:
    prompts = await grader.prompts([item.slot.task for item in items])
    bodies = await authority.rollout_bodies([item.slot for item in items])
    return [_sample(*parts) for parts in zip(items, prompts, bodies, strict=True)]


def _sample(item: ShareItem, prompt_ids: tuple[int, ...], body: bytes) -> control_pb2.TrainSample:
    pieces = control_pb2.Rollout.FromString(body).pieces
    return control_pb2.TrainSample(
        slot=str(item.slot),
        prompt_ids=pack_ids(prompt_ids),
        completion_ids=b"".join(piece.token_ids for piece in pieces),
        logprobs=b"".join(piece.logprobs or bytes(len(piece.token_ids)) for piece in pieces),
        mask=item.mask,
        segment_versions=[version for version, _ in item.segments],
        segment_lengths=[num_tokens for _, num_tokens in item.segments],
        advantage=item.advantage,
    )
