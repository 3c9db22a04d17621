"""A process with DHT nodes whose insides the test can reach: honest pairs, with and without hardening, and a
liar.

In a pair the holder has published its record, and the reader has nothing stored and knows the liar alone:
what it finds, it finds through the liar's answer.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from node.torch_guard import block_broken_extras
from protocol.child_serve import Emit, serve
from protocol.directory.layout import bucket_key, bucket_of, expiration_s
from protocol.keys import Identity
from tests.directory.swarm import RUN_ID, signed, start_of

READ_DEADLINE_S = 4.0


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    folder: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Tells a lie about the bucket of the pair's holder, then lets the pair's reader read."""

    lie: str
    hardened: bool


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Stores a record and then an older one, and looks when the older has run out."""

    hardened: bool


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """Of whom a record was found: the holder, the bystander whom only the liar knows; or that nothing ended."""

    holder: bool
    bystander: bool
    hung: bool = False


class Pair:
    def __init__(self, holder: Any, reader: Any, identity: Identity) -> None:
        self.holder, self.reader, self.identity = holder, reader, identity
        self.bucket = bucket_of(identity.peer_id)
        self.key = bucket_key(RUN_ID, self.bucket)
        crowd = (Identity.from_seed(n.to_bytes(32, "big")) for n in range(1000, 2000))
        self.bystander = next(other for other in crowd if bucket_of(other.peer_id) == self.bucket)


class Probe:
    def __init__(self) -> None:
        self.pairs: dict[bool, Pair] = {}
        self.liar: Any = None

    async def handle(self, request: Prepare | Read | Replay, emit: Emit) -> msgspec.Struct:
        match request:
            case Prepare(folder):
                await self.prepare(Path(folder))
                return Seen(False, False)
            case Read(lie, hardened):
                return await self.read(self.pairs[hardened], lie)
            case Replay(hardened):
                return self.replay(hardened=hardened)

    async def prepare(self, folder: Path) -> None:
        block_broken_extras()
        from hivemind.dht.node import DHTNode

        from node.directory import kademlia

        harden = kademlia._harden
        for hardened in (True, False):
            kademlia._harden = harden if hardened else lambda *_: None
            identities = [Identity.from_seed(bytes([name, hardened]) * 16) for name in b"hr"]
            nodes = [
                await kademlia.Kademlia.start(start_of(one, folder / one.peer_id[-4:]), kademlia.Clock(0))
                for one in identities
            ]
            self.pairs[hardened] = Pair(*nodes, identities[0])
        self.liar = await DHTNode.create(nat_port_map=False, auto_nat=False)
        where = tuple(str(maddr) for maddr in await self.liar.get_visible_maddrs())
        for pair in self.pairs.values():
            await asyncio.gather(pair.holder.dial(where), pair.reader.dial(where))

    async def read(self, pair: Pair, lie: str) -> Seen:
        from hivemind.dht.routing import DHTID

        key_id = DHTID.generate(source=pair.key)
        holder, reader = pair.holder._node, pair.reader._node
        for node in (holder, reader, self.liar):
            node.protocol.storage.clear()
            node.protocol.cache.clear()
            node.blacklist.clear()
        raw, record = signed(pair.identity)
        until_s = expiration_s(record.expires_ms)
        dumps = holder.protocol.serializer.dumps
        holder.protocol.storage.store_subkey(key_id, pair.identity.peer_id, dumps(raw), until_s)
        await self.tell(lie, pair, key_id)
        for node_id in list(reader.protocol.routing_table.uid_to_peer_id):
            if node_id != self.liar.node_id:
                del reader.protocol.routing_table[node_id]
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                found = {opened.record.peer_id for opened in await pair.reader.list_records()}
        except TimeoutError:
            return Seen(False, False, hung=True)
        return Seen(pair.identity.peer_id in found, pair.bystander.peer_id in found)

    async def tell(self, lie: str, pair: Pair, key_id: Any) -> None:
        from hivemind.dht.storage import DictionaryDHTValue

        raw, record = signed(pair.bystander, lifetime_ms=250_000)
        until_s, packed = expiration_s(record.expires_ms), msgspec.msgpack.encode(raw)
        true = (pair.bystander.peer_id, packed, until_s)
        false = ("12D3KooWnobody", packed, until_s)
        dumps = self.liar.protocol.serializer.dumps
        dictionary, ends_s = DictionaryDHTValue(), until_s
        match lie:
            case "none":
                dictionary.store(*true)
            case "empty, for ever":
                ends_s = float("inf")
            case "a bad entry beside a good one":
                dictionary.store(*true)
                dictionary.store(*false)
            case "a plain value, for ever":
                storage = self.liar.protocol.storage
                storage.store(key_id, dumps(b"zap"), float("inf"))
                return
            case "no size":
                dictionary.store(*true)
                dictionary.packb = lambda: dumps(["any", until_s, [list(true)]])
            case "cached":
                storing = self.liar.protocol.call_store(
                    pair.holder._node.peer_id, [key_id], [packed], until_s, [pair.bystander.peer_id], in_cache=True
                )
                assert await storing == [True]
                return
        self.liar.protocol.storage.store(key_id, dictionary, ends_s)

    def replay(self, *, hardened: bool) -> Seen:
        from hivemind.utils import timed_storage

        class Storage(timed_storage.TimedStorage):  # type: ignore[misc]
            store = timed_storage.TimedStorage.store if hardened else timed_storage.TimedStorage.store.__wrapped__

        clock, now_s = timed_storage.get_dht_time, 1000.0
        timed_storage.get_dht_time = lambda: now_s
        try:
            storage = Storage()
            storage.store("holder", "new", 1060.0)
            storage.store("holder", "old", 1010.0)
            now_s = 1020.0
            return Seen(storage.get("holder") is not None, False)
        finally:
            timed_storage.get_dht_time = clock


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[2], Probe().handle, requests=Prepare | Read | Replay))
