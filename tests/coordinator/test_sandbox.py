"""The sandbox: layers keep its promises alone, what is missing is named, what may be read is what imports need."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.sandbox import Protection, readable_by_python
from coordinator.sandbox_filter import ALLOW, EPERM, MACHINES, REFUSE, REFUSED, program
from tests.house.tree import ROOT

TRY = """
import os, socket, sys
from coordinator import sandbox

def refuse(*_):
    raise OSError("not here")

for name in sys.argv[2:]:
    setattr(sandbox, name, refuse)
box = sandbox.Sandbox()
if "leave" not in sys.argv[1]:
    box._try = (lambda do: lambda step: do(step))(box._try)
if "leave" in sys.argv[1]:
    box.leave_world()
kept = box.close(sandbox.readable_by_python(None, []), memory_bytes=1 << 30, written_bytes=1 << 20)
print("lacks:", *sorted(one.promise for one in kept if not one.by), sep=" / ")

def fetch():
    with socket.socket() as here:
        here.settimeout(5)
        here.connect(("127.0.0.1", int(os.environ["PORT"])))

for name, act in (
    ("fork", lambda: os.fork() or os._exit(0)),
    ("signal", lambda: os.kill(os.getppid(), 0)),
    ("read", lambda: open("/proc/self/environ").read()),
    ("write", lambda: open("/tmp/hexcomb-sandbox-test", "w").close()),
    ("connect", fetch),
):
    try:
        act()
    except OSError:
        continue
    print("could", name)
"""


def attempts(layers: str, *missing: str) -> tuple[set[str], str]:
    """What succeeded in a process with these layers, and what the sandbox said that it lacks."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {"PYTHONPATH": str(ROOT), "PORT": str(server.getsockname()[1])}
        command = [sys.executable, "-c", TRY, layers, *missing]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    return {line.removeprefix("could ") for line in lines if line.startswith("could ")}, lines[0]


@pytest.mark.parametrize(
    ("layers", "missing", "could"),
    [
        ("leave", (), set()),
        ("leave", ("_restrict_files",), {"read", "write"}),
        ("", (), set()),
        ("", ("_restrict_files",), {"read", "write"}),
        ("leave", ("_install_filter",), {"fork"}),
        ("", ("_install_filter", "_restrict_files"), {"fork", "signal", "read", "write", "connect"}),
    ],
)
def test_layers_stand_for_each_other(layers: str, missing: tuple[str, ...], could: set[str]) -> None:
    succeeded, lacks = attempts(layers, *missing)
    assert succeeded == could
    named = {"fork": "no other process", "signal": "no signal", "read": "no file", "connect": "no network"}
    assert {word for word, promise in named.items() if promise in lacks} == could - {"write"}


def test_what_is_missing_is_said() -> None:
    assert Protection("no network", ("namespaces", "seccomp")).sentence == "no network (namespaces, seccomp)"
    assert "NOT" in Protection("no network", ()).sentence


# The filter


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_filter_refuses_each_call_of_its_machine(machine: str) -> None:
    steps = list(struct.iter_unpack("HBBI", program(machine, 4321)))
    column = list(MACHINES).index(machine)
    for name, number in REFUSED[column].items():
        assert answer_of(steps, machine, number) == REFUSE | EPERM, name
    kill = {"x86_64": 62, "aarch64": 129}[machine]
    assert answer_of(steps, machine, kill, argument=4321) == ALLOW
    assert answer_of(steps, machine, kill, argument=4320) == REFUSE | EPERM
    assert answer_of(steps, machine, kill, argument=0xFFFFFFFF) == REFUSE | EPERM
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    assert answer_of(steps, machine, clone, argument=0x10000 | 0x100) == ALLOW
    assert answer_of(steps, machine, clone, argument=17) == REFUSE | EPERM
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert answer_of(steps, machine, read) == ALLOW


def answer_of(steps: list[tuple[int, int, int, int]], machine: str, number: int, *, argument: int = 0) -> int:
    """What the kernel would do: the program, run step by step."""
    words = {0: number, 4: MACHINES[machine], 16: argument}
    place = value = 0
    while True:
        code, yes, no, constant = steps[place]
        place += 1
        match code:
            case 0x20:
                value = words[constant]
            case 0x06:
                return constant
            case _:
                holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                place += yes if holds else no


# What may be read


def test_a_hidden_folder_is_not_readable_though_modules_beside_it_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("package/__init__.py", "module.py", "home/identity.key", "other/deep.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = readable_by_python(None, [tmp_path / "home"])
    inside = {str(path.relative_to(tmp_path)) for path in found if path.is_relative_to(tmp_path)}
    assert inside == {"package", "module.py"}
    assert tmp_path in readable_by_python(None, [])
    monkeypatch.setattr(sys, "path", [])
    assert {path for path in readable_by_python(tmp_path, []) if tmp_path in path.parents} == {
        tmp_path / "package",
        tmp_path / "module.py",
    }
