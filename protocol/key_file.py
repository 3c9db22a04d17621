"""The file of an identity: one line of text, `hexcomb-key-1 SEED PEER_ID`, private and never overwritten.
Impure: files.

The peer id in it is a check: a file that was cut short or edited does not turn into another identity.
"""

import secrets
from pathlib import Path

from protocol.errors import IdentityError
from protocol.keys import SEED_BYTES, Identity
from protocol.private_files import create_private, read_private

_KEY_WORD = "hexcomb-key-1"


def create_identity(path: Path) -> Identity:
    """A new identity, its key at `path`, 0600. Raises `IdentityError` if anything is there already."""
    identity = Identity.from_seed(secrets.token_bytes(SEED_BYTES))
    line = f"{_KEY_WORD} {identity.seed.hex()} {identity.peer_id}\n"
    try:
        create_private(path, line.encode("ascii"), mode=0o600)
    except FileExistsError as error:
        raise IdentityError(
            f"{path} exists already",
            why="a key is never overwritten",
            remedy="Use that home, or another folder.",
        ) from error
    return identity


def read_identity(path: Path) -> Identity:
    """The identity whose key is at `path`. Raises `KeyFileExposedError` or `IdentityError`, each with
    what to do."""
    words = read_private(path).decode("ascii", errors="replace").split(" ")
    try:
        word, seed, peer_id = words
        identity = Identity.from_seed(bytes.fromhex(seed))
    except ValueError as error:
        raise _damaged(path, "it is cut short or is not a hexcomb key") from error
    if word != _KEY_WORD or peer_id != f"{identity.peer_id}\n":
        raise _damaged(path, "seed and peer id in it do not belong together")
    return identity


def _damaged(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f"the key file {path} cannot be used",
        why=why,
        remedy="Restore it from a backup, or move it away and join again as a new node.",
    )
