"""The daemon's own log is bounded; a file that its owner has redirected standard error to is left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from node.home import Home

TALK = """
import sys, structlog
from pathlib import Path
import node.startup as startup
import protocol.child_session as session
from node.home import Home
startup.MAX_LOG_BYTES = session.MAX_LOG_BYTES = 2000
startup.set_up_logging(Home.open(Path(sys.argv[1])))
log = structlog.get_logger("talker")
for number in range(200):
    log.info("a word", number=number)
print("the end", file=sys.stderr)
"""


def talk(home: Home, log_path: Path) -> None:
    """A process that logs two hundred lines, its standard error in this file."""
    with log_path.open("ab") as log:
        subprocess.run([sys.executable, "-c", TALK, str(home.path)], stderr=log, check=True, timeout=60)


@pytest.mark.parametrize("is_own", [True, False], ids=["own log", "redirected by its owner"])
def test_daemon_log_is_bounded(home: Path, tmp_path: Path, is_own: bool) -> None:
    node_home = Home.create(home)
    own = node_home.path / "logs" / "daemon.log"
    own.parent.mkdir()
    log_path = own if is_own else tmp_path / "elsewhere.log"
    talk(node_home, log_path)
    lines = log_path.read_text().splitlines()
    assert lines[-1] == "the end"
    assert "number=199" in lines[-2]
    old = log_path.with_suffix(".log.old")
    assert old.exists() == is_own
    assert (log_path.stat().st_size < 3000) == is_own
    if is_own:
        assert old.stat().st_size < 3000
