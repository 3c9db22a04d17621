"""Gate 3 and what a trainer gets: which tokens are live, what each slot's advantage is, who takes which slots. Pure.

`protocol.lag.is_fresh` alone says whether a token is live. It is asked at the cut, at each fetch, and at commit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.state import Slot, State
from protocol.errors import NotEnrolledError, RoundStaleError
from protocol.ids import PeerId, RoundId, SlotKey, Version
from protocol.lag import is_fresh
from protocol.loss import Advantage, baseline
from protocol.run import Staleness


@dataclass(frozen=True, slots=True)
class ShareItem:
    """A slot of a member's share. `segments` are (version, number of tokens); `mask[i]` is 1 if token i is live
    (sampled, and fresh), else 0; `advantage` is the reward minus the mean of its group's rewards, by their
    spread where the run says so."""

    slot: SlotKey
    advantage: float
    segments: tuple[tuple[Version, int], ...]
    mask: bytes


def live_mask(slot: Slot, *, v_train: Version, max_lag: int) -> bytes:
    """One byte for each token of the completion."""
    mask = b"".join(
        (b"\1" if is_fresh(v_train=v_train, v_token=version, max_lag=max_lag) else b"\0") * length
        for version, length in slot.segments
    )
    for start, length in slot.given:
        mask = mask[:start] + bytes(length) + mask[start + length :]
    return mask


def num_live_tokens(slot: Slot, *, v_train: Version, max_lag: int, staleness: Staleness = "mask_tokens") -> int:
    """Tokens of the slot that may contribute to the update from `v_train`; where the policy is to drop whole rollouts,
    none of one that has a token over the bound."""
    fresh = [length for version, length in slot.sampled if is_fresh(v_train=v_train, v_token=version, max_lag=max_lag)]
    return sum(fresh) if staleness != "drop" or len(fresh) == len(slot.segments) else 0


def share_of(
    state: State, round_id: RoundId, peer_id: PeerId, advantage: Advantage = "centred"
) -> tuple[ShareItem, ...]:
    """What a member trains on in the open round. A baseline is over all rewards of the group, members without a live
    token included. Raises `RoundStaleError` or `NotEnrolledError`."""
    if state.round is None or state.batch is None or state.round.round_id != round_id:
        raise RoundStaleError(
            f"round {round_id} was refused", why="it is not the open one", remedy="Wait for the next plan."
        )
    keys = dict(state.round.shares).get(peer_id)
    if keys is None:
        raise NotEnrolledError(f"node {peer_id} was refused", why=f"it is not a member of round {round_id}")
    items, baselines = list[ShareItem](), dict[int, tuple[float, float]]()
    for key in keys:
        group, slot = state.groups[key.task.index], state.find(key)
        assert slot is not None and slot.reward is not None  # noqa: PT018
        if key.task.index not in baselines:
            baselines[key.task.index] = baseline(group.rewards, advantage)
        mean, scale = baselines[key.task.index]
        mask = live_mask(slot, v_train=state.batch.base_version, max_lag=state.batch.max_lag)
        items.append(ShareItem(key, (slot.reward - mean) / scale, slot.segments, mask))
    return tuple(items)


def divide(
    keys: Sequence[SlotKey], costs: Sequence[float], rates: Mapping[PeerId, float]
) -> tuple[tuple[PeerId, tuple[SlotKey, ...]], ...]:
    """Whole slots for each peer, so that peers of these `rates` are done at about the same time: the dearest slot
    first, each to who would be done with it soonest (Graham's longest processing time first). Ties go to what comes
    first; a share keeps the order of `keys`; nobody goes empty if there are enough slots. A rate that is not positive
    counts as the smallest known."""
    known = [rate for rate in rates.values() if rate > 0 and math.isfinite(rate)]
    floor = min(known, default=1.0)
    weights = {peer: rate if rate > 0 and math.isfinite(rate) else floor for peer, rate in rates.items()}
    loads = dict.fromkeys(weights, 0.0)
    shares: dict[PeerId, list[int]] = {peer: [] for peer in weights}
    empty = list(weights)
    for num_dealt, index in enumerate(sorted(range(len(keys)), key=lambda index: -costs[index])):
        empty = [peer for peer in empty if not shares[peer]]
        may = empty if len(keys) - num_dealt <= len(empty) else weights
        peer = min(may, key=lambda peer: (loads[peer] + costs[index]) / weights[peer])
        loads[peer] += costs[index]
        shares[peer].append(index)
    return tuple((peer, tuple(keys[index] for index in sorted(share))) for peer, share in shares.items())
