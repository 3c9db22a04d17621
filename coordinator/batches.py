"""A trainer's share of a round, put together and cut into messages. Impure: reads the journal and asks the grader."""

from collections.abc import Iterable, Iterator

from coordinator.authority import Authority
from coordinator.grader import Grader
from coordinator.join_service import counted
from protocol.ids import PeerId, RoundId
from protocol.round import TrainSample
from protocol.v1 import control_pb2
from protocol.wire import rollout_of, sample_message

MAX_BATCH_MESSAGE_BYTES = 4 << 20


async def share_for(authority: Authority, grader: Grader, round_id: RoundId, peer_id: PeerId) -> list[TrainSample]:
    """What a member trains on. Raises `RoundStaleError` or `NotEnrolledError`, and as `Grader.prompts` does."""
    with counted(authority):
        items = authority.core.share_of(round_id, peer_id)
    prompts = await grader.prompts([item.slot.task for item in items])
    bodies = await authority.rollout_bodies([item.slot for item in items])
    samples = []
    for item, prompt_ids, data in zip(items, prompts, bodies, strict=True):
        rollout = rollout_of(control_pb2.Rollout.FromString(data))
        samples.append(
            TrainSample(
                slot=str(item.slot),
                prompt_ids=prompt_ids,
                completion_ids=rollout.token_ids,
                logprobs=rollout.logprobs,
                mask=item.mask,
                segments=item.segments,
                advantage=item.advantage,
            )
        )
    return samples


def batch_messages(samples: Iterable[TrainSample]) -> Iterator[control_pb2.FetchBatchResponse]:
    """The samples in messages that gRPC takes, whatever their length; at least one message."""
    part, num_bytes = control_pb2.FetchBatchResponse(), 0
    for sample in samples:
        message = sample_message(sample)
        if part.samples and num_bytes + message.ByteSize() > MAX_BATCH_MESSAGE_BYTES:
            yield part
            part, num_bytes = control_pb2.FetchBatchResponse(), 0
        part.samples.append(message)
        num_bytes += message.ByteSize()
    yield part
