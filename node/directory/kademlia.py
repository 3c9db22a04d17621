"""One node of the Kademlia DHT. Impure; the only module that imports hivemind's DHT, only ever in a child
process.

Invariant: whatever other DHT nodes send, what this node stores, hands on and returns are entries that
`layout` takes, and no dictionary is dropped, hidden or kept alive because of a bad entry in it or a lie
around it. hivemind validates entries but leaves holes beside that; `_harden` closes them and says which.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.routing
import hivemind.utils.timed_storage
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from protocol.directory.layout import NUM_BUCKETS, bucket_key, bucket_of, expiration_s, open_entry
from protocol.directory.messages import Start
from protocol.errors import IdentityError, MachineUnfitError, PortInUseError, RecordRefusedError, UsageError
from protocol.ids import PeerId, RunId
from protocol.record import DEFAULT_SKEW_MS, OpenedRecord, open_record

DIAL_DEADLINE_S = 10.0
RPC_DEADLINE_S = 3.0
START_DEADLINE_S = 20.0
MAX_REMEMBERED = 8192


class Clock:
    """The coordinator's time as this machine knows it."""

    def __init__(self, offset_ms: int) -> None:
        self.offset_ms = offset_ms

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time() + self.offset_ms / 1000

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.now_s() * 1000)


class RecordValidator(RecordValidatorBase):
    """Asked by hivemind about every entry that comes in, to be stored or as an answer. Never raises."""

    def __init__(self, run_id: RunId, coordinator_key: bytes, clock: Clock) -> None:
        self._run_id, self._coordinator_key, self._clock = run_id, coordinator_key, clock
        keys = [bucket_key(run_id, bucket) for bucket in range(NUM_BUCKETS)]
        self._buckets = {DHTID.generate(source=key).to_bytes(): bucket for bucket, key in enumerate(keys)}
        self._taken: dict[DHTRecord, OpenedRecord] = {}
        self.num_refused = 0

    def validate(self, record: DHTRecord) -> bool:
        """Whether the entry is a record of a node of this run, in its place."""
        return self.open(record) is not None

    def open(self, entry: DHTRecord) -> OpenedRecord | None:
        """The record in an entry, or None for anything that is not to be taken."""
        now_ms = self._clock.now_ms()
        if not isinstance(entry.value, bytes) or entry.key not in self._buckets:
            self.num_refused += 1
            return None
        # Every replica sends every record again with every answer; a signature is checked once.
        known = self._taken.get(entry)
        if known is not None and known.record.expires_ms + DEFAULT_SKEW_MS > now_ms:
            return known
        try:
            opened = open_entry(
                bucket=self._buckets[entry.key],
                subkey=entry.subkey,
                value=entry.value,
                expiration_s=entry.expiration_time,
                run_id=self._run_id,
                coordinator_key=self._coordinator_key,
                now_ms=now_ms,
            )
        except RecordRefusedError:
            self.num_refused += 1
            return None
        if len(self._taken) >= MAX_REMEMBERED:
            self._taken.clear()
        self._taken[entry] = opened
        return opened


class Kademlia:
    """This node's place in the DHT, with its p2pd. Built by `start`."""

    def __init__(self, node: DHTNode, validator: RecordValidator, clock: Clock, start: Start) -> None:
        self._node, self._validator, self._clock = node, validator, clock
        self._run_id, self._coordinator_key = start.run_id, start.coordinator_key
        self.peer_id = PeerId(node.peer_id.to_base58())
        self.p2p_control = str(node.p2p.daemon_listen_maddr)

    @classmethod
    async def start(cls, start: Start, clock: Clock) -> Self:
        """Starts p2pd and a DHT node that knows nobody yet; `dial` makes it join."""
        if not os.access(start.identity_path, os.R_OK):  # hivemind would make up another identity
            raise IdentityError(f"The key file {start.identity_path} cannot be read")
        P2P._UNIX_SOCKET_PREFIX = f"/unix{start.run_dir}/"  # the default is the shared /tmp
        for module in (
            hivemind.dht.node,
            hivemind.dht.protocol,
            hivemind.dht.routing,
            hivemind.utils.timed_storage,
        ):
            module.get_dht_time = clock.now_s
        validator = RecordValidator(start.run_id, start.coordinator_key, clock)
        try:
            node = await cls._create(start, validator)
        except P2PDaemonError as error:
            kind = PortInUseError if "address already in use" in str(error) else MachineUnfitError
            raise kind(f"The network daemon cannot listen on {', '.join(start.listen)}", why=str(error)) from error
        _harden(node, validator)
        return cls(node, validator, clock, start)

    @staticmethod
    async def _create(start: Start, validator: RecordValidator) -> DHTNode:
        return await DHTNode.create(
            record_validator=validator,
            identity_path=start.identity_path,
            check_if_identity_free=False,  # the check cannot read an Ed25519 key
            host_maddrs=list(start.listen),
            announce_maddrs=list(start.announce) or None,
            strict=False,
            use_relay=start.relay,
            use_auto_relay=start.relay,
            auto_nat=start.through_nat,
            nat_port_map=start.through_nat,
            startup_timeout=START_DEADLINE_S,
            wait_timeout=RPC_DEADLINE_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )

    async def dial(self, bootstraps: Sequence[str]) -> int:
        """Connects to those of the bootstraps that answer and looks around from there; returns how many did."""
        targets = [parse_bootstrap(maddr) for maddr in bootstraps]
        others = [target for target in targets if target[0] != self._node.peer_id]
        answers = await asyncio.gather(*(self._dial_one(*target) for target in others))
        if any(answers):
            await self._node.find_nearest_nodes([self._node.node_id])
        return sum(answers)

    async def publish(self, raw: bytes) -> None:
        """Offers this node's record to the DHT; raises RecordRefusedError if no reader would take it."""
        opened = open_record(
            raw,
            run_id=self._run_id,
            coordinator_key=self._coordinator_key,
            now_ms=self._clock.now_ms(),
            peer_id=self.peer_id,
        )
        key, until_s = (
            bucket_key(self._run_id, bucket_of(self.peer_id)),
            expiration_s(opened.record.expires_ms),
        )
        # The answer is that of whichever replica spoke last, so it tells nothing.
        await self._node.store(key, raw, until_s, subkey=self.peer_id)

    async def list_records(self) -> list[OpenedRecord]:
        """All live records that the DHT has now, by peer id."""
        keys = [bucket_key(self._run_id, bucket) for bucket in range(NUM_BUCKETS)]
        found = await self._node.get_many(keys, sufficient_expiration_time=float("inf"))
        dumps, now_ms = self._node.protocol.serializer.dumps, self._clock.now_ms()
        live = []
        for key, result in found.items():
            for peer_id, (raw, until_s) in result.value.items() if result is not None else ():
                entry = DHTRecord(DHTID.generate(source=key).to_bytes(), dumps(peer_id), dumps(raw), until_s)
                opened = self._validator.open(entry)
                if opened is not None and opened.record.expires_ms > now_ms:
                    live.append(opened)
        return sorted(live, key=lambda opened: opened.record.peer_id)

    async def multiaddrs(self) -> tuple[str, ...]:
        """Where this node can be dialled, its peer id included: what another node takes as a bootstrap."""
        return tuple(str(maddr) for maddr in await self._node.get_visible_maddrs(latest=True))

    @property
    def num_neighbours(self) -> int:
        """DHT nodes that this one knows."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    @property
    def num_refused(self) -> int:
        """Entries that were not taken since the start."""
        return self._validator.num_refused

    async def wait_gone(self) -> int:
        """Waits for the end of p2pd, which nobody survives; returns its status."""
        return int(await self._node.p2p._child.wait())

    async def stop(self) -> None:
        """Ends p2pd."""
        await self._node.shutdown()

    async def _dial_one(self, peer_id: PeerID, address: Multiaddr) -> bool:
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                # A ping alone does not heal a lost connection: libp2p refuses to dial for a while.
                await self._node.p2p._client.connect(peer_id, [address])
                answered = await self._node.protocol.call_ping(peer_id) is not None
        except (P2PDaemonError, TimeoutError):
            return False
        if answered:
            self._node.blacklist.register_success(peer_id)
        return answered


def parse_bootstrap(maddr: str) -> tuple[PeerID, Multiaddr]:
    """Peer id and address of `/…/p2p/PEER`; raises UsageError for anything else."""
    address, _, name = maddr.rpartition("/p2p/")
    try:
        return PeerID.from_base58(name), Multiaddr(address)
    except ValueError as error:
        raise UsageError(
            f"{maddr[:200]!r} is not the address of a bootstrap",
            why=str(error),
            remedy="It looks like /ip4/192.0.2.1/tcp/4001/p2p/12D3Koo…",
        ) from error


def _harden(node: DHTNode, validator: RecordValidator) -> None:
    """Closes what validation of single entries leaves open in hivemind 1.1.12."""
    protocol = node.protocol

    # One bad entry makes a reader drop the whole dictionary, and `maxsize` of the sender's choice cuts it.
    def prune(key: bytes, dictionary: DictionaryDHTValue) -> bool:
        with dictionary.freeze():
            entries = [(subkey, *entry) for subkey, entry in dictionary.items()]
        dictionary.clear()
        dictionary.maxsize, dictionary.latest_expiration_time = float("inf"), float("-inf")
        for subkey, value, expires_s in entries:
            if validator.validate(DHTRecord(key, protocol.serializer.dumps(subkey), value, expires_s)):
                dictionary.store(subkey, value, expires_s)
        return True

    protocol._validate_dictionary = prune

    # The expiration around a dictionary is the sender's word: with infinity, an empty one ends every search.
    find = protocol.call_find

    async def call_find(peer: PeerID, keys: Any) -> Any:
        answers = await find(peer, keys)
        return answers and {key: (_checked(found), nearest) for key, (found, nearest) in answers.items()}

    protocol.call_find = call_find

    # Entries sent "for the cache" make a second dictionary, which hides the stored one if it expires later.
    protocol.cache = protocol.storage


def _checked(found: ValueWithExpiration | None) -> ValueWithExpiration | None:
    if found is None or not found.value:
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)


def _keep_the_later(store: Callable[..., bool]) -> Callable[..., bool]:
    """A refused older entry must not move the newer one's expiry: replaying an old record would delete the
    new.
    """

    @functools.wraps(store)
    def store_if_later(self: TimedStorage, key: Any, value: Any, expiration_time: float) -> bool:
        held = self.data.get(key)
        if held is not None and held.expiration_time >= expiration_time:
            return False
        return store(self, key, value, expiration_time)

    return store_if_later


TimedStorage.store = _keep_the_later(TimedStorage.store)
