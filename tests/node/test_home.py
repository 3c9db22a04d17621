import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.home import Home
from node.home_path import default_home
from protocol.errors import HomeInUseError, IdentityError, KeyFileExposedError
from protocol.keys import Identity
from protocol.runtime import user_runtime_folder

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30


@pytest.fixture(autouse=True)
def _private_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "xdg"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("HEXCOMB_HOME", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.create(tmp_path / "home")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def key_file(home: Home) -> Path:
    return home.path / "identity.key"


def test_a_new_home_is_private(home: Home) -> None:
    assert mode_of(home.path) == mode_of(home.blobs) == 0o700
    assert mode_of(key_file(home)) == 0o600
    assert Home.open(home.path).identity.seed == home.identity.seed
    assert home.peer_id.startswith("12D3Koo")


def test_a_loose_umask_changes_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        home = Home.create(tmp_path / "home")
        assert mode_of(home.path) == mode_of(home.runtime_folder()) == 0o700
        assert mode_of(key_file(home)) == 0o600
    finally:
        os.umask(before)


def test_two_homes_have_two_keys(home: Home, tmp_path: Path) -> None:
    assert Home.create(tmp_path / "other").peer_id != home.peer_id


def test_a_key_is_never_overwritten(home: Home) -> None:
    before = key_file(home).read_bytes()
    with pytest.raises(IdentityError, match="never overwritten"):
        Home.create(home.path)
    key_file(home).write_bytes(b"")
    with pytest.raises(IdentityError, match="never overwritten"):
        Home.create(home.path)
    key_file(home).write_bytes(before)
    assert Home.ensure(home.path).peer_id == home.peer_id


def test_a_dangling_link_in_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "identity.key").symlink_to(tmp_path / "elsewhere")
    for attempt in (Home.create, Home.ensure, Home.open):
        with pytest.raises(IdentityError):
            attempt(tmp_path / "home")
    assert not (tmp_path / "elsewhere").exists()


def test_ensure_creates_once(tmp_path: Path) -> None:
    first = Home.ensure(tmp_path / "deep" / "home")
    assert Home.ensure(tmp_path / "deep" / "home").peer_id == first.peer_id


def test_no_home_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="join-swarm INVITE"):
        Home.open(tmp_path / "nothing")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_key_file_open_to_others_is_refused(home: Home, mode: int) -> None:
    key_file(home).chmod(mode)
    with pytest.raises(KeyFileExposedError, match=f"{mode:04o}.*chmod 600"):
        Home.open(home.path)
    assert mode_of(key_file(home)) == mode, "refused, not repaired"


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o701, 0o1777])
def test_a_home_folder_open_to_others_is_refused(home: Home, mode: int) -> None:
    home.path.chmod(mode)
    with pytest.raises(KeyFileExposedError, match="chmod 700"):
        Home.open(home.path)


def test_an_empty_folder_becomes_a_home_and_a_full_one_is_left_alone(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for folder in (empty, full):
        folder.mkdir()
        folder.chmod(0o755)
    (full / "thesis.tex").write_text("mine")
    Home.create(empty)
    assert mode_of(empty) == 0o700
    with pytest.raises(KeyFileExposedError):
        Home.create(full)
    assert mode_of(full) == 0o755
    assert [path.name for path in full.iterdir()] == ["thesis.tex"]


def test_links_are_refused(home: Home, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home.path)
    with pytest.raises(IdentityError, match="link"):
        Home.open(tmp_path / "link")
    moved = tmp_path / "moved.key"
    key_file(home).rename(moved)
    key_file(home).symlink_to(moved)
    with pytest.raises(IdentityError, match="symbolic link"):
        Home.open(home.path)


def test_what_is_not_a_plain_file_is_refused_without_a_hang(home: Home) -> None:
    key_file(home).unlink()
    os.mkfifo(key_file(home), 0o600)
    with pytest.raises(IdentityError, match="plain file"):
        Home.open(home.path)
    key_file(home).unlink()
    key_file(home).mkdir(mode=0o700)
    with pytest.raises(IdentityError, match="plain file"):
        Home.open(home.path)


def test_the_key_of_another_user_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(IdentityError, match="runs as user 12345"):
        Home.open(home.path)


def test_a_file_in_the_way_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="--home"):
        Home.create(tmp_path / "file" / "home")


@pytest.mark.parametrize("length", [0, 1, 14, 50, 78, 100, -1])
def test_a_truncated_key_is_refused(home: Home, length: int) -> None:
    whole = key_file(home).read_bytes()
    key_file(home).write_bytes(whole[:length])
    with pytest.raises(IdentityError, match="backup"):
        Home.open(home.path)


def test_a_key_under_another_name_is_refused(home: Home, tmp_path: Path) -> None:
    other = Home.create(tmp_path / "other")
    key_file(home).write_text(f"hexcomb-key-1 {home.identity.seed.hex()} {other.peer_id}\n")
    with pytest.raises(IdentityError, match="do not belong together"):
        Home.open(home.path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), position=st.integers(0, 130), mask=st.integers(1, 255))
def test_no_other_bytes_are_that_key(home: Home, data: bytes, position: int, mask: int) -> None:
    whole = bytearray(f"hexcomb-key-1 {home.identity.seed.hex()} {home.peer_id}\n".encode())
    whole[position] ^= mask
    for content in (data, bytes(whole)):
        key_file(home).write_bytes(content)
        with contextlib.suppress(IdentityError):
            assert Home.open(home.path).peer_id == home.peer_id  # upper case spells the same seed


def test_an_error_about_a_key_does_not_show_it(home: Home) -> None:
    key_file(home).write_text(f"hexcomb-key-1 {home.identity.seed.hex()} {home.peer_id}")
    with pytest.raises(IdentityError) as caught:
        Home.open(home.path)
    assert home.identity.seed.hex() not in caught.value.sentence()


HOLD = """
import sys
from pathlib import Path
from node.home import Home
with Home.open(Path(sys.argv[1])).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(path: Path) -> "subprocess.Popen[str]":
    """Another process that holds the home until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_daemon_on_one_home_is_refused_by_name(home: Home) -> None:
    with holding(home.path) as first:
        with pytest.raises(HomeInUseError, match=rf"home.*process id {first.pid}\b"), home.hold():
            pass
        first.kill()
    with home.hold():
        pass


def test_a_copied_key_is_refused(home: Home, tmp_path: Path) -> None:
    shutil.copytree(home.path, tmp_path / "copy")
    with holding(home.path) as first:
        copy = Home.open(tmp_path / "copy")
        with pytest.raises(HomeInUseError, match=rf"key of {home.peer_id}.*process id {first.pid}\b"), copy.hold():
            pass
        first.communicate(timeout=TIMEOUT_S)
    with copy.hold():
        pass


def test_a_refused_daemon_leaves_the_first_lock_free(home: Home, tmp_path: Path) -> None:
    """The copy is refused by its key; its own folder must not stay locked."""
    shutil.copytree(home.path, tmp_path / "copy")
    copy = Home.open(tmp_path / "copy")
    with home.hold(), pytest.raises(HomeInUseError), copy.hold():
        pass
    with copy.hold():
        pass


def test_two_homes_run_side_by_side(home: Home, tmp_path: Path) -> None:
    with home.hold(), Home.create(tmp_path / "other").hold():
        assert home.runtime_folder() != Home.open(tmp_path / "other").runtime_folder()


def test_a_lock_does_not_pass_to_children(home: Home) -> None:
    child_code = "import sys; sys.stdin.read()"
    with home.hold():
        child = subprocess.Popen([sys.executable, "-c", child_code], stdin=subprocess.PIPE)
    with child, home.hold():
        child.communicate(timeout=TIMEOUT_S)


def test_the_socket_path_is_short_enough(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path("/tmp/h")
    assert Home(short, home.identity).socket == short / "daemon.sock"
    deep = Home(tmp_path / ("d" * 100), home.identity)
    assert deep.socket == deep.runtime_folder() / "daemon.sock"


def test_without_a_session_folder_the_temporary_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = user_runtime_folder()
    assert folder == tmp_path / f"hexcomb-{os.geteuid()}"
    assert mode_of(folder) == 0o700
    folder.chmod(0o777)
    with pytest.raises(KeyFileExposedError):
        user_runtime_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(IdentityError, match="link"):
        user_runtime_folder()


def test_the_libp2p_file(home: Home) -> None:
    path = home.runtime_folder() / "p2p.key"
    for _ in range(2):
        home.write_libp2p_identity(path)
    raw = path.read_bytes()
    assert mode_of(path) == 0o400
    assert raw == bytes.fromhex("08011240") + home.identity.seed + home.identity.public_bytes
    assert Identity.from_seed(raw[4:36]).peer_id == home.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["p2p.key"]


def test_where_home_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_home().name == "hexcomb"
    monkeypatch.setenv("HEXCOMB_HOME", str(tmp_path / "mine"))
    assert default_home() == tmp_path / "mine"
