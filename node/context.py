"""What the daemon's parts share: one object that holds the others. No behaviour but small conveniences."""

from dataclasses import dataclass

import msgspec
import psutil

from node.compute.messages import ChildEvent
from node.control import ControlClient
from node.home import Home
from node.joined import Joined, write_joined
from node.presence import Presence
from node.session import Session
from node.settings import NodeSettings
from node.state import NodeState
from node.versions import Versions
from protocol.certificates import Leaf
from protocol.child import ChildProcess
from protocol.errors import UnreachableError
from protocol.ids import PeerId, RunId
from protocol.run import RunSpec
from protocol.tls import ServedLeaf

COMPUTE_START_DEADLINE_S = 90.0
"""The child imports no torch before it says hello, but a busy small machine is slow even so."""


@dataclass(slots=True)
class Node:
    """The parts of one running node. `joined` changes when the leaf is renewed."""

    home: Home
    joined: Joined
    settings: NodeSettings
    served: ServedLeaf
    state: NodeState
    control: ControlClient
    versions: Versions
    presence: Presence
    session: Session

    @property
    def peer_id(self) -> PeerId:
        """The node's name."""
        return self.home.peer_id

    @property
    def run_id(self) -> RunId:
        """The run."""
        return self.joined.run_id

    @property
    def leaf(self) -> Leaf:
        """The TLS leaf in force."""
        return self.served.leaf

    @property
    def spec(self) -> RunSpec:
        """The run's spec. Raises `UnreachableError` before the coordinator has told it."""
        if self.state.spec is None:
            raise UnreachableError("the coordinator has not said yet what the run is")
        return self.state.spec

    def note_bootstraps(self, bootstraps: tuple[str, ...]) -> None:
        """Remembers where the directory is entered; there may have been none yet when the node joined."""
        if bootstraps and bootstraps != self.joined.bootstraps:
            self.joined = msgspec.structs.replace(self.joined, bootstraps=bootstraps)
            write_joined(self.home, self.joined)

    async def start_compute(self) -> ChildProcess:
        """A fresh compute child. Raises `EngineError`."""
        return await ChildProcess.start(
            "node.compute.worker",
            run_dir=self.home.runtime_folder(),
            log_path=self.home.path / "logs" / "compute.log",
            deadline_s=COMPUTE_START_DEADLINE_S,
            env=thread_environment(self.settings.num_threads),
            events=ChildEvent,
        )


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables for a compute child; 0 = one thread a core. Threads wait passively: when other programs want the cores,
    spinning ones cost a multiple of what they gain."""
    number = num_threads or psutil.cpu_count(logical=False) or 1
    return {"OMP_NUM_THREADS": str(number), "OMP_WAIT_POLICY": "PASSIVE"}
