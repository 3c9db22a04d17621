"""Where a node's home is unless it is named. Impure: the environment. Imports nothing heavy, unlike `node.home`."""

import os
from pathlib import Path

HOME_VARIABLE = "HEXCOMB_HOME"


def default_home() -> Path:
    """`HEXCOMB_HOME`, or else the user's data folder."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named)
    import platformdirs

    return platformdirs.user_data_path("hexcomb")
