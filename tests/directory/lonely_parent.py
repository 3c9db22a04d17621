"""A daemon for the tests: starts a directory, publishes a short-lived record, waits to be killed."""

import asyncio
import sys
from pathlib import Path

import msgspec

from protocol.directory.client import Directory
from protocol.directory.messages import Start
from protocol.keys import Identity
from tests.directory.swarm import signed

LIFETIME_MS = 4_000


async def main() -> None:
    start = msgspec.json.decode(sys.argv[1], type=Start)
    directory = await Directory.start(start, log_path=Path(start.identity_path).with_name("lonely.log"))
    raw, record = signed(Identity.from_seed(bytes.fromhex(sys.argv[2])), lifetime_ms=LIFETIME_MS)
    await directory.publish(raw)
    print(directory.pid, record.expires_ms, flush=True)
    await directory.wait_closed()


asyncio.run(main())
