"""The home folder: a node's key, leaf, run and blobs, private to one user and to one daemon at a time.
Impure: files.

    identity.key   the Ed25519 seed, one line of text, 0600, never overwritten
    leaf.pem       the TLS leaf and its key, 0600
    joined.json    the run that this home belongs to, 0600
    blobs/         weight chunks, by hash
    daemon.lock    held by the daemon
    daemon.sock    where the daemon answers (in the run-time folder if the path is too long for a socket)

Invariants: a key that others could read or replace is refused, not repaired; one key runs in one daemon
of a machine, whichever folder it was copied to.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import IdentityError
from protocol.ids import PeerId
from protocol.key_file import create_identity, read_identity
from protocol.keys import Identity
from protocol.private_files import check_private_folder, locked, write_private
from protocol.runtime import home_runtime_folder, home_socket, own, spelled_once, user_runtime_folder


@dataclass(frozen=True, slots=True)
class Home:
    """An existing home folder with its identity. Get one with `open`, `create` or `ensure`."""

    path: Path
    identity: Identity

    @classmethod
    def open(cls, path: Path) -> "Home":
        """The home at `path`. Raises `IdentityError` or `KeyFileExposedError`, each with what to do."""
        path = spelled_once(path)
        if not os.path.lexists(path / "identity.key"):
            raise IdentityError(
                f"{path} is not a hexcomb home",
                why="it holds no identity.key",
                remedy="Join a run with `join-swarm INVITE`, or name the right folder with --home.",
            )
        check_private_folder(path)
        return cls(path, read_identity(path / "identity.key"))

    @classmethod
    def create(cls, path: Path) -> "Home":
        """A new home with a new key at `path`. Raises `IdentityError` where a key is already, or strange
        files are."""
        path = spelled_once(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise IdentityError(
                f"{path} cannot be made", why=str(error), remedy="Name another folder with --home."
            ) from error
        own(path)
        check_private_folder(path)
        identity = create_identity(path / "identity.key")
        (path / "blobs").mkdir(mode=0o700, exist_ok=True)
        return cls(path, identity)

    @classmethod
    def ensure(cls, path: Path) -> "Home":
        """The home at `path`, created if there is none."""
        exists = os.path.lexists(spelled_once(path) / "identity.key")
        return cls.open(path) if exists else cls.create(path)

    @property
    def peer_id(self) -> PeerId:
        """The node's name."""
        return self.identity.peer_id

    @property
    def blobs(self) -> Path:
        """The folder of weight chunks."""
        return self.path / "blobs"

    @property
    def joined_file(self) -> Path:
        """What the node remembers of its run."""
        return self.path / "joined.json"

    @property
    def leaf_file(self) -> Path:
        """The TLS leaf: key, then certificate."""
        return self.path / "leaf.pem"

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket, short enough for the system."""
        return home_socket(self.path, "daemon.sock")

    def runtime_folder(self) -> Path:
        """A private folder with a short path, made if missing, for sockets and temporary files of the
        children."""
        return home_runtime_folder(self.path)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the home and the key for one daemon. Raises `HomeInUseError` that names the process in
        the way."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path / "daemon.lock", f"the home folder {self.path}"))
            key_lock = user_runtime_folder() / f"{self.peer_id}.lock"
            stack.enter_context(locked(key_lock, f"the key of {self.peer_id}, from another home folder,"))
            yield

    def write_libp2p_identity(self, path: Path) -> None:
        """Writes the key in the form that a libp2p daemon reads, 0400, replacing an earlier one."""
        write_private(path, self.identity.libp2p_bytes(), mode=0o400)
