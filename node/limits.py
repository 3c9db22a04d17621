"""When a node may work, by its owner's word. Pure: limits and what was seen of the machine go in, yes or no and a
reason come out.

Invariants: the answer depends on nothing but its arguments; a "no" always has a reason that a person understands; a
limit that cannot be looked after on this machine is named by `not_available` and never passed over in silence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

MINUTES_A_DAY = 24 * 60
GPU_QUIET_S = 30.0
"""After another program has left the GPU; programs that come and go would else start and end the engine each time."""

_RANGE = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class HourRange:
    """Minutes of the day from `start` to before `stop`; where `stop` is not later than `start`, over midnight."""

    start: int
    stop: int

    def holds(self, minute: int) -> bool:
        """Whether the minute of the day (0 to 1439) is in it."""
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop


def parse_hours(text: str) -> tuple[HourRange, ...]:
    """Ranges like `22:00-07:00, 12:30-13:30`; none in an empty text. Raises `ValueError`."""
    return tuple(_parse_range(part.strip()) for part in text.split(",")) if text.strip() else ()


def _parse_range(text: str) -> HourRange:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a range of hours like 22:00-07:00")
    numbers = [int(number) for number in match.groups()]
    start, stop = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
    if max(start, stop) > MINUTES_A_DAY or start == MINUTES_A_DAY:
        raise ValueError(f"{text!r} names an hour that no day has")
    if start == stop % MINUTES_A_DAY and stop != MINUTES_A_DAY:
        raise ValueError(f"{text!r} begins when it ends; the whole day is 00:00-24:00")
    return HourRange(start, stop)


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides when work is done; 0, empty or False = no such limit. `idle_only_s` asks that the machine has been
    left alone by others for so long, `power_cap_required` that no work begins on a GPU whose cap is not in force."""

    hours: tuple[HourRange, ...] = ()
    hours_text: str = ""
    idle_only_s: float = 0.0
    pause_on_gpu_use: bool = False
    power_cap_w: float = 0.0
    power_cap_required: bool = False

    @property
    def needs_gpu(self) -> bool:
        """Whether the GPU has to be looked at."""
        return self.pause_on_gpu_use or self.power_cap_w > 0 or self.idle_only_s > 0

    @property
    def is_any(self) -> bool:
        """Whether anything may ever hold work back."""
        return bool(self.hours) or self.needs_gpu


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of the machine. `quiet_s` is for how long others have left it alone, `busy_with` who did not last;
    `gpu_quiet_s` the same for the GPU, `gpu_users` the programs on it now. None = it cannot be seen here; then
    `gpu_trouble` says why. `power_trouble` says why the power cap is not in force."""

    quiet_s: float | None = None
    busy_with: str = ""
    has_gpu: bool = False
    gpu_quiet_s: float | None = None
    gpu_users: tuple[str, ...] = ()
    gpu_trouble: str = ""
    power_trouble: str = ""


def may_work(limits: Limits, facts: Facts, now: datetime) -> tuple[bool, str]:
    """Whether the node may work, and why not. `now` is the local time, as the clock on the wall shows it: where it is
    set forward or back the ranges follow the clock."""
    reason = next(_objections(limits, facts, now), "")
    return not reason, reason


def _objections(limits: Limits, facts: Facts, now: datetime) -> Iterator[str]:
    minute = now.hour * 60 + now.minute
    if limits.hours and not any(hours.holds(minute) for hours in limits.hours):
        yield f"outside its hours ({limits.hours_text})"
    if limits.power_cap_required and facts.has_gpu and facts.power_trouble:
        yield f"no power cap of {limits.power_cap_w:g} W: {facts.power_trouble}"
    if limits.pause_on_gpu_use and facts.gpu_users:
        yield f"others use the GPU: {', '.join(facts.gpu_users[:3])}"
    if limits.pause_on_gpu_use and facts.gpu_quiet_s is not None and facts.gpu_quiet_s < GPU_QUIET_S:
        yield "others used the GPU a moment ago"
    if limits.idle_only_s and facts.quiet_s is not None and facts.quiet_s < limits.idle_only_s:
        busy = f": {facts.busy_with}" if facts.busy_with else ""
        yield f"the machine is idle for {facts.quiet_s:.0f} of {limits.idle_only_s:g} s{busy}"


def not_available(limits: Limits, facts: Facts) -> tuple[str, ...]:
    """The limits that are set and cannot be looked after here, each with the reason."""
    found = []
    if limits.pause_on_gpu_use and facts.gpu_quiet_s is None:
        found.append(f"pause_on_gpu_use: {facts.gpu_trouble or 'the GPU cannot be looked at'}")
    if limits.power_cap_w and facts.power_trouble:
        found.append(f"power_cap_w: {facts.power_trouble}")
    if limits.idle_only_s and facts.quiet_s is None:
        found.append("idle_only_s: the load of other programs cannot be seen")
    if limits.idle_only_s and facts.has_gpu and facts.gpu_quiet_s is None:
        found.append(f"idle_only_s, of the GPU: {facts.gpu_trouble or 'the GPU cannot be looked at'}")
    return tuple(found)
