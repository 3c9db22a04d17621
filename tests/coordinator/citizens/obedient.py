"""Reward functions that do what the completion says; they are run in the sandbox, where it must fail."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


def obey(prompts: list[str], completions: list[str], **kwargs: Any) -> list[Any]:
    """One value for each completion, if they let it."""
    values = [obey_one(completion) for completion in completions]
    return [*values, *[1.0] * completions.count("too many")]


async def obey_later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[Any]:
    """The same, and sleeps where it is told to."""
    await asyncio.sleep(0)
    if "sleep" in completions:
        await asyncio.sleep(3600)
    if "block" in completions:
        time.sleep(3600)  # noqa: ASYNC251
    if "linger" in completions:
        kwargs["keep"] = asyncio.create_task(asyncio.sleep(3600))
    return obey(prompts, completions)


def obey_one(word: str) -> Any:
    """1 where something forbidden succeeded."""
    word, _, rest = word.partition(" ")
    match word:
        case "wrong":
            return 0
        case "ignore":
            return None
        case "nan" | "inf":
            return float(word)
        case "string":
            return "1.0"
        case "huge":
            return 1e300
        case "environment":
            return float("HEXCOMB_TEST_RUN" in os.environ)
        case "read":
            return float(bool(Path(rest).read_bytes()))
        case "list":
            return float(bool(os.listdir(rest)))
        case "chmod":
            os.chmod(rest, 0o644)
        case "write":
            Path(rest).write_text("x")
        case _:
            act(word)
    return 1.0


def act(word: str) -> None:
    match word:
        case "loop":
            while True:
                pass
        case "stubborn":
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(3600)
        case "freeze":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
            time.sleep(3600)
        case "raise":
            raise ValueError("x" * (1 << 20))
        case "alien":
            raise GeneratorExit
        case "recurse":
            json.loads("[" * 10**6)
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(0)
        case "crash":
            signal.raise_signal(signal.SIGSEGV)
        case "allocate":
            bytearray(100 << 30)
        case "hoard":
            hoard = [bytearray(1 << 20)]
            while True:
                hoard.append(bytearray(1 << 20))
        case _:
            intrude(word)


def intrude(word: str) -> None:
    match word:
        case "print":
            for _ in range(1 << 10):
                print("x" * (1 << 20))
        case "spill":
            for _ in range(1 << 10):
                if os.write(1, bytes(1 << 20)) < 1 << 20:
                    raise OSError("it does not fit")
        case "fork":
            if os.fork() == 0:
                os._exit(0)
        case "bomb":
            while True:
                os.fork()
        case "threads":
            for _ in range(10**6):
                threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        case "kill":
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
        case "murder":
            os.kill(os.getppid(), signal.SIGKILL)
        case "massacre":
            os.kill(-1, signal.SIGKILL)
        case "notice":
            os.kill(os.getppid(), 0)
        case "throttle":
            resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))
        case "replace":
            os.execv(sys.executable, [sys.executable, "-c", "pass"])
        case "network":
            urllib.request.urlopen("http://127.0.0.1:1/")
        case "socket":
            socket.socket().close()
        case "file":
            tempfile.mkstemp()
        case "garbage":
            write_everywhere(b"\xff" * 64)
        case "flood":
            write_everywhere((200 << 20).to_bytes(4, "big") + bytes(1 << 16))


def write_everywhere(content: bytes) -> None:
    """To the pipe to the coordinator, whichever it is."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, content)
