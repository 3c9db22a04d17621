"""What a home remembers of the run that it belongs to: `joined.json` and `leaf.pem`. Impure: files.

Invariant: `joined.json` is written last, so a home that has it has all that a daemon needs. The invite
stays in it (the file is private): a node whose leaf has run out redeems it again, which the coordinator
takes from the same key.
"""

import msgspec

from node.home import Home
from protocol.certificates import Leaf, check_leaf
from protocol.errors import IdentityError, NotJoinedError
from protocol.ids import RunId
from protocol.invite import Grant
from protocol.private_files import read_private, write_private

_CERTIFICATE_MARK = b"-----BEGIN CERTIFICATE-----"


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A home's place in a run. `stamp` is the coordinator's word for it; addresses are host:port of its
    control service, `bootstraps` multiaddresses of the directory; `role` is what the invite allowed."""

    run_id: RunId
    coordinator_key: bytes
    role: Grant
    stamp: bytes
    control_addresses: tuple[str, ...]
    bootstraps: tuple[str, ...]
    invite: str


def read_joined(home: Home) -> Joined:
    """The home's place. Raises `NotJoinedError` if it has none, `IdentityError` if the file is damaged or
    exposed."""
    try:
        data = read_private(home.joined_file)
    except FileNotFoundError as error:
        raise NotJoinedError(
            f"{home.path} belongs to no run yet", remedy="Join one with `join-swarm INVITE`."
        ) from error
    try:
        return msgspec.json.decode(data, type=Joined)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IdentityError(
            f"{home.joined_file} cannot be read", why=str(error), remedy="Join again with the invite."
        ) from error


def write_joined(home: Home, joined: Joined) -> None:
    """Remembers the home's place."""
    write_private(home.joined_file, msgspec.json.format(msgspec.json.encode(joined)))


def read_leaf(home: Home) -> Leaf:
    """The TLS leaf. Raises `NotJoinedError` or `IdentityError`."""
    try:
        data = read_private(home.leaf_file)
    except FileNotFoundError as error:
        raise NotJoinedError(
            f"{home.path} has no TLS leaf", remedy="Join again with the invite: `join-swarm INVITE`."
        ) from error
    start = data.find(_CERTIFICATE_MARK)
    leaf = Leaf(certificate_pem=data[max(start, 0) :], key_pem=data[: max(start, 0)])
    check_leaf(leaf)
    return leaf


def write_leaf(home: Home, leaf: Leaf) -> None:
    """Keeps the TLS leaf: key, then certificate."""
    write_private(home.leaf_file, leaf.key_pem + leaf.certificate_pem)
