"""The coordinator's home: made once, private, and each damage told as its own error."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.home import CoordinatorHome
from protocol.errors import HomeInUseError, IdentityError, KeyFileExposedError
from protocol.ids import Version


@pytest.fixture
def path(home: Path) -> Path:
    CoordinatorHome.ensure(home)
    return home


def test_a_home_is_made_once_and_stays_the_same(home: Path) -> None:
    made = CoordinatorHome.ensure(home)
    CoordinatorHome.ensure(home)
    again = CoordinatorHome.open(home)
    assert (again.run_id, again.run_secret) == (made.run_id, made.run_secret)
    assert again.identity.seed == made.identity.seed
    for name in ("identity.key", "run.secret", "run.id"):
        assert (home / name).stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(made)
    assert "private" not in repr(made)


def test_each_home_is_another_run(make_home: Callable[[], Path]) -> None:
    homes = [CoordinatorHome.ensure(make_home()) for _ in range(3)]
    assert len({home.run_id for home in homes}) == len({home.identity.peer_id for home in homes}) == 3


def test_each_version_has_a_secret_of_its_own(make_home: Callable[[], Path]) -> None:
    one, two = (CoordinatorHome.ensure(make_home()) for _ in range(2))
    secrets = [home.seed_secret(Version(version)) for home in (one, two) for version in range(4)]
    assert len(set(secrets)) == 8
    assert {len(secret) for secret in secrets} == {32}
    assert CoordinatorHome.open(one.path).seed_secret(Version(3)) == secrets[3]


def test_a_folder_without_a_key_is_no_home(make_home: Callable[[], Path]) -> None:
    with pytest.raises(IdentityError, match="serve RUNFILE"):
        CoordinatorHome.open(make_home())


def test_a_home_that_cannot_be_made_is_told(path: Path) -> None:
    with pytest.raises(IdentityError, match="--home"):
        CoordinatorHome.ensure(path / "identity.key" / "below")


@pytest.mark.parametrize("name", ["identity.key", "run.secret", "run.id"])
def test_a_file_that_others_can_read_is_refused(path: Path, name: str) -> None:
    (path / name).chmod(0o640)
    with pytest.raises(KeyFileExposedError, match="chmod 600"):
        CoordinatorHome.ensure(path)


def test_a_folder_that_others_can_enter_is_refused(path: Path) -> None:
    path.chmod(0o750)
    with pytest.raises(KeyFileExposedError, match="chmod 700"):
        CoordinatorHome.open(path)
    path.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("identity.key", b""),
        ("identity.key", b"hexcomb-key-1 00 x\n"),
        ("run.id", b""),
        ("run.id", b"\xff" * 32),
        ("run.id", b"AB" * 16),
        ("run.secret", b""),
        ("run.secret", b"s" * 31),
        ("run.id", None),
        ("run.secret", None),
    ],
)
def test_a_damaged_home_is_refused_and_never_remade(path: Path, name: str, content: bytes | None) -> None:
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
        (path / name).chmod(0o600)
    for how in (CoordinatorHome.open, CoordinatorHome.ensure):
        with pytest.raises(IdentityError, match="backup"):
            how(path)
    now = {file.name: file.read_bytes() for file in path.iterdir()}
    assert {key: value for key, value in now.items() if key != name} == {k: v for k, v in before.items() if k != name}


def test_a_key_behind_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    (path / "identity.key").rename(tmp_path / "elsewhere")
    (path / "identity.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError, match="symbolic link"):
        CoordinatorHome.open(path)


def test_a_home_has_one_coordinator(path: Path) -> None:
    home = CoordinatorHome.open(path)
    with home.hold(), pytest.raises(HomeInUseError, match=str(os.getpid())), CoordinatorHome.open(path).hold():
        pass
    with home.hold():
        pass


def test_addresses_are_remembered_and_a_damaged_file_is_told(path: Path) -> None:
    home = CoordinatorHome.open(path)
    assert home.read_addresses() == {}
    home.write_addresses({"join": "127.0.0.1:1"})
    assert home.read_addresses() == {"join": "127.0.0.1:1"}
    assert (path / "addresses.json").stat().st_mode & 0o777 == 0o600
    for content in (b"", b"{", b"[]", json.dumps({"join": 7}).encode(), b"\xff"):
        (path / "addresses.json").write_bytes(content)
        with pytest.raises(IdentityError, match=r"addresses\.json"):
            home.read_addresses()
