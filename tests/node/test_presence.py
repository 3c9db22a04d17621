"""What a node tells the directory: also by bootstraps that were named while its child started."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.presence import Presence
from node.settings import NodeSettings, RoleWish
from node.state import NodeState

DEADLINE_S = 10.0


@pytest.mark.parametrize(("role", "said"), [("auto", []), ("trainer", ["trainer"]), ("rollout", ["rollout"])])
def test_the_hello_says_what_the_owner_allows(role: RoleWish, said: list[str]) -> None:
    presence = cast(Any, Presence.__new__(Presence))
    presence._settings, presence._state = NodeSettings(role=role), NodeState()
    presence._directory, presence._boot_id = None, "boot"
    assert list(presence.hello().allowed_roles) == said


@pytest.mark.parametrize(("started_with", "is_dialled"), [((), True), (("there",), False)])
async def test_bootstraps_named_while_the_child_started_are_dialled(
    started_with: tuple[str, ...], is_dialled: bool
) -> None:
    dialled, looked = list[tuple[str, ...]](), asyncio.Event()

    async def set_bootstraps(wanted: tuple[str, ...]) -> None:
        dialled.append(wanted)

    async def tell_clock(*_: object) -> int:
        looked.set()
        await asyncio.Event().wait()
        return 0

    presence = cast(Any, Presence.__new__(Presence))
    presence._joined = lambda: SimpleNamespace(bootstraps=("there",))
    presence._state = SimpleNamespace(ticks=0)
    presence._tell_clock = tell_clock
    publishing = asyncio.create_task(
        presence._publish(SimpleNamespace(set_bootstraps=set_bootstraps), dialled=started_with)
    )
    async with asyncio.timeout(DEADLINE_S):
        await looked.wait()
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    assert dialled == ([("there",)] if is_dialled else [])
