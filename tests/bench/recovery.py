"""How fast a coordinator is back, and how large its journal is, after a long run: the real core and the real journal.

One process plays a million accepted, scored and trained rollouts of 2 KB and is killed with its log open; another one
opens what is left. `HEXCOMB_BENCH_ROLLOUTS` makes the run shorter.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.core import events as e
from coordinator.core.facts import RolloutAccepted, VersionCommitted
from coordinator.core.handle import Core
from coordinator.core.state import State, encode_state
from coordinator.journal import Entry, Journal
from protocol.errors import NoWorkError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, TaskKey, Version
from protocol.manifest import Body, SignedManifest, digest_of
from tests.bench.table import Figure, at_least, at_most, print_table, reported
from tests.coordinator.world import RUN_ID, World, make_body, make_rules

NUM_ROLLOUTS = int(os.environ.get("HEXCOMB_BENCH_ROLLOUTS", "1000000"))
RESTART_S, DISK_MB, GROWTH = 5.0, 200.0, 1.05
BODY = b"\x07" * 2048
MANIFEST = SignedManifest(b"\x07" * 16_384, b"\x07" * 64)
CHUNKS = tuple(digest_of(b"%d" % number) for number in range(256))
NODES = ("r0", "r1", "r2", "r3")
RULES = make_rules(groups_per_batch=16, group_size=16, max_lag=4, num_trainers=1, expected_nodes=5)


def body_of(version: int, parent: Digest | None) -> Body:
    """A body of 256 chunks, of which one changes."""
    body = make_body(version, parent=parent)
    return replace(body, chunks=(body.chunks[0], *CHUNKS[1:]))


class LongRun(World):
    """A trainer and four rollout nodes that never rest, and their journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(RULES)
        self.is_checked, self.num_accepted = False, 0
        self.journal = Journal(path, run_id=RUN_ID)
        self.do(e.BaseRegistered(body_of(0, None)))
        self.join("t0", allowed="trainer")
        for name in NODES:
            self.join(name, allowed="rollout")

    def play(self, num_rollouts: int) -> None:
        """Until so many are accepted."""
        while self.num_accepted < num_rollouts:
            self.now_ms += 1000
            self.do(e.TimerFired())
            for name in ("t0", *NODES):
                self.see(name)
            for name in NODES:
                self.fill(name)
            state = self.core.state
            if state.round is not None and state.head is not None:
                body = body_of(state.head.version + 1, state.head.root)
                self.do(e.VersionAttested(PeerId("t0"), state.round.round_id, body, {"loss": 1.0}))
            self.write()

    def fill(self, name: str) -> None:
        """One lease, all of whose slots are filled and scored."""
        try:
            grant = self.lease(name, 64)
        except NoWorkError:
            return
        for slot in grant.slots:
            self.submit(grant, slot, name=name)
            self.score(slot)
        self.num_accepted += len(grant.slots)

    def write(self) -> None:
        """One transaction."""
        facts = tuple(self.facts)
        self.facts.clear()
        self.effects.clear()
        bodies = tuple((fact.slot, BODY) for fact in facts if isinstance(fact, RolloutAccepted))
        manifests = tuple((fact.version, MANIFEST) for fact in facts if isinstance(fact, VersionCommitted))
        self.journal.append([Entry(self.now_ms, facts, bodies, manifests)], state=self.core.state)


def build(path: Path) -> None:
    """Plays the run, says what came of it, and dies without closing anything."""
    began_s, run = time.monotonic(), LongRun(path)
    run.play(NUM_ROLLOUTS // 2)
    middle = len(encode_state(run.core.state))
    run.play(NUM_ROLLOUTS)
    state = run.core.state
    told = {
        "accepted": run.num_accepted,
        "trained": state.tally["trained"],
        "version": state.head.version if state.head else 0,
        "middle_bytes": middle,
        "state_bytes": len(encode_state(state)),
        "digest": digest_of(encode_state(state)),
        "seconds": time.monotonic() - began_s,
    }
    print(json.dumps(told), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def reopen(path: Path) -> None:
    """What a coordinator does before it can decide anything."""
    journal = Journal(path, run_id=RUN_ID)
    core = Core(RULES, journal.reader.recover())
    print(json.dumps({"digest": digest_of(encode_state(core.state))}), flush=True)
    journal.close()


def child(what: str, path: Path) -> tuple[dict[str, Any], float]:
    """What a process of its own says, and the seconds that it took, its start included."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "tests.bench.recovery", what, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout), time.monotonic() - began_s


def commits_per_s(path: Path, *, batch: int, seconds: float = 3.0) -> float:
    """Rollouts of 2 KB accepted per second, so many to a COMMIT, as the authority groups them under load."""
    journal, count, began_s = Journal(path, run_id=RUN_ID), 0, time.monotonic()
    while time.monotonic() - began_s < seconds:
        entries = []
        for _ in range(batch):
            slot = SlotKey(Version(0), TaskKey("sums", 7, count), 0)
            name = digest_of(str(slot).encode())
            fact = RolloutAccepted(slot, LeaseId("0" * 16), PeerId("r0"), name, ((Version(0), 64),), 0)
            entries.append(Entry(0, (fact,), ((slot, BODY),)))
            count += 1
        journal.append(entries, state=State())
    rate = count / (time.monotonic() - began_s)
    journal.close()
    return rate


def figures() -> list[Figure]:
    """Restart, disk, growth, proof, and the rate of durable acceptances."""
    with tempfile.TemporaryDirectory(prefix="hexcomb-bench-") as folder:
        path = Path(folder) / "journal.db"
        told, _ = child("build", path)
        size_mb = sum(file.stat().st_size for file in path.parent.glob("journal.db*")) / 1e6
        found, restart_s = child("reopen", path)
        same = found["digest"] == told["digest"] and told["accepted"] >= NUM_ROLLOUTS
        journal = Journal(path, run_id=RUN_ID)
        num_facts = journal.reader.check_replay()
        num_rows = journal.reader.check_content(journal.reader.recover())
        journal.close()
        grouped, single = (commits_per_s(Path(folder) / f"{batch}.db", batch=batch) for batch in (64, 1))
    count = f"{told['accepted']:,} rollouts"
    life = f"killed at version {told['version']} after {told['seconds']:.0f} s, {told['trained']:,} trained"
    return [
        at_most(f"restart after {count}", restart_s, RESTART_S, unit="s", anchor=f"new process, {life}"),
        at_least("state after the restart is the same", float(same), 1.0, anchor="digest of the whole state"),
        at_most(
            f"journal after {count}", size_mb, DISK_MB, unit="MB", anchor=f"file and log, {num_rows} rollouts kept"
        ),
        at_most("state at the end / in the middle", told["state_bytes"] / told["middle_bytes"], GROWTH, anchor="bytes"),
        at_least("facts that prove the snapshots", float(num_facts), 1.0, anchor="check_replay"),
        reported("durable acceptances, 64 to a COMMIT", grouped, unit="/s", anchor="2 KB each, synchronous=FULL"),
        reported("durable acceptances, 1 to a COMMIT", single, unit="/s", anchor="the same"),
    ]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"build": build, "reopen": reopen}[sys.argv[1]](Path(sys.argv[2]))
    else:
        sys.exit(0 if print_table(figures()) else 1)
