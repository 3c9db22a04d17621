"""A coordinator without sockets, run by the tests of crashes as a process of its own: core, authority and journal,
commanded over standard input until it dies.

Each line in is a command (`number`, `now_ms`, the event's class and fields, a rollout's body); each line out answers
one, as soon as the authority does. `BUGS` are the defects that the tests must find.
"""

import asyncio
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from coordinator import journal as journal_module
from coordinator.authority import Authority
from coordinator.core import events
from coordinator.core.facts import VersionCommitted
from coordinator.core.handle import Core
from coordinator.core.replies import Grant, Receipt
from coordinator.core.state import State
from coordinator.journal import Entry, Journal
from protocol.errors import HexcombError, JournalError
from protocol.ids import Digest
from protocol.manifest import SignedManifest
from tests.coordinator.world import RUN_ID, make_rules

SNAPSHOT_EVERY = 40


class Command(msgspec.Struct):
    """An event on its way in."""

    number: int
    now_ms: int
    kind: str
    event: msgspec.Raw
    body: str = ""


class Answer(msgspec.Struct):
    """What became of it: a receipt's outcome or a refusal's code; a granted lease."""

    number: int
    outcome: str
    grant: Grant | None = None


def seal(fact: VersionCommitted, previous: Digest | None, now_ms: int) -> SignedManifest:
    """A manifest that names its version and follows another."""
    return SignedManifest(f"{fact.version} {fact.root} {previous}".encode(), b"signed")


Append = Callable[[Journal, Sequence[Entry], State], None]


def write(journal: Journal, entries: Sequence[Entry], state: State) -> None:
    """One transaction."""
    Journal.stage(journal, entries, state=state)
    Journal.commit(journal, entries, state=state)


def append_manifest_later(journal: Journal, entries: Sequence[Entry], state: State) -> None:
    """A new version's manifest in a second transaction."""
    write(journal, [Entry(e.now_ms, e.facts, e.bodies) for e in entries], state)
    late = [Entry(e.now_ms, (), (), e.manifests) for e in entries if e.manifests]
    if late:
        write(journal, late, state)


def append_too_late(journal: Journal, entries: Sequence[Entry], state: State) -> None:
    """The authority answers while the batch is still on its way to the disk."""

    def write_late() -> None:
        time.sleep(0.02)
        write(journal, entries, state)

    before: threading.Thread | None = journal.__dict__.get("writing")
    if before is not None:
        before.join()
    journal.__dict__["writing"] = threading.Thread(target=write_late)
    journal.__dict__["writing"].start()


def append_without_versions(journal: Journal, entries: Sequence[Entry], state: State) -> None:
    """What made a version is not written."""
    kept = [
        Entry(e.now_ms, tuple(f for f in e.facts if not isinstance(f, VersionCommitted) or f.version == 0), e.bodies)
        for e in entries
    ]
    write(journal, kept, state)


BUGS: dict[str, Append] = {
    "manifest in a second transaction": append_manifest_later,
    "answers before the commit": append_too_late,
    "versions are not journaled": append_without_versions,
}


class WrittenJournal(Journal):
    """A journal with one of the bugs, or none."""

    bug = ""

    def stage(self, entries: Sequence[Entry], *, state: State) -> None:
        if not self.bug:
            super().stage(entries, state=state)

    def commit(self, entries: Sequence[Entry], *, state: State) -> None:
        if self.bug:
            BUGS[self.bug](self, entries, state)
        else:
            super().commit(entries, state=state)


async def serve(path: Path, *, bug: str, limit_bytes: int) -> None:
    """Decides what comes in until standard input ends, or the journal fails."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.readline()  # go
    journal = WrittenJournal(path, run_id=RUN_ID)
    journal.bug = bug
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    now = [0]
    core = Core(make_rules(num_trainers=1, expected_nodes=3), journal.reader.recover())
    authority = Authority(core, journal, clock=lambda: now[0], sealer=seal)

    async def answer(command: Command) -> None:
        event = msgspec.json.decode(command.event, type=getattr(events, command.kind))
        attachments = ((event.slot, command.body.encode()),) if command.body else ()
        try:
            reply = await authority.submit(event, attachments)
        except HexcombError as refusal:
            said = Answer(command.number, refusal.code)
        else:
            outcome = reply.outcome if isinstance(reply, Receipt) else "OK"
            said = Answer(command.number, outcome, reply if isinstance(reply, Grant) else None)
        print(msgspec.json.encode(said).decode(), flush=True)

    async with asyncio.TaskGroup() as tasks:
        deciding = tasks.create_task(authority.run())
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=Command)
            now[0] = command.now_ms
            tasks.create_task(answer(command))
        deciding.cancel()


def main() -> None:
    """Arguments: the journal, a bug or nothing, a limit of bytes for each file or 0."""
    journal_module.SNAPSHOT_EVERY = SNAPSHOT_EVERY
    journal_module.MIN_LOG_SHARE = 0.0
    path, bug, limit_bytes = sys.argv[1:]
    try:
        asyncio.run(serve(Path(path), bug=bug, limit_bytes=int(limit_bytes)))
    except* JournalError as group:
        print(group.exceptions[0], file=sys.stderr)
        raise SystemExit(JournalError.exit_code) from None


if __name__ == "__main__":
    main()
