"""The private run-time folder: short paths for sockets and temporary files of one home. Impure: makes folders."""

import hashlib
import os
import tempfile
from pathlib import Path

from protocol.private_files import check_private_folder

MAX_SOCKET_PATH_BYTES = 100
"""Linux allows 107, other systems 103."""


def user_runtime_folder() -> Path:
    """The user's private folder for locks and sockets, the same for every home of this user, made if missing."""
    named = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    base = Path(named)
    if base.is_dir() and base.stat().st_uid == os.geteuid() and os.access(base, os.W_OK):
        folder = base / "hexcomb"
    else:
        folder = Path(tempfile.gettempdir()) / f"hexcomb-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(folder)
    return folder


def home_runtime_folder(home: Path) -> Path:
    """A private folder with a short path for the home at `home`, made if missing."""
    name = hashlib.sha256(os.fsencode(spelled_once(home))).hexdigest()[:12]
    folder = user_runtime_folder() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(folder)
    return folder


def home_socket(home: Path, name: str) -> Path:
    """Where the owner of the home answers: in the home, or in its run-time folder if that path is too long."""
    path = spelled_once(home) / name
    return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else home_runtime_folder(home) / name


def spelled_once(path: Path) -> Path:
    """One spelling for one folder, so that daemon and command line derive the same run-time folder from it."""
    path = path.expanduser().absolute()
    return path.parent.resolve() / path.name


def own(folder: Path) -> None:
    """Makes an empty folder of ours private; one with files in it may serve others and is left as it is."""
    if not folder.is_symlink() and folder.stat().st_uid == os.geteuid() and not any(folder.iterdir()):
        folder.chmod(0o700)
