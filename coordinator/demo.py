"""`hexcomb-coordinator demo`: a whole swarm as separate processes on loopback, watched until it has learned.

Every process is started by the command line that a person would type, in a home of its own, and joins by invite; the
demo itself reads nothing but the status endpoint. Invariant: no process outlives the demo, however that ends. The
verdict is the held-out accuracy alone: it must have doubled and reached `TARGET_ACCURACY`.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from coordinator.demo_view import View
from coordinator.page_client import http_get
from protocol.child_session import ProcessGroup
from protocol.errors import EngineError, HexcombError, UnreachableError

TARGET_ACCURACY = 0.8
"""The demo ends before its last version when two evaluations in a row reach it; the last one is the verdict's."""
START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 12.0
POLL_S = 1.0

Status = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo starts. `rollout_engines` has one entry for each rollout node; `chaos` kills a rollout node, a
    trainer and the coordinator at these versions. It ends early where two evaluations in a row reach `target`."""

    num_trainers: int
    rollout_engines: tuple[str, ...]
    run_file: str
    base_args: tuple[str, ...]
    stop_version: int
    deadline_s: float
    chaos: tuple[tuple[int, str], ...] = ()
    target: float = TARGET_ACCURACY
    base_deadline_s: float = START_DEADLINE_S
    trainer_threads: int = 1


@dataclass(slots=True)
class Member:
    """One process of the swarm, with all that it started."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    process: asyncio.subprocess.Process
    group: ProcessGroup
    log: TextIO

    async def kill(self) -> None:
        """Ends the process at once, as a power cut would, and waits until it is gone."""
        await self.group.close()
        await self.process.wait()
        self.log.close()


@dataclass(slots=True)
class Swarm:
    """The processes that run now, and where they live."""

    folder: Path
    members: dict[str, Member] = field(default_factory=dict)

    async def start(self, name: str, command: Sequence[str], *, stdin: str = "") -> Member:
        """Starts a process in a session of its own; its output goes to `<name>.log`."""
        log_path = self.folder / f"{name}.log"
        log = log_path.open("a")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        group = await ProcessGroup.around(process)
        member = self.members[name] = Member(name, tuple(command), log_path, process, group, log)
        return member

    def check(self) -> None:
        """Raises `EngineError` with the last lines of a process that has ended by itself."""
        for member in self.members.values():
            if member.process.returncode is not None:
                tail = "\n".join(member.log_path.read_text(errors="replace").splitlines()[-15:])
                raise EngineError(
                    f"{member.name} ended with status {member.process.returncode}",
                    why=f"its log says:\n{tail}",
                )

    async def stop(self) -> None:
        """SIGTERM to all, nodes before the coordinator, then SIGKILL to what is left."""
        nodes = [member for member in self.members.values() if member.name != "coordinator"]
        for members in (nodes, [member for member in self.members.values() if member not in nodes]):
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    member.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_DEADLINE_S):
                    await asyncio.gather(*(member.process.wait() for member in members))
            await asyncio.gather(*(member.kill() for member in members))


def program(name: str) -> str:
    """The console script `name` of the environment that runs this."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


async def run_demo(plan: DemoPlan, *, folder: Path, base: Path, view: View) -> bool:
    """Runs the swarm; True if it learned what it should. Raises `HexcombError` when it cannot run."""
    started = time.monotonic()
    final = await run_swarm(plan, folder=folder, base=base, view=view, then=_status)
    return view.verdict(
        final,
        engines_wanted=plan.rollout_engines,
        target=plan.target,
        seconds=time.monotonic() - started,
        chaos=bool(plan.chaos),
    )


async def run_swarm(
    plan: DemoPlan, *, folder: Path, base: Path, view: View, then: Callable[["Swarm", Status], Awaitable[T]]
) -> T:
    """Runs the swarm until it is over, and gives what `then` makes of it and its last status while it still lives."""
    started = time.monotonic()
    if not (base / "body.msgpack").exists():
        await make_base(plan, base, view)
    (folder / "run.toml").write_text(plan.run_file)
    swarm = Swarm(folder)
    try:
        page = await start_coordinator(swarm)
        view.say(f"coordinator up, page at {page}")
        await start_nodes(plan, swarm, base=base)
        final = await _watch(plan, swarm, page=page, view=view, ends_at=started + plan.deadline_s)
        return await then(swarm, final)
    finally:
        await swarm.stop()


async def _status(_: "Swarm", final: Status) -> Status:
    return final


async def start_coordinator(swarm: Swarm) -> str:
    """Serves the run file of the swarm's folder; its page's address once it is ready."""
    serve = ("serve", str(swarm.folder / "run.toml"), "--home", str(swarm.folder / "coordinator"))
    await swarm.start("coordinator", (program("hexcomb-coordinator"), *serve))
    return await wait_for_page(swarm, swarm.folder / "coordinator")


async def make_base(plan: DemoPlan, base: Path, view: View) -> None:
    """Makes the base model's folder, or nothing of it."""
    view.say("making the base model (once; it is cached)")
    making = base.with_name(base.name + ".making")  # a demo that was stopped here leaves no half base behind
    shutil.rmtree(making, ignore_errors=True)
    command = (program("hexcomb"), "base", "create", str(making), *plan.base_args)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(plan.base_deadline_s):
            if await process.wait() != 0:
                raise EngineError("the base model could not be made", why=f"`{' '.join(command)}` failed")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    making.replace(base)


async def start_nodes(plan: DemoPlan, swarm: Swarm, *, base: Path) -> None:
    """Invites the plan's nodes and starts them, each with a home of its name in the swarm's folder."""
    home = swarm.folder / "coordinator"
    for role, engines in (("trainer", ("auto",) * plan.num_trainers), ("rollout", plan.rollout_engines)):
        if not engines:
            continue
        invite = await output(
            program("hexcomb-coordinator"), "invite", "create", "--home", str(home), "--role", role,
            "--uses", str(len(engines)), "--expires", "1h",
        )  # fmt: skip
        for number, engine in enumerate(engines, 1):
            name = f"{role}-{number}"
            seed = ("--base", str(base)) if role == "trainer" else ()
            threads = plan.trainer_threads if role == "trainer" else 1
            node_home = str(swarm.folder / name)
            options = ("--home", node_home, "--name", name, "--engine", engine, "--threads", str(threads), *seed)
            await swarm.start(name, (program("join-swarm"), "-", *options), stdin=invite)


async def _watch(plan: DemoPlan, swarm: Swarm, *, page: str, view: View, ends_at: float) -> Status:
    """Follows the status until the last version is evaluated; does the chaos on the way."""
    due = list(plan.chaos)
    status: Status = {}
    while time.monotonic() < ends_at:
        swarm.check()
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # the coordinator may be away
            status = json.loads(await http_get(page + "api/v1/status"))
            view.show(status, page=page)
            if due and status["version"] >= due[0][0]:
                await _break(swarm, due.pop(0)[1], view)
        if status and not due and is_over(plan, status):
            return status
        await asyncio.sleep(POLL_S)
    if status and status["evaluations"] and not due:
        return status
    raise UnreachableError(
        f"the swarm was not done within {plan.deadline_s:.0f} s",
        why=f"it stands at version {status.get('version', '?')}: {status.get('waiting_for', 'no status came')}",
        remedy=f"The logs are in {swarm.folder}.",
    )


async def _break(swarm: Swarm, name: str, view: View) -> None:
    """kill -9; a coordinator is started again by the same command."""
    member = swarm.members.pop(name)
    await member.kill()
    view.say(f"killed {name} with SIGKILL")
    if name == "coordinator":
        await swarm.start(name, member.command)
        view.say("started the coordinator again")


def is_over(plan: DemoPlan, status: Status) -> bool:
    """Whether the last version is evaluated, or the last two evaluations are both good enough."""
    evaluations = status["evaluations"]
    if evaluations and evaluations[-1]["version"] >= plan.stop_version:
        return True
    enough = max(plan.target, 2 * evaluations[0]["accuracy"]) if evaluations else 1.0
    return len(evaluations) > 2 and all(e["accuracy"] >= enough for e in evaluations[-2:])


async def wait_for_page(swarm: Swarm, home: Path) -> str:
    """The page's address, once the coordinator is ready."""
    ends_at = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends_at:
        swarm.check()
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            page = str(json.loads((home / "addresses.json").read_text())["status"])
            await http_get(page + "readyz")
            return page
        await asyncio.sleep(0.2)
    raise UnreachableError("the coordinator did not become ready", why=f"see {home.parent / 'coordinator.log'}")


async def output(*command: str, deadline_s: float = 60.0) -> str:
    """What a command prints. Raises `HexcombError` with its complaint where it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(deadline_s):
        out, err = await process.communicate()
    if process.returncode != 0:
        raise HexcombError(f"`{' '.join(command)}` failed", why=err.decode().strip())
    return out.decode()
