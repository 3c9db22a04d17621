"""One node's calls wait for each other and for nobody else's; too many are refused."""

import asyncio
from typing import Any

import pytest

from coordinator.submissions import MAX_CALLS_WAITING, Submissions
from protocol.errors import NoWorkError
from protocol.ids import PeerId


async def test_a_flood_from_one_node_is_refused_and_holds_up_nobody() -> None:
    nothing: Any = None
    service, done = Submissions(nothing, nothing), asyncio.Event()

    async def call(name: str) -> None:
        async with service.turn_of(PeerId(name)):
            await done.wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for _ in range(MAX_CALLS_WAITING):
            tasks.create_task(call("flood"))
        await asyncio.sleep(0)  # lets each of them in
        with pytest.raises(NoWorkError):
            await call("flood")
        done.set()
        await call("honest")
    await call("flood")  # the next honest request succeeds
