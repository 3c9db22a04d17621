"""Who holds a version, as the coordinator and the directory name them. Pure."""

from collections.abc import Iterable, Sequence

from node.weights.fetch import Holder
from protocol.endpoint import parse_endpoint
from protocol.errors import KeyRefusedError
from protocol.ids import PeerId
from protocol.keys import public_key_of
from protocol.record import OpenedRecord


def announced_holders(texts: Iterable[str], *, but: PeerId) -> tuple[Holder, ...]:
    """The peers in `PEER_ID@host:port` texts, in order; malformed ones and `but` itself are left out."""
    found: list[Holder] = []
    for text in texts:
        name, _, endpoint = text.partition("@")
        try:
            public_key_of(PeerId(name))
            parse_endpoint(endpoint)
        except (KeyRefusedError, ValueError):
            continue
        if name != but:
            found.append(Holder(PeerId(name), endpoint))
    return tuple(found)


def recorded_holders(records: Sequence[OpenedRecord], *, but: PeerId) -> tuple[Holder, ...]:
    """The peers behind directory records that can be dialled, trainers first."""
    others = [opened.record for opened in records if opened.record.endpoint and opened.record.peer_id != but]
    others.sort(key=lambda record: (record.role != "trainer", record.peer_id))
    return tuple(Holder(record.peer_id, record.endpoint) for record in others)
