"""Renewal of the TLS leaf and of the stamp of membership at half of their life. Impure: the coordinator,
files.

Invariant: a leaf is put in force only after the coordinator's signature and this node's name in it were
checked.
"""

import asyncio

import msgspec
import structlog

from node.context import Node
from node.joined import write_joined, write_leaf
from protocol.certificates import Leaf, certificate_request, new_leaf_key, renew_leaf_at_ms, verify_leaf
from protocol.errors import HexcombError, RefusedError, UnauthenticatedError
from protocol.membership import open_membership

RETRY_S = 60.0
LONGEST_SLEEP_S = 600.0
"""A clock that jumps, or a machine that sleeps, is noticed after this long."""

log = structlog.get_logger("renewal")


class Renewal:
    """Keeps one node's leaf fresh."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due_ms = renew_leaf_at_ms(self._node.leaf.certificate_pem)
            wait_s = (due_ms - self._node.state.now_ms()) / 1000
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, LONGEST_SLEEP_S))
                continue
            try:
                await self.renew()
            except HexcombError as error:
                log.warning("TLS leaf not renewed", why=error.sentence(), next_in_s=RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Asks for a fresh leaf and stamp, and puts both in force. Raises what the coordinator answers."""
        node, key_pem = self._node, new_leaf_key()
        request = certificate_request(key_pem, peer_id=node.peer_id)
        certificate_pem, stamp = await node.control.renew_leaf(request)
        key, now_ms = node.joined.coordinator_key, node.state.now_ms()
        if verify_leaf(certificate_pem, coordinator_key=key, now_ms=now_ms) != node.peer_id:
            raise RefusedError("the coordinator's answer was refused", why="its TLS leaf is for another node")
        open_membership(stamp, coordinator_key=key, run_id=node.run_id, now_ms=now_ms, peer_id=node.peer_id)
        leaf = Leaf(certificate_pem, key_pem)
        write_leaf(node.home, leaf)
        node.joined = msgspec.structs.replace(node.joined, stamp=stamp)
        write_joined(node.home, node.joined)
        node.served.replace(leaf)
        await node.control.use_leaf(leaf)
        node.session.introduce_again()
        node.state.changed()
        log.info("TLS leaf renewed")


def is_expired(leaf: Leaf, *, coordinator_key: bytes, now_ms: int) -> bool:
    """Whether a leaf cannot be used any more: its time is over, or it is another coordinator's."""
    try:
        verify_leaf(leaf.certificate_pem, coordinator_key=coordinator_key, now_ms=now_ms)
    except UnauthenticatedError:
        return True
    return False
