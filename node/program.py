"""Which program this is. Impure once: asks the installation."""

from functools import cache
from importlib import metadata

DISTRIBUTION = "hexcomb"


@cache
def version() -> str:
    """The installed version, or "unknown" in a bare checkout."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
