"""A coordinator's key and signed records, for the tests of the directory."""

import time
from pathlib import Path

from protocol.directory.messages import Start
from protocol.ids import RunId, Version
from protocol.keys import Identity
from protocol.membership import Membership, sign_membership
from protocol.record import Record, sign_record

RUN_ID = RunId("0123456789abcdef" * 2)
COORDINATOR = Identity.from_seed(bytes(31) + b"\x01")
STRANGER = Identity.from_seed(bytes(31) + b"\x02")


def now_ms() -> int:
    """Unix milliseconds."""
    return int(time.time() * 1000)


def stamp_of(identity: Identity, *, at_ms: int, run_id: RunId = RUN_ID, by: Identity = COORDINATOR) -> bytes:
    """A stamp of membership that is good for an hour."""
    membership = Membership(run_id, identity.peer_id, "auto", at_ms - 1000, at_ms + 3_600_000)
    return sign_membership(by, membership)


def record_of(
    identity: Identity,
    *,
    at_ms: int,
    lifetime_ms: int = 60_000,
    versions: tuple[int, ...] = (),
    stamp: bytes | None = None,
) -> Record:
    """A plain record of a rollout node."""
    return Record(
        peer_id=identity.peer_id,
        role="rollout",
        device="CPU 2 cores",
        decode_tokens_per_s=12.5,
        train_tokens_per_s=0.0,
        memory_bytes=2**33,
        link_mbit_per_s=100.0,
        rtt_ms=20.0,
        endpoint="192.0.2.7:7001",
        trainer_endpoint="",
        versions=tuple(Version(version) for version in versions),
        issued_ms=at_ms,
        expires_ms=at_ms + lifetime_ms,
        stamp=stamp if stamp is not None else stamp_of(identity, at_ms=at_ms),
    )


def signed(identity: Identity, **kwargs: object) -> tuple[bytes, Record]:
    """A record as it is stored, and what is in it."""
    at_ms = kwargs.pop("at_ms", None) or now_ms()
    record = record_of(identity, at_ms=at_ms, **kwargs)  # type: ignore[arg-type]
    return sign_record(identity, record, run_id=RUN_ID), record


def start_of(identity: Identity, folder: Path, *bootstraps: str) -> Start:
    """What a directory needs: writes the key, names a run-time folder in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run").mkdir(mode=0o700)
    identity_path = folder / "libp2p.key"
    identity_path.write_bytes(identity.libp2p_bytes())
    identity_path.chmod(0o400)
    return Start(
        run_id=RUN_ID,
        coordinator_key=COORDINATOR.public_bytes,
        identity_path=str(identity_path),
        run_dir=str(folder / "run"),
        bootstraps=bootstraps,
    )
