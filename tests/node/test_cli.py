"""The command line: quick, light, honest exit codes, and errors that say what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import explain, parse_params, read_invite
from node.entry import plain_status
from node.home import Home
from protocol.errors import InviteMangledError, UsageError
from tests.house.tree import ROOT

HEAVY = {"grpc", "torch", "hivemind", "vllm", "transformers", "reasoning_gym", "fastapi", "structlog", "uvloop"}
SLOW = HEAVY | {"asyncio", "pydantic", "numpy", "rich", "google", "psutil"}
"""What a command that only asks the daemon does without."""
NOT_IN_DAEMON = {
    "torch",
    "hivemind",
    "vllm",
    "transformers",
    "reasoning_gym",
    "fastapi",
    "numpy",
    "rich",
    "pynvml",
    "pydantic",
    "typer",
}


def run(*arguments: str, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    named = {"HEXCOMB_HOME": str(home)} if home else {}
    return subprocess.run(
        [sys.executable, "-c", f"from node.cli import {arguments[0]}; {arguments[0]}()", *arguments[1:]],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **named, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        cwd=ROOT,
    )


def test_importing_the_command_line_is_light() -> None:
    code = "import sys, node.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert not SLOW & set(found.stdout.split())


def modules_after(code: str) -> set[str]:
    """The top-level modules that a process has after this code."""
    code += "; import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("place", ["--home", "HEXCOMB_HOME"])
def test_asking_the_daemon_is_light(home: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Home.create(home)
    monkeypatch.setenv("HEXCOMB_HOME", str(home) if place == "HEXCOMB_HOME" else "/nowhere")
    words = ["status", *(["--home", str(home)] if place == "--home" else [])]
    found = modules_after(
        f"import sys; from node import entry; sys.argv[1:] = {words!r}\n"
        "try: entry.main()\n"
        "except SystemExit as end: assert end.code == 3, end.code\n"
        "1"
    )
    assert "socket" in found
    assert not (SLOW | {"typer", "cryptography"}) & found


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ("status", (None, False)),
        ("status --json --home x", (Path("x"), True)),
        ("status --home=x", (Path("x"), False)),
        ("status --help", None),
        ("status --home", None),
        ("status --home --json", None),
        ("status now", None),
        ("peers", None),
        ("", None),
    ],
)
def test_only_a_plain_status_is_answered_without_the_command_line(words: str, plain: object) -> None:
    assert plain_status(words.split()) == plain


def test_both_ways_to_ask_for_the_status_say_the_same(home: Path) -> None:
    Home.create(home)
    quick, whole = (
        subprocess.run(
            [sys.executable, "-m", module, "status", "--home", str(home)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        for module in ("node.entry", "node.cli")
    )
    assert (quick.returncode, quick.stdout, quick.stderr) == (whole.returncode, whole.stdout, whole.stderr)
    assert quick.returncode == 3


def test_the_daemon_does_without_what_only_its_children_need() -> None:
    found = modules_after("from node.lean import import_log_library; import_log_library(); import node.startup")
    assert {"grpc", "structlog"} <= found
    assert not NOT_IN_DAEMON & found
    assert "rich" in modules_after("import node.startup"), "the negative control: structlog takes it along"


def test_status_without_a_daemon(home: Path) -> None:
    done = run("main", "status", home=home)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "no daemon runs here" in done.stderr
    assert "do:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["up"], 13, "not a hexcomb home"),
        (["join", "hexcomb1nonsense"], 20, "the invite cannot be read"),
        (["join", "file:/nowhere/at/all"], 2, "cannot be read"),
        (["no-such-command"], 2, "No such command"),
        (["fetch", "seven"], 2, "version"),
        (["base", "create", "base"], 2, "needs a source"),
    ],
)
def test_failures_have_their_exit_codes(home: Path, arguments: list[str], status: int, words: str) -> None:
    done = run("main", *arguments, home=home)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr


def test_up_of_a_home_that_has_not_joined(home: Path) -> None:
    Home.create(home)
    done = run("main", "up", home=home)
    assert done.returncode == 4
    assert "join-swarm" in done.stderr


def test_join_swarm_takes_the_invite_from_standard_input(home: Path) -> None:
    done = run("join_swarm", "-", "--name", "fox", stdin="hexcomb1nonsense\n", home=home)
    assert done.returncode == 20
    assert "hexcomb1nonsense" not in done.stderr


def test_identity_show_makes_the_key_once(home: Path) -> None:
    first, second = (json.loads(run("main", "identity", "show", "--json", home=home).stdout) for _ in range(2))
    assert first == second
    assert first["peer_id"] == Home.open(home).peer_id


def test_help_shows_examples() -> None:
    assert "join-swarm file:invite.txt" in run("join_swarm", "--help").stdout.replace("\n", " ")
    assert "hexcomb status --json" in run("main", "status", "--help").stdout.replace("\n", " ")


def test_invites_from_argument_and_file(tmp_path: Path) -> None:
    path = tmp_path / "invite.txt"
    path.write_text("hexcomb1abc\n")
    assert read_invite("hexcomb1xyz") == "hexcomb1xyz"
    assert read_invite(f"file:{path}") == "hexcomb1abc"


def test_params_are_typed() -> None:
    assert parse_params(["a=2", "b=0.5", "c=true", "d=word", 'e="2"']) == {
        "a": 2,
        "b": 0.5,
        "c": True,
        "d": "word",
        "e": '"2"',
    }
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_params(["a"])


def test_an_error_is_told_in_three_lines() -> None:
    error = InviteMangledError("the invite cannot be read", why="it is torn", remedy="Copy it again.")
    assert explain(error) == "error: the invite cannot be read\n  why: it is torn\n  do:  Copy it again."
