"""Who is calling: the enrolled node at the other end of a mutual TLS call. Impure: reads the call's connection.

A leaf is checked in full when it is first seen, and again after `RECHECK_MS`, since a connection outlives it; in
between its bytes are enough, for a check takes as long as many a call.
"""

from collections import OrderedDict
from typing import Any

import grpc

from coordinator.authority import Authority
from coordinator.join_service import counted
from protocol.errors import NotEnrolledError
from protocol.ids import PeerId
from protocol.tls import caller_of

RECHECK_MS = 10_000
MAX_KNOWN = 16_384

Context = grpc.aio.ServicerContext[Any, Any]


class Callers:
    """Names callers."""

    def __init__(self, authority: Authority, *, coordinator_key: bytes) -> None:
        self._authority, self._coordinator_key = authority, coordinator_key
        self._known: OrderedDict[tuple[bytes, ...], tuple[PeerId, int]] = OrderedDict()

    def name(self, context: Context, *, now_ms: int) -> PeerId:
        """The caller. Raises `UnauthenticatedError` or `NotEnrolledError`."""
        with counted(self._authority):
            shown = tuple(context.auth_context().get("x509_pem_cert", ()))
            peer_id, checked_ms = self._known.get(shown, (None, 0))
            if peer_id is None or not 0 <= now_ms - checked_ms < RECHECK_MS:
                peer_id = caller_of(context, coordinator_key=self._coordinator_key, now_ms=now_ms)
                self._known[shown] = (peer_id, now_ms)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            if peer_id not in self._authority.core.state.nodes:
                raise NotEnrolledError("the call was refused", why=f"{peer_id} has no place in this run")
        return peer_id
