"""A trainer's share on its way: part by part, and as it was when it was asked for."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from coordinator.batches import SLOTS_A_READ, share_messages
from coordinator.core.shares import ShareItem
from protocol.ids import PeerId, RoundId, SlotKey, TaskKey, Version
from protocol.rollout import unpack_ids, unpack_logprobs
from protocol.v1 import common_pb2, control_pb2

NUM_SLOTS = 2 * SLOTS_A_READ + 3


async def test_a_share_comes_whole_and_in_order_though_its_round_ends_meanwhile() -> None:
    task = TaskKey("sums", 7, 0)
    items = [ShareItem(SlotKey(Version(0), task, n), n / 4, ((Version(0), 3),), b"\0\1\1") for n in range(NUM_SLOTS)]
    asked = list[int]()

    class Desk:
        """Stands for authority, core and grader; the round is over after the first question."""

        @property
        def core(self) -> Any:
            return SimpleNamespace(share_of=lambda *_: items if not asked else [])

        async def rollout_bodies(self, slots: Sequence[SlotKey]) -> list[bytes]:
            asked.append(len(slots))
            pieces = [
                common_pb2.Piece(token_ids=b"\5\0\0\0\6\0\0\0", logprobs=bytes(8)),
                common_pb2.Piece(start=2, token_ids=b"\7\0\0\0", logprobs=bytes(4)),
            ]
            return [control_pb2.Rollout(pieces=pieces).SerializeToString()] * len(slots)

        async def prompts(self, tasks: Sequence[TaskKey]) -> tuple[tuple[int, ...], ...]:
            return ((3, 4),) * len(tasks)

    desk = cast(Any, Desk())
    messages = [message async for message in share_messages(desk, desk, RoundId("0.0"), PeerId("t"))]
    samples = [sample for message in messages for sample in message.samples]
    assert [(sample.slot, sample.advantage) for sample in samples] == [(str(i.slot), i.advantage) for i in items]
    assert asked == [SLOTS_A_READ, SLOTS_A_READ, 3]
    sample = samples[-1]
    assert (unpack_ids(sample.prompt_ids), unpack_ids(sample.completion_ids), sample.mask) == (
        (3, 4),
        (5, 6, 7),
        b"\0\1\1",
    )
    assert unpack_logprobs(sample.logprobs) == (0.0, 0.0, 0.0)
