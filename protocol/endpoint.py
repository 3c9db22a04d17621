"""Addresses of peers as they travel: `host:port` and libp2p multiaddresses. Pure.

Both come from strangers and end in dialers and on status pages, so the alphabet and the length are closed.
"""

import re
from typing import NamedTuple

MAX_HOST_CHARACTERS = 253
MAX_MULTIADDR_CHARACTERS = 200

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_MULTIADDR = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9.:_-]*)+")


class Endpoint(NamedTuple):
    """A host (a name, an IPv4 address, or an IPv6 address without brackets) and a port from 1 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """`host:port` or `[ipv6]:port`. Raises `ValueError` on anything else."""
    host, _, port = text.rpartition(":")
    well_formed = _NAME.fullmatch(host) or _IPV6.fullmatch(host)
    if not well_formed or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{text[:64]!a} is not host:port")
    return Endpoint(host.strip("[]"), int(port))


def check_multiaddr(text: str) -> None:
    """Raises `ValueError` unless the text looks like a multiaddress, e.g.
    `/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo…`."""
    if len(text) > MAX_MULTIADDR_CHARACTERS or not _MULTIADDR.fullmatch(text):
        raise ValueError(f"{text[:64]!a} is not a multiaddress")
