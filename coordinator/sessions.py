"""The live streams to nodes, by peer id: what the coordinator says unasked goes through here.

Invariant: a node has one stream at most, and a node that does not read loses its stream instead of holding memory:
each outbox is bounded. Impure: asyncio queues.
"""

import asyncio
from collections.abc import Iterable

from protocol.ids import PeerId
from protocol.v1 import control_pb2

MAX_WAITING = 256


class Outbox:
    """What waits to be written to one node. `closed` is set when the stream must end."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[control_pb2.SessionResponse] = asyncio.Queue(MAX_WAITING)
        self.closed = asyncio.Event()

    def put(self, message: control_pb2.SessionResponse) -> None:
        """Queues a message, or ends the stream of a node that does not read."""
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.closed.set()


class Sessions:
    """All outboxes."""

    def __init__(self) -> None:
        self._outboxes: dict[PeerId, Outbox] = {}

    def open(self, peer_id: PeerId) -> Outbox:
        """The outbox of a new stream; an older stream of the same node ends."""
        if (older := self._outboxes.get(peer_id)) is not None:
            older.closed.set()
        outbox = self._outboxes[peer_id] = Outbox()
        return outbox

    def close(self, peer_id: PeerId, outbox: Outbox) -> bool:
        """Forgets the stream; False if a newer one has taken its place, so that the node is still there."""
        if self._outboxes.get(peer_id) is not outbox:
            return False
        del self._outboxes[peer_id]
        return True

    def send(self, peer_ids: Iterable[PeerId], message: control_pb2.SessionResponse) -> None:
        """Queues a message for each node that has a stream; the others hear it when they come back."""
        for peer_id in peer_ids:
            if (outbox := self._outboxes.get(peer_id)) is not None:
                outbox.put(message)

    def broadcast(self, message: control_pb2.SessionResponse) -> None:
        """Queues a message for every node that has a stream."""
        self.send(list(self._outboxes), message)
