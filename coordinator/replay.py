"""`replay` and `check`: the state at some point of the journal, for people and machines. Impure: reads the journal.

Both prove the snapshots by the facts on the way, and both work while the coordinator runs: they see one COMMIT.
Nothing that is printed is secret, so invites are counted and not shown.
"""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.core.books import books, check
from coordinator.core.state import State, encode_state
from coordinator.journal_reader import JournalReader, Replay
from coordinator.journal_schema import damaged
from protocol.errors import UsageError
from protocol.manifest import digest_of

MAX_SHOWN = 20


def replay_until(reader: JournalReader, until: str | None = None) -> Replay:
    """The state after the last fact, or after fact number `until`, or at that time (ISO 8601, of this machine's zone
    unless it names one). Raises `UsageError` if the facts do not reach there, `JournalError` if they do not hold."""
    if until is None:
        return reader.replay()
    if until.isdecimal():
        seq = int(until)
        found = reader.replay(is_wanted=lambda line: line.seq <= seq)
        _check_reached(found, until, is_early=seq < found.first_seq - 1)
        if found.seq < seq:
            raise UsageError(f"there is no fact {seq} yet", remedy=f"The last one is {found.seq}.")
        return found
    limit_ms = _milliseconds(until)
    found = reader.replay(is_wanted=lambda line: line.now_ms <= limit_ms)
    _check_reached(found, until, is_early=found.now_ms is None)
    return found


def prove(path: Path) -> tuple[Replay, int]:
    """Everything that can be checked: pages, checksums, replay, books, rollouts; gives the newest state and the number
    of rollouts. Raises `JournalError`."""
    reader = JournalReader(path)
    try:
        with reader.frozen():
            found = reader.replay()
            num_rollouts = reader.check_content(found.state)
        try:
            check(found.state)
        except AssertionError as error:
            raise damaged(path, str(error)) from error
        return found, num_rollouts
    finally:
        reader.close()


def summary_of(found: Replay) -> dict[str, Any]:
    """The state for `--json`. `digest` is that of the whole state: equal digests, equal states."""
    state = found.state
    round_ = state.round
    return {
        "schema": 1,
        "seq": found.seq,
        "time": None if found.now_ms is None else time_of(found.now_ms),
        "first_seq": found.first_seq,
        "num_facts": found.num_facts,
        "digest": digest_of(encode_state(state)),
        "epoch": state.epoch,
        "version": None if state.head is None else state.head.version,
        "root": None if state.head is None else state.head.root,
        "nodes": len(state.nodes),
        "roles": {role: list(state.roles.values()).count(role) for role in ("trainer", "rollout", "idle")},
        "invites": len(state.invites),
        "books": dataclasses.asdict(books(state)),
        "balanced": books(state).is_balanced,
        "lag_histogram": {str(age): count for age, count in sorted(state.lag_histogram.items())},
        "groups": {"open": len(state.groups), "complete": len(state.complete), "finished": len(state.retired)},
        "leases": [
            {"lease": lease_id, "node": lease.peer_id, "slots": len(lease.slots), "until": time_of(lease.deadline_ms)}
            for lease_id, lease in state.leases.items()
        ],
        "round": None
        if round_ is None
        else {"round": round_.round_id, "members": round_.peer_ids, "until": time_of(round_.deadline_ms)},
    }


def text_of(found: Replay) -> str:
    """The same for people."""
    shown, state = summary_of(found), found.state
    book, version = shown["books"], shown["version"]
    ends = ("running", "queued", "in_round", "trained", "dropped", "filtered", "failed")
    claims = ("open", "filled", "expired", "returned")
    verdict = "they balance" if shown["balanced"] else "THEY DO NOT BALANCE"
    lines = [
        f"state after fact {found.seq}, {shown['time'] or 'at the oldest snapshot'}; start {state.epoch}",
        f"replayed {found.num_facts} facts from {found.first_seq} on; every snapshot on the way is what its facts give",
        f"state digest {shown['digest']}",
        "no version yet" if version is None else f"version {version}, root {shown['root']}",
        "nodes: " + ", ".join(f"{count} {role}" for role, count in shown["roles"].items()),
        f"slots: issued {book['issued']} = " + " + ".join(f"{book[name]} {name}" for name in ends) + f"; {verdict}",
        f"leases: granted {book['granted']} = " + " + ".join(f"{book[name]} {name}" for name in claims),
        *_lag_lines(state),
        _round_line(state),
        f"open leases: {len(shown['leases'])}",
        *(f"  {x['lease']}  {x['slots']} slots  until {x['until']}  {x['node']}" for x in shown["leases"][:MAX_SHOWN]),
    ]
    if len(shown["leases"]) > MAX_SHOWN:
        lines.append(f"  and {len(shown['leases']) - MAX_SHOWN} more; --json shows all")
    return "\n".join(lines)


def time_of(now_ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _lag_lines(state: State) -> list[str]:
    total = sum(state.lag_histogram.values())
    if not total:
        return ["trained tokens by lag: none yet"]
    return [
        f"trained tokens by lag ({total} in all, {state.num_tokens_masked} masked):",
        *(
            f"  {age}: {count:>12}  {100 * count / total:5.1f} %  {'#' * round(40 * count / total)}"
            for age, count in sorted(state.lag_histogram.items())
        ),
    ]


def _round_line(state: State) -> str:
    if state.round is None:
        return "no round is open" + ("; a batch waits for the next attempt" if state.batch else "")
    members = ", ".join(state.round.peer_ids)
    return f"round {state.round.round_id} is open until {time_of(state.round.deadline_ms)}, by {members}"


def _milliseconds(text: str) -> int:
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"--until {text!r} is neither a fact's number nor a time",
            remedy="Write a number, or a time such as 2030-01-31T12:00:00Z.",
        ) from error


def _check_reached(found: Replay, until: str, *, is_early: bool) -> None:
    if is_early:
        raise UsageError(
            f"the state at {until} cannot be made again",
            why=f"the kept facts begin with number {found.first_seq}; those before the oldest snapshot are deleted",
            remedy="Name a later point, or replay a backup of that time.",
        )
