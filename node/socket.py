"""What the daemon answers on its Unix socket: status, peers, fetch, export, pause, finish, down, logs. Impure through
the node.

Every answer is plain JSON under `"schema": 1`; `protocol.local_socket` carries it. The shapes are for
`hexcomb status --json` and for people's scripts: fields are added, never changed.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node import program
from node.context import Node
from node.holders import why_unheld
from node.state import Capability
from protocol.errors import ChunkMissingError, UnreachableError, UsageError
from protocol.ids import Version
from protocol.local_socket import Verb

if TYPE_CHECKING:
    from node.daemon import Daemon


def verbs_of(daemon: "Daemon") -> dict[str, Verb]:
    """The verbs of one daemon."""
    node = daemon.node

    async def status(_: dict[str, Any]) -> dict[str, Any]:
        return describe(daemon)

    async def peers(_: dict[str, Any]) -> dict[str, Any]:
        records = await node.presence.list_records()
        return {"peers": [describe_record(opened.record, now_ms=node.state.now_ms()) for opened in records]}

    async def fetch(request: dict[str, Any]) -> dict[str, Any]:
        version = version_in(request)
        await fetch_version(node, version)
        body = node.versions.body(version)
        return {"version": version, "root": body.root, "num_chunks": len(body.chunks), "num_bytes": body.num_bytes}

    async def export(request: dict[str, Any]) -> dict[str, Any]:
        return await export_version(node, version_in(request), Path(str(request.get("folder", ""))))

    async def pause(_: dict[str, Any]) -> dict[str, Any]:
        node.state.paused = "by its owner"
        node.state.changed()
        node.session.beat_now()
        return {}

    async def resume(_: dict[str, Any]) -> dict[str, Any]:
        node.state.paused = ""
        node.state.changed()
        node.session.beat_now()
        return {}

    async def finish(request: dict[str, Any]) -> dict[str, Any]:
        deadline_s = request.get("finish_within_s")
        if deadline_s is not None and (not isinstance(deadline_s, int | float) or deadline_s < 0):
            raise UsageError(f"{deadline_s!a} is not a number of seconds")
        daemon.finish(deadline_s=deadline_s)
        return {}

    async def down(_: dict[str, Any]) -> dict[str, Any]:
        daemon.stop()
        return {}

    async def logs(_: dict[str, Any]) -> dict[str, Any]:
        return {"folder": str(node.home.path / "logs")}

    return {
        "status": status,
        "peers": peers,
        "fetch": fetch,
        "export": export,
        "pause": pause,
        "resume": resume,
        "finish": finish,
        "down": down,
        "logs": logs,
    }


async def fetch_version(node: Node, version: Version) -> None:
    """Brings a version here from those that the directory names. Raises `VersionPastError` or `VersionFromFutureError`
    where that is why nobody has it, else as `Versions.fetch_from_peers`."""
    try:
        await node.versions.fetch_from_peers(version, await node.presence.find_holders(version))
    except (ChunkMissingError, UnreachableError) as error:
        records = await node.presence.list_records()
        held = {*node.versions.held, *(Version(number) for opened in records for number in opened.record.versions)}
        max_lag = node.state.spec.max_lag if node.state.spec else None
        raise why_unheld(version, head=node.versions.head, max_lag=max_lag, held=held) or error from error
    node.state.changed()


async def export_version(node: Node, version: Version, folder: Path) -> dict[str, Any]:
    """Writes a version as a model folder; it is fetched from peers if it is not here. Raises `UsageError`."""
    if not folder.is_absolute():
        raise UsageError(f"{str(folder)!a} is not an absolute path", remedy="Name the folder in full.")
    if version not in node.versions.held:
        await fetch_version(node, version)
    await node.versions.export(version, folder)
    body = node.versions.body(version)
    return {"version": version, "root": body.root, "folder": str(folder), "num_bytes": body.num_bytes}


def version_in(request: dict[str, Any]) -> Version:
    """The version that a request names. Raises `UsageError`."""
    version = request.get("version")
    if not isinstance(version, int) or version < 0:
        raise UsageError(f"{version!a} is not a version", remedy="Name it by its number.")
    return Version(version)


def describe(daemon: "Daemon") -> dict[str, Any]:
    """The node's status: what it does or waits for, and what it has done."""
    node, now_s = daemon.node, time.monotonic()
    state, link = node.state, node.session.link
    version, root = state.loaded or (None, None)
    capability = state.capability
    return {
        "program": f"hexcomb {program.version()}",
        "peer_id": node.peer_id,
        "name": node.settings.name,
        "run_id": node.run_id,
        "run": state.spec.name if state.spec else None,
        "up_s": round(now_s - state.started_s, 1),
        "role": state.acting_role,
        "role_reason": state.unwilling if state.resting else state.role_reason,
        "activity": state.activity,
        "trouble": state.trouble,
        "paused": state.paused or state.limited,
        "finishing": state.finishing,
        "finish_in_s": None if state.finish_by_s is None else round(state.finish_by_s - now_s, 1),
        "has_work": daemon.work.has_work,
        "limits": {
            "set": node.settings.limits.words(),
            "reason": state.limited,
            "not_available": list(state.not_available),
        },
        "version": version,
        "root": root,
        "head": node.versions.head,
        "max_lag": state.spec.max_lag if state.spec else None,
        "versions_held": node.versions.held,
        "engine": state.engine,
        "engine_choice": state.engine_choice,
        "engine_rates": {rate.engine: round(rate.tokens_per_s, 1) for rate in state.engine_rates},
        "engine_start_s": state.engine_start_s,
        "engine_seats": state.num_seats,
        "engine_restraint": state.restraint,
        "engine_k3": state.k3,
        "canary_difference": state.canary_difference,
        "tokens_per_s": round(state.rate.per_s(now_s=now_s), 1),
        "tokens": state.rate.total,
        "counts": dict(sorted(state.counts.items())),
        "leases": daemon.work.num_leases,
        "capability": capability and describe_capability(capability),
        "coordinator": {
            "address": node.control.address,
            "is_up": link.is_up,
            "since_s": round(now_s - link.since_s, 1),
            "trouble": link.trouble,
            "num_heartbeats": link.num_heartbeats,
            "rtt_ms": round(node.control.rtt_s * 1000, 2),
            "clock_offset_ms": state.clock_offset_ms,
        },
        "endpoint": state.endpoint,
        "trainer_endpoint": state.trainer_endpoint,
        "directory": {"is_up": node.presence.is_up, "num_neighbours": node.presence.num_neighbours},
    }


def describe_capability(capability: Capability) -> dict[str, Any]:
    """What was measured of this machine."""
    return {
        "decode_tokens_per_s": capability.decode_tokens_per_s,
        "train_tokens_per_s": capability.train_tokens_per_s,
        "memory_bytes": capability.memory_bytes,
        "device": capability.device,
    }


def describe_record(record: Any, *, now_ms: int) -> dict[str, Any]:
    """A directory record for people: what the node can do, where it is, how fresh this is."""
    return {
        "peer_id": record.peer_id,
        "role": record.role,
        "device": record.device,
        "decode_tokens_per_s": record.decode_tokens_per_s,
        "train_tokens_per_s": record.train_tokens_per_s,
        "memory_bytes": record.memory_bytes,
        "rtt_ms": record.rtt_ms,
        "endpoint": record.endpoint,
        "trainer_endpoint": record.trainer_endpoint,
        "versions": list(record.versions),
        "age_s": round((now_ms - record.issued_ms) / 1000, 1),
        "expires_in_s": round((record.expires_ms - now_ms) / 1000, 1),
    }
