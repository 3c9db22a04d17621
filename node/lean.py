"""Keeps the daemon small: libraries that others would import for it, and that it never uses. Impure: imports."""

import sys


def import_log_library() -> None:
    """Imports structlog without `rich`, which it takes for coloured tracebacks wherever that is installed: that costs
    a daemon 6 MB. Others may import `rich` afterwards."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's way to say: not to be found
    try:
        import structlog as structlog
    finally:
        del sys.modules["rich"]
