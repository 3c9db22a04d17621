"""Many real connections from one process: `python -m tests.bench.connections FOLDER NUM`.

Each is a node of its own, with TLS on both sides and a session that it keeps by heartbeats. Prints `open` when all have
their role, ends with its standard input, and says at last how many sessions broke: `breaks N`.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from coordinator.server import raise_file_limit
from tests.bench.clients import Client, make_client
from tests.bench.served import read_place

AT_ONCE = 25
OPEN_DEADLINE_S = 120.0


async def open_all(clients: list[Client], tasks: asyncio.TaskGroup) -> list["asyncio.Task[None]"]:
    """Sessions of all clients, a few at a time."""
    sessions: list[asyncio.Task[None]] = []
    for first in range(0, len(clients), AT_ONCE):
        some = clients[first : first + AT_ONCE]
        sessions += [tasks.create_task(client.stay()) for client in some]
        async with asyncio.timeout(OPEN_DEADLINE_S):
            await asyncio.gather(*(client.welcomed.wait() for client in some))
    return sessions


async def run(folder: Path, number: int) -> None:
    """Opens, and waits."""
    raise_file_limit()
    place = read_place(folder / "coordinator.json")
    clients = [make_client(place, place.address, index) for index in range(1, number + 1)]
    async with asyncio.TaskGroup() as tasks:
        sessions = await open_all(clients, tasks)
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(f"breaks {sum(client.num_breaks for client in clients)}", flush=True)
        for session in sessions:
            session.cancel()


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1]), int(sys.argv[2])))
