"""Which program this is. Impure once: asks the installation."""

from functools import cache

DISTRIBUTION = "hexcomb"


@cache
def version() -> str:
    """The installed version, or "unknown" in a bare checkout."""
    from importlib import metadata  # it takes longer than all that `hexcomb status` does

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
