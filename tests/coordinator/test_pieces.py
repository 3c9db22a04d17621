"""Pieces of slots under way: what is taken, what is refused, what outlives a restart, and that all of it is bounded."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import pieces as pieces_module
from coordinator import received as received_module
from coordinator.core.state import Slot
from coordinator.piece_file import PieceFile
from coordinator.received import checked_prefix, pieces_in
from protocol.errors import RolloutMalformedError
from protocol.ids import LeaseId, SlotKey, Version
from protocol.keys import Identity
from protocol.rollout import edges_of, pack_ids, pack_logprobs
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import piece_message, slot_message
from tests.coordinator.desk import FOX, OWL, SLOT, SPEC, TASK, THREE, A, B, Desk, piece, prefix_of, progress_of


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "pieces.log")
    yield made
    made.store.close()


# What is taken


async def test_the_core_hears_how_far_slots_have_come_once(desk: Desk) -> None:
    desk.say(THREE[0])
    desk.say(*THREE[1:])
    await desk.store.tick()
    (event,) = desk.told
    (said,) = event.progress
    assert (said.peer_id, said.lease_id, said.slot) == (FOX.peer_id, A, SLOT)
    assert said.segments == ((2, 2), (3, 4))
    assert said.edge == edges_of(SLOT, THREE)[-1]
    desk.say(*THREE)
    await desk.store.tick()
    assert len(desk.told) == 1


async def test_the_core_hears_in_parts_that_do_not_hold_it_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MAX_TOLD", 3)
    desk.state.groups[0].slots = [Slot("leased", A) for _ in range(7)]
    for sample in range(7):
        slot = replace(SLOT, sample=sample)
        desk.say(piece(0, 5, slot=slot), slot=slot)
    await desk.store.tick()
    assert [len(event.progress) for event in desk.told] == [3, 3, 1]


def test_what_is_here_already_is_passed_over_and_a_hole_is_answered(desk: Desk) -> None:
    first, second, third = THREE
    assert desk.say(second).gaps == [(slot_message(SLOT), 0)]
    assert desk.starts == []
    assert desk.say(first).gaps == []
    assert desk.say(first, second).gaps == []
    assert desk.starts == [0, 2]
    assert desk.say(first, second).gaps == []
    assert desk.say(piece(6, 11, version=3)).gaps == [(slot_message(SLOT), 5)]
    assert desk.say(piece(4, 9, 10, version=3)).gaps == [(slot_message(SLOT), 5)]  # cut elsewhere
    assert desk.starts == [0, 2]
    assert desk.say(third, piece(7, 12, version=3)).gaps == [(slot_message(SLOT), 6)]
    assert desk.starts == [0, 2, 5]
    assert not desk.refusals


def with_fields(**fields: Any) -> Callable[[common_pb2.Piece], None]:
    def change(message: common_pb2.Piece) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def logprobs_of(*values: float) -> Callable[[common_pb2.Piece], None]:
    return with_fields(token_ids=pack_ids((5,) * len(values)), logprobs=pack_logprobs(values))


BAD: dict[str, Callable[[common_pb2.Piece], None]] = {
    "no tokens": with_fields(token_ids=b"", logprobs=b""),
    "33 tokens": logprobs_of(*[-1.0] * 33),
    "odd bytes": with_fields(token_ids=b"\0" * 7, logprobs=b"\0" * 7),
    "fewer log-probabilities": with_fields(logprobs=pack_logprobs((-1.0,))),
    "token V": with_fields(token_ids=pack_ids((5, 1000, 5))),
    "token -1": with_fields(token_ids=pack_ids((5, -1, 5))),
    "positive": logprobs_of(-1.0, 0.5),
    "just positive": logprobs_of(-1.0, 0.0011),
    "NaN": logprobs_of(-1.0, float("nan")),
    "NaN with its sign set": with_fields(logprobs=struct.pack("<3I", 0xBF800000, 0xFFC00000, 0xBF800000)),
    "infinity": logprobs_of(float("inf"), -1.0),
    "minus infinity": logprobs_of(-1.0, float("-inf")),
    "both infinities": logprobs_of(float("inf"), float("-inf")),
    "another node's": with_fields(node=OWL.peer_id),
    "a version before the last": with_fields(version=1),
    "a version that does not exist": with_fields(version=4),
    "a short signature": with_fields(signature=b"s" * 63),
    "no signature": with_fields(signature=b""),
    "tokens after a stop id": with_fields(token_ids=pack_ids((5, 1, 5))),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_piece_is_refused_and_touches_nothing_else(desk: Desk, name: str) -> None:
    desk.say(THREE[0])
    desk.state.groups[0].slots[1] = Slot("leased", A)
    good, bad = piece_message(THREE[1]), common_pb2.Piece()
    bad.CopyFrom(piece_message(THREE[2]))
    bad.token_ids, bad.logprobs = pack_ids((5, 5, 5)), pack_logprobs((-1.0, -1.0, -1.0))
    BAD[name](bad)
    neighbour = replace(SLOT, sample=1)
    answer = desk.store.receive(
        FOX.peer_id,
        [
            control_pb2.SlotProgress(lease_id=A, slot=slot_message(SLOT), pieces=[good, bad]),
            progress_of(piece(0, 5, slot=neighbour), slot=neighbour),
        ],
    )
    assert desk.refusals == {RolloutMalformedError.code: 1}
    assert (answer.unwanted, answer.gaps) == ([], [])
    assert desk.starts == [0]
    assert len(desk.store.frames(neighbour)) == 1
    assert desk.say(*THREE[1:]).gaps == []
    assert desk.starts == [0, 2, 5]


@pytest.mark.parametrize("value", [0.0, -0.0, 0.000999, 0.0005, -1e-30, 1e-30, -3e38, -1e4])
def test_every_log_probability_that_can_be_is_taken(desk: Desk, value: float) -> None:
    message = piece_message(THREE[0])
    logprobs_of(value, -1.0)(message)
    desk.store.receive(FOX.peer_id, [control_pb2.SlotProgress(lease_id=A, slot=slot_message(SLOT), pieces=[message])])
    assert not desk.refusals
    assert desk.starts == [0]


def test_a_flood_fills_no_memory(desk: Desk) -> None:
    start = 0
    while start < 90:
        desk.say(piece(start, *[5] * 30))
        start += 30
    num_bytes = desk.store.num_bytes
    for _ in range(50):
        desk.say(piece(start, *[5] * 30))
    assert desk.refusals == {RolloutMalformedError.code: 50}
    assert desk.store.num_bytes == num_bytes
    message = progress_of(piece(90, 5))
    message.MergeFromString(b"\xfa\x7f\x80\x80\x01" + bytes(16_384))  # a field that nobody knows
    desk.store.receive(FOX.peer_id, [message])
    assert desk.refusals == {RolloutMalformedError.code: 51}
    assert desk.store.num_bytes == num_bytes
    desk.say(piece(90, 5))
    assert desk.starts == [0, 30, 60, 90]
    strangers = [replace(SLOT, task=replace(TASK, index=index)) for index in range(1, 101)]
    for slot in strangers:
        assert desk.say(piece(0, 5, slot=slot), slot=slot).unwanted == [slot_message(slot)]
    assert desk.store.num_slots == 1


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_nothing_follows_a_stop_id(desk: Desk, is_restarted: bool) -> None:
    for stopped in ((piece(0, 5, 1), piece(2, 7)), (piece(0, 5), piece(1, 1), piece(2, 7))):
        desk.say(*stopped)
    assert (desk.refusals, desk.starts) == ({RolloutMalformedError.code: 2}, [])
    desk.say(piece(0, 5, 1))
    if is_restarted:
        await desk.store.tick()
        desk.store.close()
        desk.store = desk.open()
    desk.say(piece(2, 7))
    assert (desk.refusals, desk.starts) == ({RolloutMalformedError.code: 3}, [0])


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_of_one_slot_so_many_pieces_are_taken(
    desk: Desk, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after them is neither a fault nor a gap: it would be handed in again for ever."""
    monkeypatch.setattr(received_module, "MAX_PIECES", 5)
    tiny = [piece(start, 5) for start in range(10)]
    desk.say(*tiny[:3])
    if is_restarted:
        await desk.store.tick()
        desk.store.close()
        desk.store = desk.open()
    for pieces in (tiny[3:7], tiny[7:], tiny):
        answer = desk.say(*pieces)
        assert (answer.gaps, answer.unwanted, desk.starts) == ([], [], [0, 1, 2, 3, 4])
    assert not desk.refusals


# Who may add


def test_only_the_holder_under_the_open_lease_adds(desk: Desk) -> None:
    cases: dict[str, tuple[LeaseId, Identity, SlotKey]] = {
        "another lease": (B, FOX, SLOT),
        "another node": (A, OWL, SLOT),
        "a slot that waits": (A, FOX, replace(SLOT, sample=1)),
        "no such sample": (A, FOX, replace(SLOT, sample=2)),
        "a sample from the end": (A, FOX, replace(SLOT, sample=-2)),
        "another version": (A, FOX, replace(SLOT, version=Version(2))),
        "another seed": (A, FOX, replace(SLOT, task=replace(TASK, seed=8))),
        "another environment": (A, FOX, replace(SLOT, task=replace(TASK, environment="x" * 1000))),
        "another task": (A, FOX, replace(SLOT, task=replace(TASK, index=-1))),
    }
    for name, (lease, who, slot) in cases.items():
        answer = desk.say(piece(0, 5, who=who, slot=slot), lease=lease, who=who, slot=slot)
        assert answer.unwanted == [slot_message(slot)], name
        assert desk.store.num_bytes == 0, name
    assert desk.say(THREE[0]).unwanted == []
    desk.state.groups[0].slots[0].status = "accepted"
    assert desk.say(THREE[1]).unwanted == [slot_message(SLOT)]
    desk.state.groups[0].slots[0].status = "leased"
    desk.state.leases.clear()
    assert desk.say(THREE[1]).unwanted == [slot_message(SLOT)]


def test_under_a_new_lease_a_slot_begins_where_the_core_says(desk: Desk) -> None:
    desk.say(*THREE)
    desk.move(prefix=prefix_of(*THREE[:2]))
    theirs = piece(5, 20, version=3, who=OWL)
    assert desk.say(theirs, lease=B, who=OWL).gaps == []
    assert [each.token_ids for each in pieces_in(desk.store.frames(SLOT))] == [
        pack_ids(each.token_ids) for each in (*THREE[:2], theirs)
    ]
    desk.move(to=FOX, lease=A, prefix=None)
    assert desk.say(THREE[1]).gaps == [(slot_message(SLOT), 0)]
    assert desk.starts == []


def test_where_the_first_part_is_lost_the_rest_is_not_taken(desk: Desk) -> None:
    desk.say(*THREE)
    desk.move(prefix=prefix_of(THREE[0], piece(2, 99, version=3)))
    answer = desk.say(piece(3, 20, version=3, who=OWL), piece(0, 5, who=OWL), lease=B, who=OWL)
    assert (answer.unwanted, answer.gaps) == ([], [])
    assert desk.starts == []
    assert not desk.refusals


# What is kept


async def test_what_the_core_was_told_of_is_read_back(desk: Desk) -> None:
    desk.say(THREE[0])
    await desk.store.tick()
    desk.say(*THREE[1:])
    await desk.store.tick()
    before = desk.store.frames(SLOT)
    desk.store.close()
    desk.store = desk.open()
    assert desk.store.frames(SLOT) == before
    desk.told.clear()
    await desk.store.tick()
    assert desk.told[0].progress[0].edge == edges_of(SLOT, THREE)[-1]
    assert desk.say(piece(6, 11, version=3)).gaps == []


async def test_a_slot_that_moved_is_read_back_as_it_goes_on(desk: Desk) -> None:
    desk.say(*THREE)
    await desk.store.tick()
    prefix = prefix_of(*THREE[:2])
    desk.move(prefix=prefix)
    theirs = piece(5, 20, version=3, who=OWL)
    desk.say(theirs, lease=B, who=OWL)
    await desk.store.tick()
    desk.store.close()
    desk.store, desk.told = desk.open(), []
    assert checked_prefix(desk.store.frames(SLOT), SLOT, prefix_of(*THREE[:2], theirs), spec=SPEC)
    await desk.store.tick()
    said = desk.told[0].progress[0]
    assert (said.peer_id, said.lease_id, said.edge) == (OWL.peer_id, B, edges_of(SLOT, (*THREE[:2], theirs))[-1])


def test_what_does_not_follow_in_the_file_is_passed_over(desk: Desk) -> None:
    desk.store.close()
    file = PieceFile(desk.path)
    other = piece(6, 30, version=3)
    frames = [progress_of(THREE[0]), progress_of(THREE[2]), progress_of(THREE[1], lease=B), progress_of(THREE[1])]
    file.append(frame.SerializeToString() for frame in (*frames, progress_of(other), control_pb2.SlotProgress()))
    file.append([b"\xff\xff", progress_of(THREE[2]).SerializeToString()])
    file.close()
    desk.store = desk.open()
    assert desk.starts == [0, 2, 5]
    assert desk.say(other).gaps == []


async def test_slots_that_no_longer_run_are_forgotten(desk: Desk) -> None:
    other = replace(SLOT, sample=1)
    desk.state.groups[0].slots[1] = Slot("leased", A)
    desk.say(*THREE)
    desk.say(piece(0, 5, slot=other), slot=other)
    await desk.store.tick()
    desk.state.groups[0].slots[0] = Slot("accepted", A, FOX.peer_id)
    desk.state.groups[0].slots[1] = Slot("waiting", prefix=prefix_of(piece(0, 5, slot=other)))
    for _ in range(2 * pieces_module.SWEEP_TICKS):
        desk.store._sweep()
    assert (desk.store.frames(SLOT), desk.store.num_slots) == ((), 1)
    assert desk.store.num_bytes == sum(map(len, desk.store.frames(other))) > 0
    desk.store.close()
    desk.store = desk.open()
    assert (desk.store.num_slots, len(desk.store.frames(other))) == (1, 1)


async def test_the_file_is_written_anew_when_most_of_it_is_dead(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MIN_FILE_BYTES", 4096)
    for _ in range(40):
        desk.state.groups[0].slots[0] = Slot("leased", A)
        desk.say(*THREE)
        await desk.store._write()
        desk.store._forget((0, 0))
        assert desk.store.num_file_bytes < 2 * 4096
    desk.say(*THREE)
    for _ in range(40):
        await desk.store._write()
    assert desk.path.stat().st_size == desk.store.num_file_bytes
    assert [path.name for path in desk.path.parent.iterdir()] == [desk.path.name]
    before = desk.store.frames(SLOT)
    desk.store.close()
    desk.store = desk.open()
    assert desk.store.frames(SLOT) == before != ()


async def test_a_disk_that_fails_costs_what_it_would_have_kept(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, frames: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PieceFile, "append", fail)
        desk.say(THREE[0])
        await desk.store._write()
    desk.say(*THREE[1:])
    assert desk.starts == [0, 2, 5]
    assert desk.store.num_file_bytes == 0
    for _ in range(pieces_module.RETRY_TICKS + 1):
        await desk.store._write()
    desk.store.close()
    desk.store = desk.open()
    assert desk.starts == [0, 2, 5]


async def test_what_waits_for_a_slow_disk_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MAX_WAITING_BYTES", 300)
    desk.say(*THREE)
    assert desk.store._waiting == []
    await desk.store._write()
    desk.store.close()
    desk.store = desk.open()
    assert desk.starts == [0, 2, 5]
