"""The owner's settings of one node: `node.toml` in the home folder, with options of the command line over it.

Every key is known; an unknown one is refused with the nearest that would be valid. Impure only in the two
functions that read and write the file.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import UnknownSettingError, UsageError

FILE_NAME = "node.toml"
RoleWish = Literal["auto", "trainer", "rollout"]
EngineWish = Literal["auto", "vllm", "transformers"]


class NodeSettings(BaseModel):
    """What the owner decides about a node.

    `listen_host` is the address on which the peer service and the DHT peer listen, and under which others
    dial them; the default keeps a node to its own machine, which suits trials. `threads` is for the engine or the
    trainer, 0 = one for each core; a tiny model is fastest with one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("", max_length=64)
    listen_host: str = Field("127.0.0.1", min_length=1, max_length=253)
    role: RoleWish = "auto"
    engine: EngineWish = "auto"
    threads: int = Field(0, ge=0, le=1024)
    capability_in_hello: bool = True
    directory: bool = True


def read_settings(home_root: Path, *, options: dict[str, Any] | None = None) -> NodeSettings:
    """The home's settings with `options` (those that are not None) over them. Raises `UsageError`."""
    path = home_root / FILE_NAME
    try:
        values = tomllib.loads(path.read_text()) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", why=str(error), remedy="Mend or delete the file.") from error
    chosen = {key: value for key, value in (options or {}).items() if value is not None}
    return check_settings({**values, **chosen}, source=str(path))


def check_settings(values: dict[str, Any], *, source: str) -> NodeSettings:
    """The settings, once every key is known and every value in range. Raises `UsageError` or
    `UnknownSettingError`."""
    for key in values:
        if key not in NodeSettings.model_fields:
            raise _unknown(key, source)
    try:
        return NodeSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"setting {key!r} in {source} is refused", why=first["msg"]) from error


def write_settings(home_root: Path, settings: NodeSettings) -> None:
    """Writes those settings that differ from the defaults, so that `up` finds what `join` was told."""
    import tomlkit

    document = tomlkit.document()
    for key, value in settings.model_dump(exclude_defaults=True).items():
        document[key] = value
    if document:
        (home_root / FILE_NAME).write_text(tomlkit.dumps(document))


def _unknown(key: str, source: str) -> UnknownSettingError:
    near = difflib.get_close_matches(key, list(NodeSettings.model_fields), n=1, cutoff=0.0)
    return UnknownSettingError(
        f"{source} has an unknown setting {key!r}", remedy=f"Did you mean {near[0]!r}? Nothing was started."
    )
