"""What came of a command, in words that stay the same: replies `=`, facts `+`, effects `>`. Pure.

A phrase is a head and, where several of a kind read as one line, a tail: `+ filled by r0: 0/0 (v0*4), 0/1 (v0*4)`. A
slot is named by its task's index and its sample, times are seconds of the story. What has no phrase of its own is shown
field by field, so nothing is left out.
"""

from collections.abc import Iterable
from dataclasses import fields
from itertools import groupby
from typing import Any

from coordinator.core import effects as a
from coordinator.core import facts as f
from coordinator.core.books import Books
from coordinator.core.replies import Grant, Receipt, Reply
from coordinator.core.shares import ShareItem
from protocol.errors import HexcombError
from protocol.ids import SlotKey
from tests.scenarios.tokens import tokens_word

Phrase = tuple[str, str]
START_MS = 1_000_000
"""The coordinator's clock when a story begins."""

WIDE = 12
"""So many slots are named one by one; more of them are counted."""


def slot_word(slot: SlotKey) -> str:
    """`0/1` is the second sample of task 0."""
    return f"{slot.task.index}/{slot.sample}"


def seconds_word(time_ms: int) -> str:
    """Seconds since the story began."""
    return f"{(time_ms - START_MS) / 1000:.1f}s"


def lines_of(phrases: Iterable[Phrase]) -> list[str]:
    """Neighbours with the same head become one line."""
    lines: list[str] = []
    for head, group in groupby(phrases, key=lambda phrase: phrase[0]):
        tails = [tail for _, tail in group]
        shown = tails if len(tails) <= WIDE else [*tails[:3], f"… {len(tails)} in all"]
        lines += [f"{head} {', '.join(shown)}"] if any(tails) else [head] * len(tails)
    return lines


def of_refusal(refusal: HexcombError) -> Phrase:
    """A refusal has changed nothing."""
    return f"= refused {refusal.code}: {refusal.why or refusal.what}", ""


def of_reply(reply: Reply) -> Phrase | None:
    """The answer, if it says something that the facts do not."""
    match reply:
        case Grant() if reply.slots:
            return "= granted", f"{reply.lease_id}: {_slots(reply.slots)}"
        case Grant():
            return "= granted nothing", ""
        case Receipt(outcome="VERSION_TOO_OLD"):
            return "= VERSION_TOO_OLD", f"{slot_word(reply.slot)} ({reply.detail})"
        case Receipt():
            return f"= {reply.outcome}", slot_word(reply.slot)
        case _:
            return None


def of_fact(fact: f.Fact) -> Phrase:
    """One phrase for each kind of fact."""
    match fact:
        case f.RoleGiven():
            return f"+ role {fact.role} ({fact.reason}):", fact.peer_id
        case f.NodeLost():
            return f"+ lost {fact.peer_id}: {fact.reason}", ""
        case f.LeaseGranted():
            opened = "".join(f", opens task {o.task.index} under v{o.version}" for o in fact.opened[:4])
            opened += f" … {len(fact.opened)} in all" if len(fact.opened) > 4 else ""
            words = f"{_slots(fact.slots)} until {seconds_word(fact.deadline_ms)}{opened}"
            return f"+ lease {fact.lease_id} to {fact.peer_id}: {words}", ""
        case f.LeaseClosed():
            why = f" ({fact.reason})" if fact.reason else ""
            fault = ", its fault" if fact.is_fault else ""
            return f"+ lease {fact.lease_id} closed: {fact.how}{why}{fault}", ""
        case f.TurnTaken():
            given = " ".join(f"{start}+{length}" for start, length in fact.given)
            words = f"{slot_word(fact.slot)} ({tokens_word(fact.segments)}, environment {given})"
            return f"+ turn taken of {fact.peer_id}:", words
        case f.RolloutAccepted():
            return f"+ filled by {fact.peer_id}:", f"{slot_word(fact.slot)} ({tokens_word(fact.segments)})"
        case f.RewardRecorded():
            return "+ reward", f"{slot_word(fact.slot)}={'missing' if fact.reward is None else f'{fact.reward:g}'}"
        case f.SlotDropped():
            return "+ slot dropped, no live token:", slot_word(fact.slot)
        case f.GroupDropped():
            return f"+ group dropped, {fact.reason}:", f"task {fact.index}"
        case f.SlotGivenBack():
            return f"+ given back{'' if fact.reason == 'stale' else f', {fact.reason}'}:", slot_word(fact.slot)
        case f.SlotMoved():
            return "+ waits with what came of it:", f"{slot_word(fact.slot)} ({tokens_word(fact.segments)})"
        case f.PrefixDropped():
            return f"+ {slot_word(fact.slot)} starts anew: {fact.reason}", ""
        case f.SlotFailed():
            return f"+ dead letter {slot_word(fact.slot)}: {fact.reason}", ""
        case f.SlotCancelled():
            return f"+ cancelled{f' under {fact.lease_id}' if fact.lease_id else ''}:", slot_word(fact.slot)
        case f.LeaseExtended():
            return f"+ lease {fact.lease_id} prolonged until {seconds_word(fact.deadline_ms)}", ""
        case f.RoundSealed():
            shares = ", ".join(f"{peer} {_slots(keys)}" for peer, keys in fact.shares)
            return f"+ round {fact.round_id} sealed on v{fact.base_version}, {fact.num_tokens} tokens: {shares}", ""
        case f.RoundAborted():
            suspects = f", suspects {' '.join(fact.suspects)}" if fact.suspects else ""
            return f"+ round {fact.round_id} aborted, {fact.reason} ({fact.detail}){suspects}", ""
        case f.VersionCommitted():
            return f"+ version {fact.version} committed", ""
        case _:
            return f"+ {_by_field(fact)}", ""


def of_effect(effect: a.Effect) -> Phrase:
    """One phrase for each kind of effect."""
    match effect:
        case a.ScoreRollout():
            return "> score", slot_word(effect.slot)
        case a.CancelLeases():
            return f"> cancel at {effect.peer_id}: {' '.join(effect.lease_ids)}", ""
        case a.CancelSlots():
            return f"> cancel at {effect.peer_id}: {_slots(effect.slots)}", ""
        case a.AssignRole():
            return "> tell the role to", effect.peer_id
        case a.SendPlan():
            return f"> send the plan of round {effect.round_id} to {' '.join(m.peer_id for m in effect.members)}", ""
        case a.AbortRound():
            return f"> abort round {effect.round_id} at {' '.join(effect.members)}", ""
        case a.AnnounceVersion():
            return f"> announce version {effect.version}", ""
        case _:
            return f"> {_by_field(effect)}", ""


def of_books(books: Books) -> list[str]:
    """Both sums."""
    ends = ("running", "queued", "in_round", "trained", "dropped", "filtered", "failed")
    claims = ("open", "filled", "expired", "returned")
    return [
        f"issued {books.issued} = " + " + ".join(f"{getattr(books, name)} {name}" for name in ends),
        f"granted {books.granted} = " + " + ".join(f"{getattr(books, name)} {name}" for name in claims),
    ]


def of_share(item: ShareItem) -> str:
    """What a trainer does with a slot: tokens that it must not learn from stand in brackets."""
    words, place = [], 0
    for version, length in item.segments:
        word = f"v{version}*{length}"
        words.append(word if item.mask[place] else f"[{word}]")
        place += length
    return f"{slot_word(item.slot)} advantage {item.advantage:+g}: {' '.join(words)}"


def _slots(slots: tuple[SlotKey, ...]) -> str:
    words = [slot_word(slot) for slot in slots]
    return " ".join(words) if len(words) <= WIDE else f"{words[0]} … {words[-1]} ({len(words)} slots)"


def _by_field(value: Any) -> str:
    words = [f"{field.name}={_plain(getattr(value, field.name), field.name)}" for field in fields(value)]
    return " ".join([type(value).__name__, *words])


def _plain(value: Any, name: str) -> str:
    if isinstance(value, SlotKey):
        return slot_word(value)
    if name.endswith("_ms"):
        return seconds_word(value)
    if name == "segments":
        return tokens_word(value).replace(" ", "+")
    if isinstance(value, tuple):
        return ",".join(_plain(item, "") for item in value) or "none"
    return str(value)
