"""The owner's settings of one node: `node.toml` in the home folder, with options of the command line over it.

Every key is known; an unknown one is refused with the nearest that would be valid. msgspec checks types and ranges: the
daemon has it in memory anyway, and pydantic would add 10 MB. Impure only in the two functions that read and write the
file.
"""

import difflib
import tomllib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import psutil
from msgspec import Meta

from node.limits import Limits, parse_hours
from protocol.errors import UnknownSettingError, UsageError

FILE_NAME = "node.toml"
MIN_MBIT_PER_S = 1.0
Bytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
Threads = Annotated[int, Meta(ge=0, le=1024)]
MbitPerS = Annotated[float, Meta(ge=0)]
RoleWish = Literal["auto", "trainer", "rollout"]
EngineWish = Literal["auto", "vllm", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """`[limits]`: what the machine's owner lets the node take. 0, empty or false = no such limit.

    `hours` are ranges of the local clock like `22:00-07:00, 12:30-13:30`. `idle_only_s`: work only after others have
    left the machine alone for so long, where a share over `idle_cpu_share` of all cores, use of a GPU or typing at a
    terminal is use. `pause_on_gpu_use`: not while others compute on a GPU. `gpu_memory_share` (0 to 1) goes to engine
    and trainer. `power_cap_w` is set on each GPU; with `power_cap_required` no work begins on a GPU without it.
    `memory_bytes` bounds daemon and children together, `cpu_threads` the threads of engine or trainer. The rates are of
    weights passed on and fetched.
    """

    hours: Annotated[str, Meta(max_length=200)] = ""
    idle_only_s: Seconds = 0.0
    idle_cpu_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    pause_on_gpu_use: bool = False
    gpu_memory_share: Share = 0.0
    power_cap_w: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    power_cap_required: bool = False
    cpu_threads: Threads = 0
    memory_bytes: Bytes = 0
    upload_mbit_per_s: MbitPerS = 0.0
    download_mbit_per_s: MbitPerS = 0.0

    def __post_init__(self) -> None:
        parse_hours(self.hours)
        if any(0 < rate < MIN_MBIT_PER_S for rate in (self.upload_mbit_per_s, self.download_mbit_per_s)):
            raise ValueError(f"below {MIN_MBIT_PER_S:g} Mbit/s a chunk takes longer than others wait for it")
        if self.power_cap_required and not self.power_cap_w:
            raise ValueError("power_cap_required needs a power_cap_w")

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
        return changed(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the owner decides about a node.

    `listen_host` is the address on which the peer service and the DHT peer listen, and under which others
    dial them; the default keeps a node to its own machine, which suits trials. `threads` is for the engine or the
    trainer, 0 = one for each core; a tiny model is fastest with one. `trust_remote_code` lets a model run code that
    comes with it; without it such a model is refused. `environments` are the packages whose tasks this node may make
    for itself; prompts of all others come with the lease, as do all where it is empty.
    """

    name: Annotated[str, Meta(max_length=64)] = ""
    listen_host: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    role: RoleWish = "auto"
    engine: EngineWish = "auto"
    threads: Threads = 0
    capability_in_hello: bool = True
    directory: bool = True
    environments: tuple[Literal["reasoning-gym"], ...] = ("reasoning-gym",)
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
        return msgspec.convert(values, NodeSettings)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$")
        key = place.strip(".`")
        what = f"setting {key!r} in {source} is refused" if key else f"{source} is refused"
        raise UsageError(what, why=why) from error


def changed(settings: Any) -> dict[str, Any]:
    """Those that differ from the defaults, by name; a section's as a dict of its own."""
    default = type(settings)()
    found = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        name: changed(value) if is_dataclass(value) else value
        for name, value in found.items()
        if value != getattr(default, name)
    }


def write_settings(home_root: Path, settings: NodeSettings) -> None:
    """Writes those settings that differ from the defaults, so that `up` finds what `join` was told."""
    import tomlkit

    document = tomlkit.document()
    for key, value in changed(settings).items():
        document[key] = value
    if document:
        (home_root / FILE_NAME).write_text(tomlkit.dumps(document))


def _check_keys(values: dict[str, Any], kind: type, source: str, *, section: str = "") -> None:
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UnknownSettingError(
                f"{source} has an unknown setting {section + key!r}",
                remedy=f"Did you mean {section + near[0]!r}? Nothing was started.",
            )
