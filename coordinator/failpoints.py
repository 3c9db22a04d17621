"""Places where a test can make the coordinator die or its disk fail. Impure: it may end the process.

Invariant: unless `HEXCOMB_FAILPOINTS` was set when the process started, `failpoint` looks a name up in an empty
dictionary and does nothing. The variable is a list such as `journal.before_commit=kill@3,journal.after_facts=eio`:
`kill` ends the process as `kill -9` would, `eio` and `enospc` raise what a bad or full disk raises, `@3` means at the
third time (without it, at the first).
"""

import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.errors import UsageError

VARIABLE = "HEXCOMB_FAILPOINTS"
NAMES = (
    "authority.before_decide",
    "authority.before_append",
    "journal.before_begin",
    "journal.after_facts",
    "journal.after_rollouts",
    "journal.after_snapshot",
    "journal.after_truncation",
    "journal.before_commit",
    "journal.after_commit",
    "authority.before_reply",
    "schema.before_commit",
)
"""In the order in which a batch of events meets them; the last is in the migration of an older journal."""

_ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}


@dataclass(slots=True)
class Failure:
    """What happens at a place; `num_left` counts down to it."""

    kind: str
    num_left: int

    def reach(self) -> None:
        """Dies, or raises `OSError`, if it is time."""
        self.num_left -= 1
        if self.num_left:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = _ERRORS[self.kind]
        raise OSError(number, os.strerror(number))


def parse_failpoints(text: str) -> dict[str, Failure]:
    """The failures that a value of the variable names. Raises `UsageError`."""
    failures: dict[str, Failure] = {}
    for item in filter(None, text.split(",")):
        name, _, action = item.partition("=")
        kind, _, count = action.partition("@")
        number = count or "1"
        if name not in NAMES or kind not in ("kill", *_ERRORS) or not number.isdecimal() or int(number) == 0:
            raise UsageError(
                f"{VARIABLE} is wrong",
                why=f"{item!r} is not NAME=kill, NAME=eio or NAME=enospc with a known name",
                remedy=f"Unset it. It is for tests; the names are {', '.join(NAMES)}.",
            )
        failures[name] = Failure(kind, int(number))
    return failures


_armed: Mapping[str, Failure] = parse_failpoints(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """A place of that name was reached."""
    failure = _armed.get(name)
    if failure is not None:
        failure.reach()
