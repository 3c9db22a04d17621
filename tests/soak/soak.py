"""The soak: a whole swarm on this machine, whose processes are killed and stopped at random, while it is watched.

`python -m tests.soak.soak --minutes 40` starts what the demo starts, without a goal: small batches, so that versions
come fast. Every kind of process is killed with SIGKILL or stopped with SIGSTOP for a while, by a seed that is printed;
daemons and the coordinator are started again here, children by their daemons. For the last third the coordinator and
the first node of each role are left alone themselves, so that memory is also seen over a long life. One table at the
end; status 1 on a miss. No process outlives this one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from coordinator.core.books import check
from coordinator.demo import DemoPlan, Swarm, make_base, program, start_coordinator, start_nodes
from coordinator.demo_settings import base_folder, make_plan, until_signalled
from coordinator.demo_view import View
from coordinator.journal_reader import JournalReader
from coordinator.page_client import http_get
from protocol.errors import HexcombError, UnreachableError
from tests.bench.table import Figure, at_least, at_most, print_table
from tests.soak.ledger import Ledger
from tests.soak.verdict import figures
from tests.soak.victims import Deck, Victim, family_of, processes_of

TASK = "chain_sum"
RUN_FILE = """\
name = "soak"
base = "{base}"
[task]
environment = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
[sampling]
max_new_tokens = 6
[batch]
groups = 4
group_size = 8
max_lag = 2
[optimizer]
lr = 1e-5
[nodes]
trainers = 2
rollouts = {num_rollouts}
expected = {num_nodes}
[limits]
heartbeat_s = 1.0
lease_s = 20.0
round_s = 20.0
[evaluation]
every = 50
[listen]
join_port = 0
control_port = 0
dht_port = 0
status_port = 0
"""
MARK = "HEXCOMB_SOAK"
FIRST_VERSION_DEADLINE_S = 240.0
LOOK_EVERY_S, ASK_EVERY_S = 10.0, 2.0
REVIVE_AFTER_S = 1.0
ORPHAN_DEADLINE_S = 10.0
QUIET_SHARE = 1 / 3
SPARED = ("coordinator", "trainer-1", "rollout-1")


@dataclass(slots=True)
class Soak:
    """One run of it. `chance` decides who suffers when; `every_s` is the mean time between two misfortunes."""

    swarm: Swarm
    view: View
    chance: random.Random
    lasts_s: float
    every_s: float
    page: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    started_s: float = 0.0
    down: set[str] = field(default_factory=set)

    @property
    def at_s(self) -> float:
        """Seconds since the first version."""
        return time.monotonic() - self.started_s

    async def run(self, plan: DemoPlan, *, base: Path) -> None:
        """Starts the swarm, and lets it suffer until its time is over."""
        (self.swarm.folder / "run.toml").write_text(plan.run_file)
        self.page = await start_coordinator(self.swarm)
        await start_nodes(plan, self.swarm, base=base)
        await self._wait_for_first_version()
        self.view.say(f"first version made, page at {self.page}")
        self.started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(part) for part in (self._ask(), self._look(), self._torment(tasks))]
            await asyncio.sleep(self.lasts_s)
            for part in parts:
                part.cancel()

    async def _wait_for_first_version(self) -> None:
        ends_at = time.monotonic() + FIRST_VERSION_DEADLINE_S
        while time.monotonic() < ends_at:
            self.swarm.check()
            status = await self._status()
            if status is not None and status["version"] >= 1:
                return
            await asyncio.sleep(ASK_EVERY_S)
        raise UnreachableError("the swarm made no version", why=f"the logs are in {self.swarm.folder}")

    async def _status(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            answer: dict[str, Any] = json.loads(await http_get(self.page + "api/v1/status"))
            return answer
        return None

    async def _ask(self) -> None:
        """Books and version, and whether some daemon has ended that nobody killed."""
        while True:
            self.ledger.note_status(await self._status(), at_s=self.at_s)
            for name, member in list(self.swarm.members.items()):
                if member.process.returncode is not None and name not in self.down:
                    self.ledger.ended.append(name)
                    self.view.say(f"{self.at_s:6.0f} s  {name} ENDED with status {member.process.returncode}")
                    await self._revive(name)
            await asyncio.sleep(ASK_EVERY_S)

    async def _look(self) -> None:
        """Memory, descriptors, disk."""
        while True:
            homes = [self.swarm.folder / name for name in self.swarm.members]
            victims = await asyncio.to_thread(processes_of, self.swarm)
            await asyncio.to_thread(self.ledger.look, victims, homes, at_s=self.at_s, now_s=time.time())
            if self.ledger.version_times:
                at_s, version = self.ledger.version_times[-1]
                self.view.say(f"{self.at_s:6.0f} s  version {version}, {self.at_s - at_s:.0f} s old")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _torment(self, tasks: asyncio.TaskGroup) -> None:
        deck = Deck(self.chance)
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / self.every_s))
            victims = await asyncio.to_thread(processes_of, self.swarm)
            is_quiet = self.at_s > self.lasts_s * (1 - QUIET_SHARE)
            fit = [v for v in victims if v.member not in self.down and not (is_quiet and _is_spared(v))]
            victim = deck.draw(fit)
            if victim is None:
                continue
            stop_s = deck.stop_s()
            word = f"stopped for {stop_s:.0f} s" if stop_s else "killed"
            self.view.say(f"{self.at_s:6.0f} s  {victim.kind} of {victim.member} {word}")
            self.ledger.kills[f"{victim.kind} {word.partition(' ')[0]}"] += 1
            tasks.create_task(self._stop(victim, stop_s) if stop_s else self._kill(victim))

    async def _stop(self, victim: Victim, stop_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(stop_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

    async def _kill(self, victim: Victim) -> None:
        """SIGKILL to the process alone; a daemon's children must go by themselves, and it is started again."""
        family = family_of(victim.pid)
        if victim.is_member:
            self.down.add(victim.member)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        if not victim.is_member:
            return
        _, alive = await asyncio.to_thread(psutil.wait_procs, family[1:], timeout=ORPHAN_DEADLINE_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.ledger.orphans.append(f"{victim.member}: {' '.join(process.cmdline())[:200]}")
                    process.kill()
        await asyncio.sleep(REVIVE_AFTER_S)
        await self._revive(victim.member)

    async def _revive(self, name: str) -> None:
        """What a service manager would do."""
        member = self.swarm.members[name]
        await member.kill()
        up = (program("hexcomb"), "up", "--home", str(self.swarm.folder / name))
        await self.swarm.start(name, member.command if name == "coordinator" else up)
        self.down.discard(name)


def _is_spared(victim: Victim) -> bool:
    return victim.is_member and victim.member in SPARED


def journal_figures(home: Path) -> list[Figure]:
    """Whether the journal that is left replays to its snapshots, and to books that hold."""
    reader = JournalReader(home / "journal.db")
    try:
        num_facts = reader.check_replay()
        check(reader.recover())
    except (HexcombError, AssertionError) as error:
        print(f"journal: {error}", file=sys.stderr)
        num_facts = 0
    finally:
        reader.close()
    return [at_least("facts replayed to equal snapshots and sound books", num_facts, 1, anchor="the journal")]


def leftovers(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark of this soak, this one left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def sweep(mark: str) -> int:
    """Ends what is left behind; how many there were."""
    _, alive = psutil.wait_procs(leftovers(mark), timeout=5)
    for process in alive:
        print(f"LEFT BEHIND: {process.pid} {' '.join(process.cmdline())[:200]}", file=sys.stderr)
        process.kill()
    return len(alive)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill every kind of process of a swarm at random, and watch.")
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("MINUTES") or 40))
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds between two misfortunes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--vllm", action="store_true", help="a third rollout node, on vLLM")
    parser.add_argument("--keep", type=Path, default=None, help="work in this new folder and leave it there")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    mark = os.environ[MARK] = secrets.token_hex(8)
    os.environ["GRPC_VERBOSITY"] = "NONE"
    folder = options.keep or Path(tempfile.mkdtemp(prefix="hx-soak-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    engines = ("transformers", "transformers", *(("vllm",) if options.vllm else ()))
    base = base_folder(TASK)
    run_file = RUN_FILE.format(base=base, num_rollouts=len(engines), num_nodes=2 + len(engines))
    demo = make_plan(num_nodes=4, engine="transformers", task=TASK, chaos=False, num_versions=None, base=base)
    plan = DemoPlan(2, engines, run_file, demo.base_args, stop_version=0, deadline_s=0)
    passed = False
    with View(Console(force_terminal=False)) as view:
        view.say(f"soak of {options.minutes:g} minutes, seed {seed}, in {folder}")
        soak = Soak(Swarm(folder), view, random.Random(seed), options.minutes * 60, options.every)
        try:
            asyncio.run(until_signalled(_whole(soak, plan, base)))
            lasted_s = soak.lasts_s
            soak.ledger.write(folder / "samples.jsonl")
            table = [*figures(soak.ledger, lasted_s=lasted_s), *journal_figures(folder / "coordinator")]
            table.append(at_most("processes left behind", sweep(mark), 0, anchor="none"))
            for trouble in (*soak.ledger.unbalanced, *soak.ledger.ended, *soak.ledger.orphans):
                view.say(f"TROUBLE {trouble}")
            passed = print_table(table)
        except KeyboardInterrupt:
            view.say("interrupted, no verdict")
        finally:
            sweep(mark)
            if passed and options.keep is None:
                shutil.rmtree(folder)
            else:
                view.say(f"the homes and logs are in {folder}")
    return 0 if passed else 1


async def _whole(soak: Soak, plan: DemoPlan, base: Path) -> bool:
    if not (base / "body.msgpack").exists():
        await make_base(plan, base, soak.view)
    try:
        await soak.run(plan, base=base)
    finally:
        await soak.swarm.stop()
    return True


if __name__ == "__main__":
    raise SystemExit(main())
