"""What the daemon and its directory child say to each other. Pure."""

import msgspec

from protocol.ids import PeerId, RunId, Version
from protocol.record import OpenedRecord


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Join the DHT of a run; the first request, and only once. Answer: Started.

    `identity_path` holds the node's key as libp2p reads it; `listen` and `announce` are multiaddresses, port
    0 in `listen` means any; `run_dir` (absolute) is a private folder for sockets. `through_nat` switches on
    port mapping and the probing of one's own reachability, `relay` the use of relays. `clock_offset_ms` is
    the coordinator's clock minus this machine's.
    """

    run_id: RunId
    coordinator_key: bytes
    identity_path: str
    run_dir: str
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstraps: tuple[str, ...] = ()
    clock_offset_ms: int = 0
    through_nat: bool = False
    relay: bool = False


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The child's p2pd runs. Other processes of this node attach to it at `p2p_control`, a multiaddress."""

    peer_id: PeerId
    multiaddrs: tuple[str, ...]
    p2p_control: str


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Store this node's signed record until the expiry that it names. Answer: Published."""

    record: bytes


class Published(msgspec.Struct, frozen=True, tag="published"):
    """The record stands at this node and was offered to the others; with no neighbours nobody else has it
    yet.
    """

    num_neighbours: int


class List(msgspec.Struct, frozen=True, tag="list"):
    """All live records of the run, asked from the DHT now; `version` keeps those that hold it. Answer:
    Listed.
    """

    version: Version | None = None


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """Records that held, by peer id."""

    nodes: tuple[OpenedRecord, ...]


class GetStatus(msgspec.Struct, frozen=True, tag="get-status"):
    """Answer: Status."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Where this node can be dialled, how many DHT nodes it knows, and how many entries it has refused so
    far.
    """

    multiaddrs: tuple[str, ...]
    num_neighbours: int
    num_refused: int


class SetBootstraps(msgspec.Struct, frozen=True, tag="set-bootstraps"):
    """Dial these from now on, at once and then again and again. Answer: Done, after the first attempt."""

    bootstraps: tuple[str, ...]


class SetClock(msgspec.Struct, frozen=True, tag="set-clock"):
    """The coordinator's clock minus this machine's is now this. Answer: Done."""

    offset_ms: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


Request = Start | Publish | List | GetStatus | SetBootstraps | SetClock
