"""When the owner lets a node work: every limit holds it back by itself, with its reason, and none is passed over."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits import (
    GPU_QUIET_S,
    MINUTES_A_DAY,
    Facts,
    HourRange,
    Limits,
    may_work,
    not_available,
    parse_hours,
)

NOON = datetime(2026, 3, 5, 12, 0)
QUIET = Facts(quiet_s=1e9, has_gpu=True, gpu_quiet_s=1e9)
NIGHT = Limits(hours=parse_hours("22:00-07:00"), hours_text="22:00-07:00")


def at(hour: int, minute: int = 0) -> datetime:
    return NOON.replace(hour=hour, minute=minute)


@pytest.mark.parametrize(
    ("limits", "facts", "now", "reason"),
    [
        (Limits(), Facts(), NOON, ""),
        (NIGHT, QUIET, at(12), "outside its hours (22:00-07:00)"),
        (NIGHT, QUIET, at(21, 59), "outside its hours (22:00-07:00)"),
        (NIGHT, QUIET, at(22), ""),
        (NIGHT, QUIET, at(0), ""),
        (NIGHT, QUIET, at(6, 59), ""),
        (NIGHT, QUIET, at(7), "outside its hours (22:00-07:00)"),
        (Limits(pause_on_gpu_use=True), replace(QUIET, gpu_users=("blender",)), NOON, "others use the GPU: blender"),
        (Limits(pause_on_gpu_use=True), replace(QUIET, gpu_quiet_s=3.0), NOON, "others used the GPU a moment ago"),
        (Limits(pause_on_gpu_use=True), replace(QUIET, gpu_quiet_s=GPU_QUIET_S), NOON, ""),
        (Limits(), replace(QUIET, gpu_users=("blender",)), NOON, ""),
        (Limits(idle_only_s=300), replace(QUIET, quiet_s=12.0), NOON, "the machine is idle for 12 of 300 s"),
        (Limits(idle_only_s=300), replace(QUIET, quiet_s=300.0), NOON, ""),
        (
            Limits(power_cap_w=200, power_cap_required=True),
            replace(QUIET, power_trouble="only an administrator may"),
            NOON,
            "no power cap of 200 W: only an administrator may",
        ),
        (Limits(power_cap_w=200), replace(QUIET, power_trouble="only an administrator may"), NOON, ""),
        (Limits(power_cap_w=200, power_cap_required=True), Facts(power_trouble="there is no GPU"), NOON, ""),
    ],
)
def test_may_work(limits: Limits, facts: Facts, now: datetime, reason: str) -> None:
    assert may_work(limits, facts, now) == (not reason, reason)


def test_limits_that_cannot_be_looked_after_are_named() -> None:
    limits = Limits(pause_on_gpu_use=True, power_cap_w=200, idle_only_s=60)
    blind = Facts(has_gpu=True, gpu_trouble="no library", power_trouble="no library")
    named = not_available(limits, blind)
    assert [what.partition(":")[0] for what in named] == [
        "pause_on_gpu_use",
        "power_cap_w",
        "idle_only_s",
        "idle_only_s, of the GPU",
    ]
    assert all("library" in what or "cannot be seen" in what for what in named)
    assert not_available(limits, QUIET) == ()
    assert not_available(Limits(), blind) == ()


minutes = st.integers(0, MINUTES_A_DAY - 1)


@given(start=minutes, stop=minutes, minute=minutes)
def test_a_range_and_its_complement_share_the_day(start: int, stop: int, minute: int) -> None:
    """Over midnight or not, a minute is in exactly one of start-stop and stop-start."""
    if start != stop:
        assert HourRange(start, stop).holds(minute) != HourRange(stop, start).holds(minute)


@given(start=minutes, length=st.integers(1, MINUTES_A_DAY - 1), offset=minutes)
def test_a_range_holds_the_minutes_that_follow_its_start(start: int, length: int, offset: int) -> None:
    """The model walks the clock minute by minute; the product compares numbers."""
    stop = (start + length) % MINUTES_A_DAY
    (hours,) = parse_hours(f"{start // 60:02}:{start % 60:02}-{stop // 60:02}:{stop % 60:02}")
    minute = (start + offset) % MINUTES_A_DAY
    assert hours.holds(minute) == (offset < length)


def test_a_night_that_forgets_midnight_would_be_caught() -> None:
    """The negative control: the comparison without the case over midnight disagrees with the clock."""
    naive = [minute for minute in range(MINUTES_A_DAY) if 22 * 60 <= minute < 7 * 60]
    real = [minute for minute in range(MINUTES_A_DAY) if NIGHT.hours[0].holds(minute)]
    assert naive == []
    assert len(real) == 9 * 60


def test_several_ranges_and_the_whole_day() -> None:
    hours = parse_hours("00:30-01:30, 12:00-13:00")
    limits = Limits(hours=hours, hours_text="x")
    day = [NOON.replace(hour=0) + timedelta(minutes=minute) for minute in range(MINUTES_A_DAY)]
    assert sum(may_work(limits, Facts(), now)[0] for now in day) == 120
    assert parse_hours("") == ()
    whole = Limits(hours=parse_hours("00:00-24:00"), hours_text="x")
    assert all(may_work(whole, Facts(), now)[0] for now in day)


def test_the_clock_on_the_wall_decides_when_it_is_set_forward_and_back() -> None:
    """In the night in which 02:00 becomes 03:00 the hours end at 07:00 all the same, and an hour that comes twice is
    within them twice."""
    limits = Limits(hours=parse_hours("02:30-03:30"), hours_text="x")
    assert not may_work(limits, Facts(), at(1, 59))[0]
    assert may_work(limits, Facts(), at(3, 0))[0], "02:30 never came; the range is open as the clock shows 03:00"
    assert may_work(limits, Facts(), at(2, 45))[0]
    assert may_work(limits, Facts(), at(2, 45).replace(fold=1))[0]


@pytest.mark.parametrize(
    "text", ["22-7", "25:00-07:00", "22:00-24:30", "24:00-07:00", "07:00-07:00", "22:00", "a-b", ","]
)
def test_hours_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|hour|begins"):
        parse_hours(text)
