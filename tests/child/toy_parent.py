"""A daemon for the tests: starts a child and a grandchild, prints their ids, waits to be killed."""

import asyncio
import sys
from pathlib import Path

from protocol.child import ChildProcess
from tests.child.toy_child import Count, Hang, Noticed, Spawn


async def main() -> None:
    folder = Path(sys.argv[1])
    child = await ChildProcess.start(
        "tests.child.toy_child",
        run_dir=folder / "run",
        log_path=folder / "log",
        deadline_s=20,
        events=Noticed,
    )
    grandchild = await child.request(Spawn(), Count, deadline_s=10)
    if sys.argv[2] == "busy":
        task = asyncio.create_task(child.request(Hang(spin=True), Count, deadline_s=60))
        await child.next_event()
        task.add_done_callback(lambda _: None)
    print(child.pid, grandchild.value, flush=True)
    await child.wait_closed()


asyncio.run(main())
