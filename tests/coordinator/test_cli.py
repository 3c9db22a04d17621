"""The organizer's command line as a process: exit codes, what it prints, and a coordinator that starts and stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from coordinator.cli import duration_s
from coordinator.home import CoordinatorHome
from coordinator.journal import Journal
from coordinator.journal_schema import environment_digest
from coordinator.settings import parse_run_file
from protocol.errors import UsageError
from protocol.invite import decode_invite
from protocol.tokens import load_tokenizer
from tests.coordinator.office import run_content
from tests.coordinator.test_journal import Book
from tests.house.tree import ROOT

DEADLINE_S = 60.0


def start(*words: str | Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "coordinator.cli", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def run(*words: str | Path) -> tuple[int, str, str]:
    return end_of(start(*words))


def write_run(folder: Path, base: Path, **changes: dict[str, Any]) -> Path:
    path = folder / f"run{len(list(folder.iterdir()))}.toml"
    path.write_text(tomlkit.dumps(run_content(base, **changes)))
    return path


@contextmanager
def serving(run_file: Path, home: Path) -> Iterator["subprocess.Popen[str]"]:
    """A coordinator that answers."""
    process = start("serve", run_file, "--home", home)
    try:
        ends_s = time.monotonic() + DEADLINE_S
        while not (home / "coordinator.sock").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_a_coordinator_starts_answers_stops_and_comes_back_at_the_same_ports(
    home: Path, base: Path, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, base)
    with serving(run_file, home) as process:
        _, second, _ = checked(run("serve", run_file, "--home", home), 15, "in use by the daemon")
        assert second == ""
        code, out, _ = run("invite", "create", "--home", home, "--uses", "3", "--role", "rollout", "--expires", "2h")
        invite = decode_invite(out)
        assert (code, invite.role, len(out.splitlines())) == (0, "rollout", 1)
        checked(run("invite", "create", "--home", home, "--expires", "99999999d"), 2, "2106")
        code, out, _ = run("status", "--home", home, "--json")
        assert (code, json.loads(out)["schema"]) == (0, 1)
        assert run("status", "--home", home)[0] == 0
        code, out, _ = run("replay", "--home", home, "--json")
        shown = json.loads(out)
        assert (code, shown["version"], shown["invites"], shown["balanced"]) == (0, 0, 1, True)
        assert "sound" in run("check", "--home", home)[1]
        code, out, err = run("backup", tmp_path / "copy.db", "--home", home)
        assert (code, "checked" in out) == (0, True)
        assert all(name in err for name in ("identity.key", "run.secret", "run.id"))
        addresses = json.loads((home / "addresses.json").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    assert not (home / "coordinator.sock").exists()
    with serving(run_file, home) as process:
        again = json.loads((home / "addresses.json").read_text())
        assert {name: again[name] for name in ("join", "control", "status")} == {
            name: addresses[name] for name in ("join", "control", "status")
        }
        assert json.loads(run("status", "--home", home, "--json")[1])["epoch"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    checked(run("status", "--home", home), 3, "does not answer")
    checked(run("invite", "create", "--home", home), 3, "no coordinator runs here")


def test_rewards_that_can_be_fooled_are_refused_unless_the_run_file_allows_them(
    base: Path, make_home: Callable[[], Path], tmp_path: Path
) -> None:
    graders = Path(__file__).with_name("citizens") / "graders.py"
    (tmp_path / "graders.py").write_text(graders.read_text())
    task: dict[str, Any] = {"rewards": [{"function": "graders:contains", "weight": 2.0}]}
    refused = run("serve", write_run(tmp_path, base, task=task), "--home", make_home() / "home")
    _, _, err = checked(refused, 2, "all numbers from 0 to 999 gets full marks")
    assert "allow_fooled_grader" in err
    sound = {"rewards": [{"function": "graders:exact"}]}
    for good in ({**task, "allow_fooled_grader": True}, sound):
        with serving(write_run(tmp_path, base, task=good), make_home() / "home"):
            pass


def checked(result: tuple[int, str, str], code: int, words: str) -> tuple[int, str, str]:
    """The result, once it is one error in words, with this exit code."""
    assert result[0] == code, result
    assert words in result[2]
    assert result[2].startswith("error: ")
    assert "Traceback" not in result[2]
    return result


def test_each_bad_start_has_its_words_and_its_exit_code(
    make_home: Callable[[], Path], base: Path, tmp_path: Path
) -> None:
    exposed = make_home()
    CoordinatorHome.ensure(exposed)
    (exposed / "identity.key").chmod(0o644)
    open_folder = make_home()
    CoordinatorHome.ensure(open_folder)
    open_folder.chmod(0o755)
    good = write_run(tmp_path, base)
    cases: list[tuple[Path, Path, int, str]] = [
        (tmp_path / "none.toml", make_home(), 2, "cannot be read"),
        (write_run(tmp_path, base, batch={"max_lagg": 1}), make_home(), 2, "Did you mean `batch.max_lag`?"),
        (write_run(tmp_path, base, batch={"groups": 0}), make_home(), 2, "`batch.groups` in the run file is wrong"),
        (write_run(tmp_path, tmp_path / "nowhere"), make_home(), 10, "hexcomb base create"),
        (good, exposed, 14, "chmod 600"),
        (good, open_folder, 14, "chmod 700"),
        (good, good, 13, "cannot be made"),
        (write_run(tmp_path, base, task={"environment": "no_such"}), make_home(), 2, "no_such"),
    ]
    processes = [start("serve", run_file, "--home", home) for run_file, home, _, _ in cases]
    for process, (_, _, code, words) in zip(processes, cases, strict=True):
        checked(end_of(process), code, words)
    open_folder.chmod(0o700)


def test_a_port_that_another_program_holds_ends_the_start(
    make_home: Callable[[], Path], base: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        names = ("join", "control", "status")
        homes = [make_home() for _ in names]
        processes = [
            start("serve", write_run(tmp_path, base, listen={f"{name}_port": port}), "--home", home)
            for name, home in zip(names, homes, strict=True)
        ]
        for name, process in zip(names, processes, strict=True):
            checked(end_of(process), 11, f"set `listen.{name}_port` in the run file")
    for home in homes:
        assert not (home / "addresses.json").exists()


def test_commands_that_ask_a_coordinator_say_when_there_is_none(make_home: Callable[[], Path]) -> None:
    home, nothing = make_home(), make_home()
    CoordinatorHome.ensure(home)
    exposed = make_home()
    CoordinatorHome.ensure(exposed)
    (exposed / "run.secret").chmod(0o604)
    cases: list[tuple[list[str | Path], int, str]] = [
        (["status", "--home", home], 3, "serve"),
        (["status", "--home", nothing], 13, "serve RUNFILE"),
        (["status", "--home", exposed], 14, "chmod 600"),
        (["invite", "create", "--home", home], 3, "--home"),
        (["invite", "create", "--home", home, "--role", "king"], 2, "auto, trainer or rollout"),
        (["invite", "create", "--home", home, "--expires", "soon"], 2, "such as 24h"),
    ]
    processes = [start(*words) for words, _, _ in cases]
    for process, (_, code, words) in zip(processes, cases, strict=True):
        checked(end_of(process), code, words)
    for words in (["invite", "create", "--uses", "0"], ["serve"], ["no-such-command"], ["status", "--jsno"]):
        assert run(*words)[0] == 2


def test_commands_on_a_journal(make_home: Callable[[], Path], tmp_path: Path) -> None:
    sound, damaged, empty = (CoordinatorHome.ensure(make_home()) for _ in range(3))
    for home in (sound, damaged):
        book = Book(home.journal, run_id=home.run_id)
        book.world.start()
        book.run(3)
        book.journal.close()
    data = bytearray(damaged.journal.read_bytes())
    data[-100:] = b"\xff" * 100
    damaged.journal.write_bytes(bytes(data))
    copy = tmp_path / "copy.db"
    code, out, err = run("replay", "--home", sound.path, "--until", "20")
    assert (code, err) == (0, "")
    assert all(words in out for words in ("state after fact 20", "they balance", "version 0"))
    assert run("check", "--home", sound.path)[0] == 0
    assert run("backup", copy, "--home", sound.path)[0] == 0
    cases: list[tuple[list[str | Path], int, str]] = [
        (["backup", copy, "--home", sound.path], 2, "never overwrites"),
        (["replay", "--home", sound.path, "--until", "99999"], 2, "no fact 99999 yet"),
        (["replay", "--home", sound.path, "--until", "soon"], 2, "neither a fact's number nor a time"),
        (["check", "--home", damaged.path], 1, "put a backup in its place"),
        (["backup", tmp_path / "other.db", "--home", damaged.path], 16, "damaged"),
        (["check", "--home", empty.path], 1, "could not be read"),
        (["replay", "--home", empty.path], 16, "could not be read"),
        (["replay", "--home", make_home()], 13, "not a coordinator's home"),
    ]
    processes = [start(*words) for words, _, _ in cases]
    for process, (_, code, words) in zip(processes, cases, strict=True):
        checked(end_of(process), code, words)
    assert not (tmp_path / "other.db").exists()


def test_another_task_section_on_an_old_journal_ends_the_start(
    make_home: Callable[[], Path], base: Path, tmp_path: Path
) -> None:
    home = CoordinatorHome.ensure(make_home())
    pin = environment_digest(parse_run_file(run_content(base)).rules(home.run_id, load_tokenizer(base)).spec)
    Journal(home.journal, run_id=home.run_id, environment=pin).close()
    book = Book(home.journal, run_id=home.run_id)
    book.world.start()
    book.world.lease()
    book.write()
    book.journal.close()
    other = write_run(tmp_path, base, task={"seed": 8})
    checked(run("serve", other, "--home", home.path), 16, "its [task] section is not the one with which the run began")


def test_help_names_every_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in ("serve", "invite", "status", "demo", "replay", "backup", "check"))
    assert os.environ["HEXCOMB_HOME"] not in out


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("90m", 5400.0), ("24h", 86_400.0), ("7d", 604_800.0), ("007d", 604_800.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "7", "0d", "-1d", "1.5h", "7 d", "7D", "\u00b2d", "1w", "7d\n"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24h"):
        duration_s(text)
