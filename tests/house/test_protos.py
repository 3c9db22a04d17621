"""The checked-in stubs are what the checked-in protos give, and buf's lint says so of their style."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

FOLDER = Path("protocol", "v1")
BIN = Path(sys.executable).parent


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the protos alone."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for path in sorted((ROOT / FOLDER).glob("*.proto")):
        shutil.copy(path, tmp_path / FOLDER)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def generate(folder: Path) -> dict[str, bytes]:
    """Generates all stubs in the folder, as `make protos` does; returns name -> content."""
    plugins = [f"--plugin={name}={BIN / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [
        "--python_out=.",
        "--grpc_python_out=.",
        "--mypy_out=readable_stubs:.",
        "--mypy_grpc_out=only_async:.",
    ]
    names = sorted(str(path.relative_to(folder)) for path in (folder / FOLDER).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *outputs, *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return stubs(folder)


def stubs(root: Path) -> dict[str, bytes]:
    """The generated files below a root, by name."""
    return {path.name: path.read_bytes() for path in sorted((root / FOLDER).glob("*_pb2*.py*"))}


def differing(made: dict[str, bytes], checked_in: dict[str, bytes]) -> list[str]:
    """Names of stubs that are missing, left over or different."""
    return sorted(name for name in made.keys() | checked_in.keys() if made.get(name) != checked_in.get(name))


def test_checked_in_stubs_are_current(protos: Path) -> None:
    made = generate(protos)
    assert len(made) >= 4
    assert differing(made, stubs(ROOT)) == [], "run `make protos`"


def test_a_changed_proto_is_caught(protos: Path) -> None:
    path = protos / FOLDER / "peer.proto"
    path.write_text(path.read_text().replace("service PeerService", "service PlantedService"))
    assert "peer_pb2.py" in differing(generate(protos), stubs(ROOT))


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs buf's lint in the folder."""
    return subprocess.run(
        [str(BIN / "buf"), "lint"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_protos_are_well_styled(protos: Path) -> None:
    result = lint(protos)
    assert (result.returncode, result.stdout) == (0, "")


def test_bad_style_is_caught(protos: Path) -> None:
    with (protos / FOLDER / "peer.proto").open("a") as file:
        file.write("\nmessage badName { string someField = 1; }\n")
    result = lint(protos)
    assert result.returncode != 0
    assert "badName" in result.stdout
