"""The console script `hexcomb`. Impure.

`hexcomb status`, which people and their scripts ask again and again, is answered from here: the library of the command
line takes longer to import than all that it does. Invariant: it prints and leaves as the same command of `node.cli`
does, which also has every other command, and every mistake.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.failure import explain
from node.home_path import default_home
from protocol.errors import HexcombError
from protocol.local_ask import ask_now
from protocol.runtime import home_socket

STATUS_DEADLINE_S = 5.0


def main() -> None:
    """The console script."""
    plain = plain_status(sys.argv[1:])
    if plain is None:
        from node.cli import main as whole

        whole()
        return
    home, as_json = plain
    try:
        answer = ask_now(home_socket(home or default_home(), "daemon.sock"), "status", deadline_s=STATUS_DEADLINE_S)
    except HexcombError as error:
        print(explain(error), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if as_json:
        print(json.dumps(answer))
    else:
        show_status(answer)


def plain_status(arguments: Sequence[str]) -> tuple[Path | None, bool] | None:
    """Home and whether JSON is wanted, of `status [--home FOLDER] [--json]`; None for anything else."""
    if not arguments or arguments[0] != "status":
        return None
    home, as_json, rest = None, False, list(arguments[1:])
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word == "--home" and rest and not rest[0].startswith("-"):
            home = Path(rest.pop(0))
        elif word.startswith("--home=") and word != "--home=":
            home = Path(word.removeprefix("--home="))
        else:
            return None
    return home, as_json


def show_status(answer: dict[str, Any]) -> None:
    """The answer for people."""
    coordinator, directory = answer["coordinator"], answer["directory"]
    link = "connected" if coordinator["is_up"] else f"NOT CONNECTED: {coordinator['trouble'] or 'dialling'}"
    loaded = "no weights" if answer["version"] is None else f"weights v{answer['version']}"
    taken, rate = answer["counts"].get("receipt/ACCEPTED", 0), f"{answer['tokens_per_s']:.1f} tokens/s"
    print(f"{answer['name'] or answer['peer_id']}  {answer['role']} node, {loaded} (head v{answer['head']})")
    print(f"  doing        {answer['activity']}")
    print(f"  coordinator  {coordinator['address']}, {link}")
    print(f"  engine       {answer['engine'] or '-'}, {rate}, {answer['tokens']} tokens in all")
    if answer["engine_choice"] and answer["engine"]:
        print(f"  chosen       {answer['engine_choice']}")
    print(f"  rollouts     {taken} accepted, {answer['leases']} leases open")
    print(f"  directory    {directory['num_neighbours']} neighbours, peer service {answer['endpoint']}")
    limits = answer["limits"]
    if limits["set"]:
        print(f"  limits       {', '.join(f'{name} = {value}' for name, value in limits['set'].items())}")
    if answer["finishing"]:
        left = "" if answer["finish_in_s"] is None else f", at the latest in {max(answer['finish_in_s'], 0):.0f} s"
        print(f"! finishing, as its owner asked{left}")
    elif answer["paused"]:
        print(f"! paused: {answer['paused']}")
    for what in limits["not_available"]:
        print(f"! limit not available: {what}")
    if answer["trouble"]:
        print(f"! {answer['trouble']}")


if __name__ == "__main__":
    main()
