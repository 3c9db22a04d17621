"""A member of the DHT that checks nothing and says whatever the test wants; for the negative controls."""

import asyncio
import sys
from typing import Any

import msgspec

from node.torch_guard import block_broken_extras
from protocol.child_serve import Emit, serve


class Join(msgspec.Struct, frozen=True, tag="join"):
    identity_path: str
    run_dir: str
    bootstrap: str


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Asks every DHT node to store this; `subkey` and `value` are raw, an empty `subkey` is a whole
    dictionary.
    """

    key: str
    subkey: bytes
    value: bytes
    expiration_s: float
    in_cache: bool = False


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """How many nodes took it and how many said no."""

    num_taken: int
    num_refused: int


class Attacker:
    node: Any

    async def handle(self, request: Join | Store, emit: Emit) -> msgspec.Struct:
        match request:
            case Join():
                await self.join(request)
                return Answered(0, 0)
            case Store():
                return await self.store(request)

    async def join(self, request: Join) -> None:
        block_broken_extras()
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P

        P2P._UNIX_SOCKET_PREFIX = f"/unix{request.run_dir}/"
        self.node = await DHTNode.create(
            identity_path=request.identity_path,
            check_if_identity_free=False,
            initial_peers=[request.bootstrap],
            strict=False,
            nat_port_map=False,
            auto_nat=False,
        )

    async def store(self, request: Store) -> Answered:
        from hivemind.dht.routing import DHTID
        from hivemind.proto import dht_pb2

        protocol = self.node.protocol
        message = dht_pb2.StoreRequest(
            keys=[DHTID.generate(source=request.key).to_bytes()],
            subkeys=[request.subkey],
            values=[request.value],
            expiration_time=[request.expiration_s],
            in_cache=[request.in_cache],
            peer=protocol.node_info,
        )
        peers = list(protocol.routing_table.peer_id_to_uid)
        answers = await asyncio.gather(*(protocol.get_stub(peer).rpc_store(message, timeout=5) for peer in peers))
        said = [ok for answer in answers for ok in answer.store_ok]
        return Answered(sum(said), len(said) - sum(said))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[2], Attacker().handle, requests=Join | Store))
