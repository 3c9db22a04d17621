"""Held-out accuracy: which versions are due, which trainer is asked, what it came to. Pure.

Invariants: one request is out at a time; it is repeated, to another trainer if there is one, when nothing came back
in time; a version's accuracy is recorded once.
"""

import math

from coordinator.core.effects import RequestEvaluation
from coordinator.core.events import EvaluationScored
from coordinator.core.facts import EvaluationRecorded
from coordinator.core.live import live_in_role
from coordinator.core.soft import AskedEvaluation
from coordinator.core.turn import Turn
from protocol.ids import PeerId, Version

ANSWER_MS = 30_000
"""After so long without an answer the request is repeated."""


def record(turn: Turn, event: EvaluationScored) -> None:
    """Notes an accuracy; one that is not due, or no number, changes nothing."""
    is_asked = turn.soft.asked is not None and turn.soft.asked.version == event.version
    if event.version in turn.state.evaluations_due and math.isfinite(event.accuracy):
        turn.emit(EvaluationRecorded(event.version, event.num_tasks, event.accuracy))
        if is_asked:
            turn.soft.asked = None


def request(turn: Turn) -> None:
    """Asks a trainer for the newest version that is due and that a living trainer holds."""
    asked = turn.soft.asked
    if asked is not None and asked.version in turn.state.evaluations_due and turn.now_ms - asked.asked_ms < ANSWER_MS:
        return
    for version in reversed(turn.state.evaluations_due):
        holders = [peer for peer in live_in_role(turn, "trainer") if _holds(turn, peer, version)]
        if not holders:
            continue
        before = asked.peer_id if asked is not None and asked.version == version else None
        peer_id = next((peer for peer in holders if peer != before), holders[0])
        turn.soft.asked = AskedEvaluation(version, peer_id, turn.now_ms)
        turn.ask(RequestEvaluation(peer_id, version))
        return


def _holds(turn: Turn, peer_id: PeerId, version: Version) -> bool:
    presence = turn.soft.live[peer_id].presence
    return presence.version == version or version in presence.versions_held
