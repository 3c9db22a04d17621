"""What a rollout node does next. Pure: what the node sees goes in, one action comes out.

`next_action` is a chain of small deciders; the first that has an opinion wins. Whoever calls it carries the
action out without waiting for its end, marks it as under way in the next view, and asks again at every
change; so the node fetches the next version while it still generates, and asks for the next lease before
the present one ends.
"""

import math
from dataclasses import dataclass

from protocol.ids import Version

MAX_OUTSTANDING = 8

NUM_SEATS = 64
"""Samples that an engine runs at a time; where leases take long, places that are free are filled by further ones."""

MAX_LONG_LEASES = 32
"""Long leases end with few samples each, so there may be more of them."""
LEASE_S = 1.0
MIN_LEASE_SLOTS, MAX_LEASE_SLOTS = 4, 256


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What a rollout node sees. Times in seconds on one monotonic clock; None = not known or not there.

    `num_running` counts the samples that the engine works on, of at most `num_seats` at a time, `num_outstanding` the
    leases that it works on, not those that are only to be handed in, `num_asking` the calls for further ones; `rtt_s`
    is what such a call takes, `service_s` what the engine takes for a lease. `version_ready` is the newest version
    whose weights lie on disk; `fetching` and `loading` are under way; `failed_until_s` holds fetches back after one
    failed, `no_work_until_s` holds wishes for work back after one was refused (0 = the last was granted). `paused` says
    why its owner wants no new work now. Without `interrupt` running samples finish under the weights that they began
    with.
    """

    now_s: float
    head: Version | None
    version_ready: Version | None
    version_loaded: Version | None
    num_outstanding: int
    num_slots: int
    engine_ready: bool = True
    num_asking: int = 0
    fetching: Version | None = None
    loading: Version | None = None
    rtt_s: float = 0.0
    service_s: float | None = None
    failed_until_s: float = 0.0
    no_work_until_s: float = 0.0
    paused: str = ""
    interrupt: bool = True
    num_running: int = NUM_SEATS
    num_seats: int = NUM_SEATS


@dataclass(frozen=True, slots=True)
class FetchVersion:
    """Get the weights of a version onto the disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Swap a version that lies on disk into the engine."""

    version: Version


@dataclass(frozen=True, slots=True)
class AskForWork:
    """Ask the coordinator for a lease over so many slots."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until `until_s`; `why` is for people."""

    why: str
    until_s: float | None = None


Action = FetchVersion | LoadVersion | AskForWork | Wait


def next_action(view: RolloutView) -> Action:
    """The one thing to do now."""
    return (
        _wait_for_head(view)
        or _load(view)
        or _fetch(view)
        or _wait_for_engine(view)
        or _respect_owner(view)
        or _ask(view)
        or _wait(view)
    )


def wanted_outstanding(*, rtt_s: float, service_s: float | None) -> int:
    """Leases to work on or ask for at a time so that the engine never waits: ceil(round trip / service time) + 1."""
    if service_s is None or service_s <= 0:
        return 2
    return min(math.ceil(rtt_s / service_s) + 1, MAX_OUTSTANDING) if rtt_s > 0 else 2


def _is_behind(view: RolloutView) -> bool:
    """Whether newer weights than the engine's lie on disk."""
    if view.version_ready is None:
        return False
    return view.version_loaded is None or view.version_ready > view.version_loaded


def _wait_for_head(view: RolloutView) -> Action | None:
    return Wait("no version exists yet") if view.head is None else None


def _load(view: RolloutView) -> Action | None:
    """The newest version on disk, as soon as the engine has not got it: older weights only cost freshness."""
    if view.version_ready is None or not _is_behind(view) or view.loading is not None or not view.engine_ready:
        return None
    if not view.interrupt and view.num_outstanding:
        return None
    return LoadVersion(view.version_ready)


def next_lease_slots(granted: int, *, took_s: float, asked: int) -> int:
    """How many slots to ask for next: a lease should take about `LEASE_S`, so that a fast engine fills its batches and
    a slow one gives little back when it fails. Doubles or halves; a grant smaller than what was asked says nothing of
    the engine's limit upwards."""
    if took_s > 2 * LEASE_S:
        return max(MIN_LEASE_SLOTS, asked // 2)
    if took_s < LEASE_S / 2 and granted >= asked:
        return min(MAX_LEASE_SLOTS, asked * 2)
    return asked


def _fetch(view: RolloutView) -> Action | None:
    if view.head is None or view.fetching is not None or view.now_s < view.failed_until_s:
        return None
    has_head = view.version_ready is not None and view.version_ready >= view.head
    return None if has_head else FetchVersion(view.head)


def _wait_for_engine(view: RolloutView) -> Action | None:
    if not view.engine_ready:
        return Wait("the engine is starting")
    if view.version_loaded is None:
        until_s = view.failed_until_s if view.failed_until_s > view.now_s else None
        return Wait(f"fetching the weights of version {view.head}", until_s)
    return None


def _respect_owner(view: RolloutView) -> Action | None:
    return Wait(view.paused) if view.paused else None


def _ask(view: RolloutView) -> Action | None:
    wanted = wanted_outstanding(rtt_s=view.rtt_s, service_s=view.service_s)
    if not view.interrupt and _is_behind(view):
        return None
    num_free = _free_seats(view)
    if (view.num_outstanding + view.num_asking >= wanted and not num_free) or view.now_s < view.no_work_until_s:
        return None
    if view.num_asking and view.no_work_until_s:  # one call finds out whether there is work again
        return None
    return AskForWork(max(view.num_slots, num_free))


def _free_seats(view: RolloutView) -> int:
    """Places that leases leave free when their last samples take long, if they are worth a call."""
    is_long = view.service_s is not None and view.service_s > 2 * LEASE_S
    if not is_long or view.num_asking or view.num_outstanding >= MAX_LONG_LEASES:
        return 0
    num_free = view.num_seats - view.num_running
    return num_free if num_free >= MIN_LEASE_SLOTS else 0


def _wait(view: RolloutView) -> Action:
    pending = [until for until in (view.failed_until_s, view.no_work_until_s) if until > view.now_s]
    until_s = min(pending, default=None)
    if view.num_outstanding:
        return Wait("generating", until_s)
    return Wait("the coordinator has no work" if until_s is not None else "waiting for a lease", until_s)
