"""Who holds a version, as the coordinator and the directory name them. Pure."""

from collections.abc import Collection, Iterable, Sequence

from node.weights.fetch import Holder
from protocol.endpoint import parse_endpoint
from protocol.errors import HexcombError, KeyRefusedError, VersionFromFutureError, VersionPastError
from protocol.ids import PeerId, Version
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


def why_unheld(
    version: Version, *, head: Version | None, max_lag: int | None, held: Collection[Version]
) -> HexcombError | None:
    """Why nobody has a version, where its number says it: it is past its retention, or does not exist yet. `held` is
    what anybody holds now, as far as this node hears; `head` or `max_lag` may not be known."""
    newest = max((*held, *(() if head is None else (head,))), default=None)
    if newest is None or version in held:
        return None
    if version > newest:
        return VersionFromFutureError(
            f"there is no version {version} yet", why=f"the newest that was heard of is {newest}"
        )
    kept_from = newest - max_lag - 1 if max_lag is not None else min(held, default=newest)
    if version >= kept_from:
        return None
    kept = f"held now: {_ranges(held)}" if held else "and no node that could be asked holds another one either"
    return VersionPastError(
        f"version {version} is past",
        why=f"nodes keep the bytes of versions from {kept_from} on; {kept}",
        remedy="Name one of those; a version is to be exported while it is kept.",
    )


def _ranges(versions: Collection[Version]) -> str:
    """Versions for people: `0, 7 to 11`."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][-1] + 1:
            parts[-1][1:] = [version]
        else:
            parts.append([version])
    return ", ".join(" to ".join(map(str, part)) for part in parts)
