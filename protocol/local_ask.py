"""The caller's side of a daemon's Unix socket, in plain blocking calls: a command line answers before an event loop
would be imported. Impure: a socket.

Invariant: what the daemon answers as an error is raised as the same class here, by this and by the asynchronous `ask`.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any

from protocol.errors import ERRORS_BY_CODE, DaemonNotRunningError, HexcombError, UnreachableError

RECEIVE_BYTES = 1 << 16


def ask_now(path: Path, verb: str, *, who: str = "daemon", deadline_s: float = 30.0, **fields: Any) -> dict[str, Any]:
    """The answer of whoever listens at `path`. Raises the error that it answers, `DaemonNotRunningError` when nobody
    listens, `UnreachableError` when no answer comes in time."""
    ends_s = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(deadline_s)
            channel.connect(str(path))
            channel.sendall(request_line(verb, fields))
            line = bytearray()
            while not line.endswith(b"\n"):
                channel.settimeout(max(ends_s - time.monotonic(), 0.001))
                part = channel.recv(RECEIVE_BYTES)
                if not part:
                    break
                line += part
        answer = json.loads(line)
    except TimeoutError as error:
        raise too_late(who, verb, deadline_s) from error
    except (OSError, ValueError) as error:  # ValueError: it ended in mid-answer
        raise not_running(who, path) from error
    return answer_in(answer)


def request_line(verb: str, fields: dict[str, Any]) -> bytes:
    """A request as it travels."""
    return json.dumps({"verb": verb, **fields}).encode() + b"\n"


def answer_in(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, unless it is an error, which is raised."""
    if "error" in answer:
        said = answer["error"]
        kind = ERRORS_BY_CODE.get(said["code"], HexcombError)
        raise kind(said["what"], why=said["why"], remedy=said["remedy"])
    return dict(answer)


def too_late(who: str, verb: str, deadline_s: float) -> UnreachableError:
    """No answer came in time."""
    return UnreachableError(f"the {who} did not answer `{verb}` within {deadline_s:g} s")


def not_running(who: str, path: Path) -> DaemonNotRunningError:
    """Nobody listens."""
    return DaemonNotRunningError(
        f"no {who} runs here",
        why=f"nobody answers at {path}",
        remedy="Start it, or name the right folder with --home.",
    )
