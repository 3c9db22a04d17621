"""The live streams to nodes, by peer id: what the coordinator says unasked goes through here.

Invariant: a node has one stream at most, and a node that does not read loses its stream instead of holding memory:
each outbox is bounded. Impure: asyncio queues.
"""

import asyncio
from collections.abc import Iterable

from protocol.errors import HexcombError, RefusedError, UnreachableError
from protocol.ids import PeerId
from protocol.v1 import control_pb2

MAX_WAITING = 256


class Outbox:
    """What waits to be written to one node. `ended` is done when the stream must end, and says why."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[control_pb2.SessionResponse] = asyncio.Queue(MAX_WAITING)
        self.ended: asyncio.Future[HexcombError] = asyncio.get_running_loop().create_future()

    def put(self, message: control_pb2.SessionResponse) -> None:
        """Queues a message, or ends the stream of a node that does not read."""
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.end(UnreachableError("the session was ended", why="the node does not read what it is told"))

    def end(self, reason: HexcombError) -> None:
        """Ends the stream; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(reason)


class Sessions:
    """All outboxes."""

    def __init__(self) -> None:
        self._outboxes: dict[PeerId, Outbox] = {}

    def open(self, peer_id: PeerId, outbox: Outbox) -> None:
        """From now on the node is spoken to through `outbox`; an older stream of the same node ends."""
        if (older := self._outboxes.get(peer_id)) is not None:
            older.end(RefusedError("the session was ended", why="a newer session of the same node took its place"))
        self._outboxes[peer_id] = outbox

    def close(self, peer_id: PeerId, outbox: Outbox) -> bool:
        """Forgets the stream; False if it is not the node's own (a newer one took its place, or it never opened)."""
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
