"""The coordinator's home folder: its key, the run's secret, the journal, the addresses. Impure: files.

identity.key     the coordinator's Ed25519 key, 0600, never overwritten; its public half is in every invite
run.secret       32 bytes, 0600, from which the seed secret of each version is drawn
run.id           the run's id
journal.db       every hard fact
pieces.log       what was received of slots under way
addresses.json   where the coordinator listens; ports that were taken free once are kept
coordinator.lock held by the one coordinator of this home
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import IdentityError
from protocol.ids import RunId, Version
from protocol.key_file import create_identity, read_identity
from protocol.keys import Identity, run_id_bytes
from protocol.private_files import check_private_folder, create_private, locked, read_private, write_private
from protocol.runtime import home_runtime_folder, home_socket, own, spelled_once

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class CoordinatorHome:
    """An existing home. Get one with `open` or `ensure`."""

    path: Path
    identity: Identity
    run_id: RunId
    run_secret: bytes = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "CoordinatorHome":
        """The home at `path`. Raises `IdentityError` or `KeyFileExposedError`."""
        path = spelled_once(path)
        if not os.path.lexists(path / "identity.key"):
            raise IdentityError(
                f"{path} is not a coordinator's home",
                why="it holds no identity.key",
                remedy="Start one with `hexcomb-coordinator serve RUNFILE --home FOLDER`.",
            )
        check_private_folder(path)
        identity = read_identity(path / "identity.key")
        run_id, run_secret = RunId(_read(path / "run.id").decode("ascii", "replace")), _read(path / "run.secret")
        try:
            run_id_bytes(run_id)
        except ValueError as error:
            raise _damaged(path / "run.id", str(error)) from error
        if len(run_secret) != SECRET_BYTES:
            raise _damaged(path / "run.secret", f"it has {len(run_secret)} bytes, not {SECRET_BYTES}")
        return cls(path, identity, run_id, run_secret)

    @classmethod
    def ensure(cls, path: Path) -> "CoordinatorHome":
        """The home at `path`; a new run with a new key if there is none. Raises as `open` does."""
        path = spelled_once(path)
        if not os.path.lexists(path / "identity.key"):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise IdentityError(
                    f"{path} cannot be made", why=str(error), remedy="Name another folder with --home."
                ) from error
            own(path)
            check_private_folder(path)
            for name, content in (
                ("run.id", secrets.token_hex(16).encode()),
                ("run.secret", secrets.token_bytes(SECRET_BYTES)),
            ):
                with contextlib.suppress(FileExistsError):
                    create_private(path / name, content, mode=0o600)
            create_identity(path / "identity.key")
        return cls.open(path)

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.db"

    @property
    def pieces(self) -> Path:
        """The file of the pieces of slots under way."""
        return self.path / "pieces.log"

    @property
    def socket(self) -> Path:
        """Where the running coordinator answers the organizer's commands."""
        return home_socket(self.path, "coordinator.sock")

    @property
    def runtime_folder(self) -> Path:
        """For the sockets of child processes."""
        return home_runtime_folder(self.path)

    def seed_secret(self, version: Version) -> bytes:
        """The 32 bytes that the seal of `version` reveals."""
        info = f"hexcomb/v1/version-secret|{self.run_id}|{version}".encode()
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(self.run_secret)

    def read_addresses(self) -> dict[str, str]:
        """What `write_addresses` wrote last; empty before the first start. Raises `IdentityError` on a damaged file."""
        path = self.path / "addresses.json"
        if not path.exists():
            return {}
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, str(error)) from error

    def write_addresses(self, addresses: dict[str, str]) -> None:
        """Tells the organizer's commands, and the next start, where the coordinator listens."""
        write_private(self.path / "addresses.json", json.dumps(addresses, indent=2).encode())

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the home for one coordinator. Raises `HomeInUseError`."""
        with locked(self.path / "coordinator.lock", f"the coordinator's home {self.path}"):
            yield


def _read(path: Path) -> bytes:
    try:
        return read_private(path)
    except FileNotFoundError as error:
        raise _damaged(path, "it is not there") from error


def _damaged(path: Path, why: str) -> IdentityError:
    return IdentityError(f"{path} cannot be used", why=why, remedy="Restore it from a backup, or name another home.")
