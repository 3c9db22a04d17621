"""The daemon's side of the directory: what it says is hints from strangers, checked for origin only. Impure.

Everything heavy is in the child. A child that died is not started again here; `wait_closed` tells the daemon,
which starts a new `Directory`. The daemon publishes again well before the record expires.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from protocol.child import ChildProcess
from protocol.directory import messages
from protocol.errors import EngineError
from protocol.ids import PeerId, Version
from protocol.record import OpenedRecord

HELLO_DEADLINE_S = 30.0
START_DEADLINE_S = 90.0
"""Importing the DHT's libraries takes seconds, on a busy small machine tens of them."""
ANSWER_DEADLINE_S = 15.0
"""One hung peer costs a search 3 s, until it is known to be hung."""


class Directory:
    """This node's place in the run's DHT, in a child process."""

    def __init__(self, child: ChildProcess, started: messages.Started) -> None:
        self._child = child
        self.peer_id: PeerId = started.peer_id
        self.multiaddrs: tuple[str, ...] = started.multiaddrs
        self.p2p_control: str = started.p2p_control

    @classmethod
    async def start(cls, start: messages.Start, *, log_path: Path, deadline_s: float = START_DEADLINE_S) -> Self:
        """Starts the child in `start.run_dir` and joins; no bootstrap need be there, they are dialled again.

        Raises UsageError for a bootstrap that is no address, IdentityError, PortInUseError,
        MachineUnfitError, and EngineError when the child dies.
        """
        _clear_sockets(Path(start.run_dir))
        child = await ChildProcess.start(
            "node.directory.worker",
            run_dir=Path(start.run_dir),
            log_path=log_path,
            deadline_s=HELLO_DEADLINE_S,
            env={"OMP_NUM_THREADS": "1"},
        )
        try:
            started = await child.request(start, messages.Started, deadline_s=deadline_s)
        except BaseException:
            await child.terminate(deadline_s=0)
            raise
        return cls(child, started)

    async def publish(self, record: bytes, *, deadline_s: float = ANSWER_DEADLINE_S) -> int:
        """Offers this node's signed record until its expiry; returns how many DHT nodes this one knows.

        A later record replaces an earlier one only if it expires later. Raises RecordRefusedError for a
        record that no reader would take.
        """
        published = await self._child.request(messages.Publish(record), messages.Published, deadline_s=deadline_s)
        return published.num_neighbours

    async def list_records(self, *, deadline_s: float = ANSWER_DEADLINE_S) -> Sequence[OpenedRecord]:
        """All live records of the run, by peer id; a dead node's stays until it expires."""
        listed = await self._child.request(messages.List(), messages.Listed, deadline_s=deadline_s)
        return listed.nodes

    async def find_holders(self, version: Version, *, deadline_s: float = ANSWER_DEADLINE_S) -> Sequence[OpenedRecord]:
        """The records of those nodes that say they serve `version`, this one's own included."""
        listed = await self._child.request(messages.List(version), messages.Listed, deadline_s=deadline_s)
        return listed.nodes

    async def status(self, *, deadline_s: float = ANSWER_DEADLINE_S) -> messages.Status:
        """Addresses now (they change as interfaces and relays do), neighbours, refused entries."""
        status = await self._child.request(messages.GetStatus(), messages.Status, deadline_s=deadline_s)
        self.multiaddrs = status.multiaddrs
        return status

    async def set_bootstraps(self, bootstraps: Sequence[str], *, deadline_s: float = 2 * ANSWER_DEADLINE_S) -> None:
        """Dials these now and again every half minute, instead of those before. Raises UsageError."""
        await self._child.request(messages.SetBootstraps(tuple(bootstraps)), messages.Done, deadline_s=deadline_s)

    async def set_clock_offset(self, offset_ms: int, *, deadline_s: float = ANSWER_DEADLINE_S) -> None:
        """The coordinator's clock minus this machine's, as last measured."""
        await self._child.request(messages.SetClock(offset_ms), messages.Done, deadline_s=deadline_s)

    async def wait_closed(self) -> EngineError:
        """Waits for the child's end; returns the reason."""
        return await self._child.wait_closed()

    async def terminate(self, *, deadline_s: float = 5.0) -> None:
        """Leaves the DHT and ends the child with its p2pd."""
        await self._child.terminate(deadline_s=deadline_s)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid


def _clear_sockets(run_dir: Path) -> None:
    """Removes those of an earlier child that was killed; its network daemon went with it."""
    for path in run_dir.glob("p2pd-*.sock"):
        path.unlink(missing_ok=True)
