"""`hexcomb-coordinator`: the organizer's commands. What is heavy is imported by the command that needs it.

Data goes to standard output, words about it to standard error; an error says what happened, why and what to do, and
ends the process with the exit code of its class.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from protocol.errors import HexcombError, JournalError, UsageError

app = typer.Typer(
    name="hexcomb-coordinator",
    help="Organize a run: start its coordinator, invite nodes, watch it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
invite_app = typer.Typer(help="Invitations to the run.", no_args_is_help=True)
app.add_typer(invite_app, name="invite")

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

DEFAULT_HOME = platformdirs.user_data_path("hexcomb-coordinator")

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="HEXCOMB_COORDINATOR_HOME", help="The coordinator's home folder.")
]


@app.command()
def serve(
    run_file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Start the coordinator of a run and serve until interrupted.

    Example: hexcomb-coordinator serve run.toml
    """
    from coordinator.home import CoordinatorHome
    from coordinator.settings import read_run_file

    run = read_run_file(run_file)
    coordinator_home = CoordinatorHome.ensure(home)

    import uvloop

    from coordinator.server import Coordinator
    from protocol.heap import steady_heap

    steady_heap()
    with coordinator_home.hold():
        uvloop.run(Coordinator(coordinator_home, run).serve())


@invite_app.command("create")
def invite_create(
    home: HomeOption = DEFAULT_HOME,
    uses: Annotated[int, typer.Option(min=1, max=100_000, help="How many nodes may use it.")] = 1,
    expires: Annotated[str, typer.Option(help="How long it holds: 90m, 24h, 7d.")] = "24h",
    role: Annotated[str, typer.Option(help="auto, trainer or rollout.")] = "auto",
) -> None:
    """Print a one-line invite for `join-swarm`. It is a secret: whoever has it can join.

    Example: hexcomb-coordinator invite create --uses 10 --expires 7d
    """
    from coordinator.home import CoordinatorHome
    from protocol.local_socket import ask

    if role not in ("auto", "trainer", "rollout"):
        raise UsageError(f"role {role!r} is unknown", remedy="Choose auto, trainer or rollout.")
    where = CoordinatorHome.open(home).socket
    expires_s = duration_s(expires)
    answer = asyncio.run(ask(where, "invite", who="coordinator", uses=uses, expires_s=expires_s, role=role))
    typer.echo(answer["invite"])


@app.command()
def status(
    home: HomeOption = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole status as JSON.")] = False,
) -> None:
    """Show the run as it stands.

    Example: hexcomb-coordinator status --json
    """
    from coordinator.demo_view import summary
    from coordinator.home import CoordinatorHome
    from coordinator.page_client import http_get
    from protocol.errors import DaemonNotRunningError

    page = CoordinatorHome.open(home).read_addresses().get("status", "")
    try:
        text = asyncio.run(http_get(page + "api/v1/status"))
    except (OSError, ValueError, TimeoutError) as error:
        raise DaemonNotRunningError(
            "the coordinator does not answer", why=str(error), remedy="Start it with `hexcomb-coordinator serve`."
        ) from error
    typer.echo(text if as_json else summary(json.loads(text)))


@app.command()
def replay(
    home: HomeOption = DEFAULT_HOME,
    until: Annotated[str | None, typer.Option(help="Up to this fact's number, or this time (ISO 8601).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the state again from the journal, prove its snapshots on the way, and print it. The run may go on meanwhile.

    Example: hexcomb-coordinator replay --until 2030-01-31T12:00:00Z
    """
    from coordinator.home import CoordinatorHome
    from coordinator.journal_reader import JournalReader
    from coordinator.replay import replay_until, summary_of, text_of

    reader = JournalReader(CoordinatorHome.open(home).journal)
    try:
        found = replay_until(reader, until)
    finally:
        reader.close()
    typer.echo(json.dumps(summary_of(found), indent=2) if as_json else text_of(found))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Copy the journal to FILE and check the copy. The run may go on meanwhile.

    Example: hexcomb-coordinator backup journal-monday.db
    """
    from coordinator.backup import back_up
    from coordinator.home import CoordinatorHome

    where = CoordinatorHome.open(home)
    num_bytes = back_up(where.journal, file)
    typer.echo(f"{file}: {num_bytes} bytes, checked")
    typer.echo(
        f"A restore also needs identity.key, run.secret and run.id of {where.path}: copy them once, to a safe place.",
        err=True,
    )


@app.command()
def check(home: HomeOption = DEFAULT_HOME) -> None:
    """Check the journal: pages, checksums, replay, books; ends with 1 if it is damaged. The run may go on meanwhile.

    Example: hexcomb-coordinator check
    """
    from coordinator.home import CoordinatorHome
    from coordinator.replay import prove

    path = CoordinatorHome.open(home).journal
    try:
        found, num_rollouts = prove(path)
    except JournalError as error:
        typer.echo(f"error: {error.sentence()}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{path}: sound; {found.num_facts} facts replayed up to {found.seq}, {num_rollouts} rollouts read")


@app.command()
def demo(
    nodes: Annotated[int, typer.Option(min=2, max=16, help="How many nodes; half of them train, at most two.")] = 4,
    engine: Annotated[str, typer.Option(help="mixed, vllm or transformers.")] = "mixed",
    task: Annotated[str, typer.Option(help="A reasoning-gym environment; chain_sum is tuned.")] = "chain_sum",
    chaos: Annotated[bool, typer.Option(help="Kill a rollout node, a trainer and the coordinator on the way.")] = False,
    versions: Annotated[int | None, typer.Option(min=1, help="Stop after so many versions.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Work in this folder and leave it there.")] = None,
) -> None:
    """Run a whole swarm on this machine until it has learned: separate processes that join by invite.

    Example: hexcomb-coordinator demo --nodes 4
    """
    from coordinator.demo_settings import start_demo

    learned = start_demo(num_nodes=nodes, engine=engine, task=task, chaos=chaos, num_versions=versions, keep=keep)
    raise typer.Exit(0 if learned else 1)


@app.command("demo-real")
def demo_real(
    versions: Annotated[int, typer.Option(min=1, help="Stop after so many versions.")] = 10,
    engine: Annotated[str, typer.Option(help="mixed, vllm or transformers.")] = "mixed",
    keep: Annotated[Path | None, typer.Option(help="Work in this folder and leave it there.")] = None,
) -> None:
    """Run a swarm that trains SmolLM2-135M-Instruct on sums, and export the last version.

    Example: hexcomb-coordinator demo-real --versions 10
    """
    from coordinator.demo_real import start_demo_real
    from coordinator.demo_settings import MIXES

    if engine not in MIXES:
        raise UsageError(f"engine {engine!r} is unknown", remedy=f"Choose one of {', '.join(MIXES)}.")
    mix = MIXES[engine]
    passed = start_demo_real(num_versions=versions, engines=(mix[0], mix[-1]), keep=keep)
    raise typer.Exit(0 if passed else 1)


def duration_s(text: str) -> float:
    """Seconds of `90s`, `90m`, `24h`, `7d`. Raises `UsageError`."""
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in UNITS_S or int(number) == 0:
        raise UsageError(f"{text!r} is no duration", remedy="Write a number and s, m, h or d, such as 24h.")
    return float(int(number) * UNITS_S[unit])


def main() -> None:
    """The console script."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it has to say, our own errors say better
    try:
        app(standalone_mode=True)
    except HexcombError as error:
        print(f"error: {error.sentence()}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
