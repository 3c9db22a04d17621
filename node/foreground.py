"""The daemon's own process: `python -m node.foreground HOME`. Impure.

`hexcomb up` and `join-swarm` become this by `exec`, with the same process id, terminal and signals: what command line
and joining have imported would else stay in a process that lives for weeks. Invariant: leaves with the exit codes of
the command line.
"""

import os
import sys
from pathlib import Path

from node.failure import INTERRUPTED, explain
from node.lean import import_log_library
from protocol.errors import HexcombError


def command(home: Path) -> list[str]:
    """The command line of a daemon."""
    return [sys.executable, "-P", "-m", "node.foreground", str(home)]


def environment() -> dict[str, str]:
    """Its environment: it resolves imports as this process does, never from the folder it happens to run in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def main() -> None:
    """Runs the daemon until it is told to stop."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import_log_library()
    from node.startup import run

    try:
        was_interrupted = run(Path(sys.argv[1]))
    except HexcombError as error:
        print(explain(error), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(INTERRUPTED if was_interrupted else 0)


if __name__ == "__main__":
    main()
