"""Who gets the next piece of scarce work: interleaved weighted round robin. Pure.

The rule is Tijdeman's for the chairman assignment problem: after any number of turns each of n parties has had its
exact share of them to within 1 - 1/(2n - 2) of a turn. Parties may come and go between turns; whoever stays keeps its
credit.
"""

from collections.abc import Mapping, MutableMapping
from typing import TypeVar

PartyT = TypeVar("PartyT", bound=str | int)


def next_turn(credits: MutableMapping[PartyT, float], weights: Mapping[PartyT, float]) -> PartyT:
    """Whose turn it is among those that have a weight; ties go by name. `credits` (turns that are due, less turns
    had) is brought up to date for these; who is gone for good the caller removes. Weights that are not positive count
    as little."""
    total = sum(max(weight, 0.0) for weight in weights.values())
    floor = total * 1e-6 or 1.0
    shares = {peer: max(weight, floor) for peer, weight in weights.items()}
    whole = sum(shares.values())
    for peer, share in shares.items():
        shares[peer] = share / whole
        credits[peer] = credits.get(peer, 0.0) + shares[peer]
    if len(shares) == 1:
        (chosen,) = shares
        credits[chosen] = 0.0
        return chosen
    slack = 1 / (2 * len(shares) - 2)
    due = [peer for peer in shares if credits[peer] >= slack - 1e-12]
    if due:
        chosen = min(due, key=lambda peer: ((1 - slack - credits[peer]) / shares[peer], peer))
    else:  # only after parties went with more than they were due
        chosen = min(shares, key=lambda peer: (-credits[peer], peer))
    credits[chosen] -= 1.0
    return chosen
