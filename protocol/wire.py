"""Protobuf messages to the core's dataclasses and back: the only place where both are known. Pure.

Reading is strict in what matters: numbers out of range, names and completions that are too long, and byte strings of
odd length are refused as typed errors, before anything is built from them.
"""

from collections.abc import Sequence

from protocol.errors import RolloutMalformedError
from protocol.ids import PeerId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from protocol.rollout import (
    FinishReason,
    Piece,
    Rollout,
    Spans,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from protocol.round import SignedPlan, TrainSample
from protocol.v1 import common_pb2, control_pb2

MAX_NAME = 128
MAX_COMPLETION_BYTES = 4 * 131_072
"""Token ids of the longest completion that a run file may ask for."""


def task_message(task: TaskKey) -> common_pb2.Task:
    """The task for the wire."""
    return common_pb2.Task(environment=task.environment, seed=task.seed, index=task.index)


def task_key(message: common_pb2.Task) -> TaskKey:
    """The task that came over the wire. Raises `RolloutMalformedError` on a name that no environment has."""
    if len(message.environment) > MAX_NAME:
        raise RolloutMalformedError("a task was refused", why=f"its environment's name is longer than {MAX_NAME}")
    return TaskKey(message.environment, message.seed, message.index)


def slot_message(slot: SlotKey) -> common_pb2.Slot:
    """The slot for the wire."""
    return common_pb2.Slot(version=slot.version, task=task_message(slot.task), sample=slot.sample)


def slot_key(message: common_pb2.Slot) -> SlotKey:
    """The slot that came over the wire."""
    return SlotKey(Version(message.version), task_key(message.task), message.sample)


def piece_message(piece: Piece) -> common_pb2.Piece:
    """The piece for the wire."""
    token_ids, logprobs = piece.data
    return common_pb2.Piece(
        node=piece.node,
        version=piece.version,
        start=piece.start,
        token_ids=token_ids,
        logprobs=logprobs,
        signature=piece.signature,
    )


def piece_of(message: common_pb2.Piece) -> Piece:
    """The piece that came over the wire. Raises `RolloutMalformedError`."""
    data = (message.token_ids, message.logprobs)
    return Piece.of_data(PeerId(message.node), Version(message.version), message.start, data, message.signature)


def rollout_message(rollout: Rollout) -> control_pb2.Rollout:
    """The rollout for the wire."""
    pieces = [piece_message(piece) for piece in rollout.pieces]
    return control_pb2.Rollout(slot=slot_message(rollout.slot), pieces=pieces, finish_reason=rollout.finish_reason)


def rollout_of(message: control_pb2.Rollout) -> Rollout:
    """The rollout that came over the wire. Raises `RolloutMalformedError`."""
    slot = slot_key(message.slot)
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if message.finish_reason not in reasons:
        raise RolloutMalformedError(f"the rollout for slot {slot} was refused", why="its finish reason is unknown")
    num_bytes = max(sum(len(p.token_ids) for p in message.pieces), sum(len(p.logprobs) for p in message.pieces))
    if num_bytes > MAX_COMPLETION_BYTES:
        raise RolloutMalformedError(f"the rollout for slot {slot} was refused", why="it is longer than any run allows")
    return Rollout(slot, tuple(piece_of(piece) for piece in message.pieces), reasons[message.finish_reason])


def completion_in(data: bytes) -> tuple[tuple[int, ...], Spans]:
    """The token ids of a serialized rollout that was read before, and where the environment's are."""
    pieces = control_pb2.Rollout.FromString(data).pieces
    given = tuple((piece.start, len(piece.token_ids) // 4) for piece in pieces if not piece.logprobs)
    return unpack_ids(b"".join(piece.token_ids for piece in pieces)), given


def sample_message(sample: TrainSample) -> control_pb2.TrainSample:
    """A slot of a batch for the wire."""
    return control_pb2.TrainSample(
        slot=sample.slot,
        prompt_ids=pack_ids(sample.prompt_ids),
        completion_ids=pack_ids(sample.completion_ids),
        logprobs=pack_logprobs(sample.logprobs),
        mask=bytes(sample.mask),
        segment_versions=[version for version, _ in sample.segments],
        segment_lengths=[num_tokens for _, num_tokens in sample.segments],
        advantage=sample.advantage,
    )


def sample_of(message: control_pb2.TrainSample) -> TrainSample:
    """A slot of a batch that came over the wire. Raises `RolloutMalformedError`."""
    completion_ids = unpack_ids(message.completion_ids)
    logprobs = unpack_logprobs(message.logprobs)
    lengths = message.segment_lengths
    if not len(completion_ids) == len(logprobs) == len(message.mask) == sum(lengths):
        raise RolloutMalformedError(f"sample {message.slot} was refused", why="its parts differ in length")
    if len(lengths) != len(message.segment_versions) or any(length < 1 for length in lengths):
        raise RolloutMalformedError(f"sample {message.slot} was refused", why="its segments do not fit")
    versions = (Version(version) for version in message.segment_versions)
    return TrainSample(
        slot=message.slot,
        prompt_ids=unpack_ids(message.prompt_ids),
        completion_ids=completion_ids,
        logprobs=logprobs,
        mask=tuple(live != 0 for live in message.mask),
        segments=tuple(zip(versions, lengths, strict=True)),
        advantage=message.advantage,
    )


def manifest_message(signed: SignedManifest) -> common_pb2.SignedDocument:
    """A signed manifest for the wire."""
    return common_pb2.SignedDocument(payload=signed.payload, signature=signed.signature)


def signed_manifest(message: common_pb2.SignedDocument) -> SignedManifest:
    """A signed manifest that came over the wire, not yet opened."""
    return SignedManifest(message.payload, message.signature)


def signed_plan(message: common_pb2.SignedDocument) -> SignedPlan:
    """A signed plan that came over the wire, not yet opened."""
    return SignedPlan(message.payload, message.signature)


def prompt_messages(prompts: Sequence[tuple[TaskKey, tuple[int, ...]]]) -> list[control_pb2.Prompt]:
    """Tasks with token ids for the wire."""
    return [control_pb2.Prompt(task=task_message(key), token_ids=pack_ids(ids)) for key, ids in prompts]


def prompts_of(messages: Sequence[control_pb2.Prompt]) -> list[tuple[TaskKey, tuple[int, ...]]]:
    """Tasks with token ids that came over the wire. Raises `RolloutMalformedError`."""
    return [(task_key(message.task), unpack_ids(message.token_ids)) for message in messages]
