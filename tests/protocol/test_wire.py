"""Messages to dataclasses and back: nothing is lost, and whatever is wrong with a message is the one typed error."""

import dataclasses
import math
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RolloutMalformedError
from protocol.ids import PeerId, SlotKey, TaskKey, Version
from protocol.manifest import SignedManifest
from protocol.rollout import Piece, Rollout, to_float32
from protocol.round import SignedPlan, TrainSample
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import (
    MAX_COMPLETION_BYTES,
    MAX_NAME,
    manifest_message,
    prompt_messages,
    prompts_of,
    rollout_message,
    rollout_of,
    sample_message,
    sample_of,
    signed_manifest,
    signed_plan,
    slot_key,
    slot_message,
    task_key,
    task_message,
)

INT64, INT32 = st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1)
NAME = st.text(max_size=20)
IDS = st.lists(INT32, max_size=8).map(tuple)
FLOATS = st.lists(st.floats(allow_nan=False, width=32), max_size=8).map(tuple)
tasks = st.builds(TaskKey, NAME, INT64, INT64)
slots = st.builds(SlotKey, INT64.map(Version), tasks, INT32)
pieces = st.builds(Piece, NAME.map(PeerId), INT64.map(Version), INT32, IDS, FLOATS, st.binary(max_size=70))
rollouts = st.builds(Rollout, slots, st.lists(pieces, max_size=4).map(tuple), st.sampled_from(["stop", "length"]))


@given(tasks, slots)
def test_tasks_and_slots_come_back(task: TaskKey, slot: SlotKey) -> None:
    assert task_key(task_message(task)) == task
    assert slot_key(slot_message(slot)) == slot


@settings(deadline=None)
@given(rollouts)
def test_rollouts_come_back_over_bytes(rollout: Rollout) -> None:
    data = rollout_message(rollout).SerializeToString()
    assert rollout_of(control_pb2.Rollout.FromString(data)) == rollout


@st.composite
def samples(draw: st.DrawFn) -> TrainSample:
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    size = sum(lengths)
    numbers = draw(st.lists(st.floats(-9, 0, width=32), min_size=size, max_size=size))
    return TrainSample(
        slot=draw(NAME),
        prompt_ids=draw(IDS),
        completion_ids=tuple(draw(st.lists(INT32, min_size=size, max_size=size))),
        logprobs=to_float32(tuple(numbers)),
        mask=tuple(draw(st.lists(st.booleans(), min_size=size, max_size=size))),
        segments=tuple((Version(draw(INT64)), length) for length in lengths),
        advantage=draw(st.floats(allow_nan=False)),
    )


@settings(deadline=None)
@given(samples())
def test_samples_come_back_over_bytes(sample: TrainSample) -> None:
    data = sample_message(sample).SerializeToString()
    assert sample_of(control_pb2.TrainSample.FromString(data)) == sample


@given(st.binary(max_size=50), st.binary(max_size=70))
def test_documents_come_back_unopened(payload: bytes, signature: bytes) -> None:
    assert signed_manifest(manifest_message(SignedManifest(payload, signature))) == SignedManifest(payload, signature)
    document = common_pb2.SignedDocument(payload=payload, signature=signature)
    assert signed_plan(document) == SignedPlan(payload, signature)


@given(st.lists(st.tuples(tasks, IDS), max_size=5))
def test_prompts_come_back(prompts: list[tuple[TaskKey, tuple[int, ...]]]) -> None:
    assert prompts_of(prompt_messages(prompts)) == prompts


def good_rollout() -> control_pb2.Rollout:
    piece = Piece(PeerId("fox"), Version(1), 0, (7, 1), to_float32((-0.5, -0.25)), b"s" * 64)
    return rollout_message(Rollout(SlotKey(Version(1), TaskKey("sums", 7, 0), 0), (piece,), "stop"))


@pytest.mark.parametrize("reason", ["", "abort", "STOP", "stop\0", "length "])
def test_an_unknown_finish_reason_is_refused(reason: str) -> None:
    message = good_rollout()
    message.finish_reason = reason
    with pytest.raises(RolloutMalformedError, match="finish reason"):
        rollout_of(message)


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_bytes_that_are_no_whole_numbers_are_refused(field: str) -> None:
    for num_bytes in (1, 2, 3, 5):
        message = good_rollout()
        setattr(message.pieces[0], field, bytes(num_bytes))
        with pytest.raises(RolloutMalformedError, match="whole"):
            rollout_of(message)


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_a_completion_longer_than_any_is_refused_before_it_becomes_numbers(field: str) -> None:
    message = good_rollout()
    message.pieces.add(**{field: bytes(MAX_COMPLETION_BYTES)})
    with pytest.raises(RolloutMalformedError, match="longer than any run allows"):
        rollout_of(message)


def test_a_name_that_no_environment_has_is_refused() -> None:
    assert task_key(common_pb2.Task(environment="x" * MAX_NAME)).environment == "x" * MAX_NAME
    with pytest.raises(RolloutMalformedError, match="name"):
        task_key(common_pb2.Task(environment="x" * (MAX_NAME + 1)))


GOOD_SAMPLE = TrainSample(
    "s", (5,), (7, 8, 1), (-0.5,) * 3, (True, False, True), ((Version(1), 2), (Version(2), 1)), 0.5
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_ids", bytes(8)),
        ("completion_ids", bytes(11)),
        ("logprobs", bytes(16)),
        ("logprobs", bytes(11)),
        ("prompt_ids", bytes(3)),
        ("mask", bytes(2)),
        ("segment_lengths", [2]),
        ("segment_lengths", [3]),
        ("segment_lengths", [4, -1]),
        ("segment_lengths", [3, 0]),
        ("segment_versions", [1]),
        ("segment_versions", [1, 2, 3]),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_refused(field: str, value: Any) -> None:
    message = sample_message(GOOD_SAMPLE)
    message.ClearField(field)  # type: ignore[arg-type]
    message.MergeFrom(control_pb2.TrainSample(**{field: value}))
    with pytest.raises(RolloutMalformedError):
        sample_of(message)


def read(data: bytes) -> Rollout | None:
    """The rollout in the bytes, None where protobuf or we refuse; nothing else may come out."""
    try:
        return rollout_of(control_pb2.Rollout.FromString(data))
    except (DecodeError, RolloutMalformedError):
        return None


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_bytes_are_a_rollout_or_a_typed_error(data: st.DataObject) -> None:
    good = bytearray(good_rollout().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(good)))
        good[position : position + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=5))
    rollout = read(bytes(good))
    if rollout is not None and not any(math.isnan(value) for value in rollout.logprobs):
        again = rollout_message(rollout)
        assert rollout_of(again) == rollout


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_rollout_or_a_typed_error(data: bytes) -> None:
    rollout = read(data)
    assert rollout is None or rollout.finish_reason in ("stop", "length")


def test_numbers_of_the_wire_fit_what_is_signed() -> None:
    edge = dataclasses.replace(
        rollout_of(good_rollout()),
        slot=SlotKey(Version(-(2**63)), TaskKey("\U0001f98a" * MAX_NAME, 2**63 - 1, -(2**63)), -(2**31)),
    )
    piece = Piece(PeerId("1" * 64), Version(2**63 - 1), 2**31 - 1, (2**31 - 1,), (0.0,))
    assert len(piece.message(rollout_of(rollout_message(edge)).slot)) < 1024
