"""The owner's settings of one node: `node.toml` in the home folder, with options of the command line over it.

Every key is known; an unknown one is refused with the nearest that would be valid. Impure only in the two
functions that read and write the file.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from node.limits import Limits, parse_hours
from protocol.errors import UnknownSettingError, UsageError

FILE_NAME = "node.toml"
MIN_MBIT_PER_S = 1.0
RoleWish = Literal["auto", "trainer", "rollout"]
EngineWish = Literal["auto", "vllm", "transformers"]


class LimitSettings(BaseModel):
    """`[limits]`: what the machine's owner lets the node take. 0, empty or false = no such limit.

    `hours` are ranges of the local clock like `22:00-07:00, 12:30-13:30`. `idle_only_s`: work only after others have
    left the machine alone for so long, where a share over `idle_cpu_share` of all cores, use of a GPU or typing at a
    terminal is use. `pause_on_gpu_use`: not while others compute on a GPU. `gpu_memory_share` (0 to 1) goes to engine
    and trainer. `power_cap_w` is set on each GPU; with `power_cap_required` no work begins on a GPU without it.
    `memory_bytes` bounds daemon and children together, `cpu_threads` the threads of engine or trainer. The rates are of
    weights passed on and fetched.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hours: str = Field("", max_length=200)
    idle_only_s: float = Field(0.0, ge=0, le=86_400)
    idle_cpu_share: float = Field(0.2, gt=0, le=1)
    pause_on_gpu_use: bool = False
    gpu_memory_share: float = Field(0.0, ge=0, le=1)
    power_cap_w: float = Field(0.0, ge=0, le=10_000)
    power_cap_required: bool = False
    cpu_threads: int = Field(0, ge=0, le=1024)
    memory_bytes: int = Field(0, ge=0)
    upload_mbit_per_s: float = Field(0.0, ge=0)
    download_mbit_per_s: float = Field(0.0, ge=0)

    @field_validator("hours")
    @classmethod
    def _check_hours(cls, text: str) -> str:
        parse_hours(text)
        return text

    @field_validator("upload_mbit_per_s", "download_mbit_per_s")
    @classmethod
    def _check_rate(cls, rate: float) -> float:
        if 0 < rate < MIN_MBIT_PER_S:
            raise ValueError(f"below {MIN_MBIT_PER_S:g} Mbit/s a chunk takes longer than others wait for it")
        return rate

    @model_validator(mode="after")
    def _check_cap(self) -> "LimitSettings":
        if self.power_cap_required and not self.power_cap_w:
            raise ValueError("power_cap_required needs a power_cap_w")
        return self

    def standing(self) -> Limits:
        """Those that decide when the node works."""
        return Limits(
            hours=parse_hours(self.hours),
            hours_text=self.hours,
            idle_only_s=self.idle_only_s,
            pause_on_gpu_use=self.pause_on_gpu_use,
            power_cap_w=self.power_cap_w,
            power_cap_required=self.power_cap_required,
        )

    def words(self) -> dict[str, Any]:
        """Those that are set, for people."""
        return self.model_dump(exclude_defaults=True)


class NodeSettings(BaseModel):
    """What the owner decides about a node.

    `listen_host` is the address on which the peer service and the DHT peer listen, and under which others
    dial them; the default keeps a node to its own machine, which suits trials. `threads` is for the engine or the
    trainer, 0 = one for each core; a tiny model is fastest with one. `trust_remote_code` lets a model run code that
    comes with it; without it such a model is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("", max_length=64)
    listen_host: str = Field("127.0.0.1", min_length=1, max_length=253)
    role: RoleWish = "auto"
    engine: EngineWish = "auto"
    threads: int = Field(0, ge=0, le=1024)
    capability_in_hello: bool = True
    directory: bool = True
    trust_remote_code: bool = False
    limits: LimitSettings = LimitSettings()

    @property
    def num_threads(self) -> int:
        """For engine or trainer, within the owner's limit; 0 = one for each core."""
        allowed = self.limits.cpu_threads
        return min(self.threads or psutil.cpu_count(logical=False) or 1, allowed) if allowed else self.threads


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
    _check_keys(values, NodeSettings, source)
    if isinstance(values.get("limits"), dict):
        _check_keys(values["limits"], LimitSettings, source, section="limits.")
    try:
        return NodeSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"setting {key!r} in {source} is refused" if key else f"{source} is refused"
        raise UsageError(what, why=first["msg"]) from error


def write_settings(home_root: Path, settings: NodeSettings) -> None:
    """Writes those settings that differ from the defaults, so that `up` finds what `join` was told."""
    import tomlkit

    document = tomlkit.document()
    for key, value in settings.model_dump(exclude_defaults=True).items():
        document[key] = value
    if document:
        (home_root / FILE_NAME).write_text(tomlkit.dumps(document))


def _check_keys(values: dict[str, Any], model: type[BaseModel], source: str, *, section: str = "") -> None:
    for key in values:
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, list(model.model_fields), n=1, cutoff=0.0)
            raise UnknownSettingError(
                f"{source} has an unknown setting {section + key!r}",
                remedy=f"Did you mean {section + near[0]!r}? Nothing was started.",
            )
