"""What the demo shows: a live table on a terminal, plain lines elsewhere, and the verdict. Impure: prints."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

Status = dict[str, Any]
LINE_EVERY_S = 10.0
COLUMNS = (
    ("reward", "reward"),
    ("length", "length/mean"),
    ("lag", "staleness/mean"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("k3", "mismatch/k3"),
    ("ess", "mismatch/ess"),
    ("grad norm", "grad_norm"),
    ("rollouts", "num_slots"),
)


class View:
    """Use as a context manager; `say` prints a sentence, `show` the state of the swarm."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=2, transient=False)
        self._last_line_s = float("-inf")
        self._engines: dict[str, str] = {}

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """One line that stays."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def show(self, status: Status, *, page: str) -> None:
        """The swarm now: the whole table on a terminal, else a line every ten seconds in which something moved."""
        rollouts = [node for node in status["nodes"] if node["role"] == "rollout"]
        self._engines.update({node["peer_id"]: node["engine"] for node in rollouts if node["engine"]})
        if self._console.is_terminal:
            self._live.update(Group(_headline(status, page), _table(status)))
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(_line(status))

    def verdict(
        self, status: Status, *, engines_wanted: Sequence[str], target: float, seconds: float, chaos: bool
    ) -> bool:
        """Prints what came out; True if accuracy over the same tasks doubled since version 0 and reached `target`, the
        books balance, no version differed, and rollouts of every engine that was wanted were trained on."""
        first, last = status["evaluations"][0], status["evaluations"][-1]
        before, after = first["accuracy"], last["accuracy"]
        is_fair = first["version"] == 0 and first["num_tasks"] == last["num_tasks"]
        self.say("")
        self.say(
            f"held-out accuracy on {last['num_tasks']} tasks: {before:.3f} before (version {first['version']}), "
            f"{after:.3f} after (version {last['version']})"
        )
        sound = self.accounts(status, engines_wanted=engines_wanted)
        self.say(f"took {seconds:.0f} s{' with a rollout node, a trainer and the coordinator killed' if chaos else ''}")
        learned = is_fair and after >= target and after >= 2 * before
        self.say("PASS" if learned and sound else f"FAIL: accuracy must double and reach {target}, on sound books")
        return learned and sound

    def accounts(self, status: Status, *, engines_wanted: Sequence[str]) -> bool:
        """Prints versions, books and engines; True if the books balance, no version differed between trainers, and
        rollouts of every engine that was wanted were trained on."""
        books, leases = status["books"], status["leases"]
        parts = ("running", "queued", "in_round", "trained", "dropped", "filtered", "failed")
        balanced = books["issued"] == sum(books[part] for part in parts)
        engines = dict.fromkeys([*engines_wanted, *self._engines.values()], 0)
        for node in status["nodes"]:
            if node["peer_id"] in self._engines:
                engines[self._engines[node["peer_id"]]] += node["rollouts_trained"]
        self.say(
            f"versions committed: {status['version']}, of which differed between trainers: {status['num_diverged']}"
        )
        self.say(
            f"rollouts: {status['num_accepted']} accepted, {books['trained']} trained, {leases['expired']} expired; "
            f"books {'balance' if balanced else 'DO NOT BALANCE'}: issued {books['issued']} = "
            + " + ".join(f"{books[part]} {part}" for part in parts)
        )
        self.say("trained by engine: " + ", ".join(f"{name} {count}" for name, count in sorted(engines.items())))
        return bool(balanced and status["num_diverged"] == 0 and all(engines.values()))

    def metrics(self, status: Status) -> None:
        """Prints a line for each version with what people look at first, and every metric of the last one."""
        held = {found["version"]: found["accuracy"] for found in status["evaluations"]}
        self.say("")
        self.say(" ".join(f"{title:>9}" for title in ("version", "held-out", *(title for title, _ in COLUMNS))))
        for point in status["history"]:
            values = (point["metrics"].get(name) for _, name in COLUMNS)
            accuracy = held.get(point["version"])
            cells = (f"{value:9.4g}" if value is not None else " " * 8 + "-" for value in (accuracy, *values))
            self.say(f"{point['version']:9d} " + " ".join(cells))
        if status["history"]:
            last = status["history"][-1]
            self.say(f"all metrics of version {last['version']}:")
            for name, value in sorted(last["metrics"].items()):
                self.say(f"  {name:<32} {value:.6g}")


def summary(status: Status) -> str:
    """The status for a person in a terminal."""
    run = status["run"]
    lines = [f"{run['name']}: {status['state'].lower().replace('_', ' ')}, {status['waiting_for']}", _line(status), ""]
    width = max([4, *(len(node["name"]) for node in status["nodes"])])
    for node in status["nodes"]:
        lines.append(
            f"  {node['name']:<{width}}  {node['role']:<8} {node['state']:<5} v{node['version']:<5} "
            f"{node['tokens_per_s']:>8.0f} tokens/s  {node['engine'] or node['device']}  {node['activity']}"
        )
    return "\n".join(lines)


def _line(status: Status) -> str:
    point = status["history"][-1] if status["history"] else None
    held = status["evaluations"][-1] if status["evaluations"] else None
    live = sum(node["state"] == "live" for node in status["nodes"])
    parts = [
        f"v{status['version']}",
        f"reward {point['reward']:.3f}" if point else "no reward yet",
        f"lag {point['mean_lag']:.2f}" if point else "",
        f"held-out {held['accuracy']:.3f} at v{held['version']}" if held else "",
        f"{status['tokens_per_s']:.0f} tokens/s",
        f"{live} nodes",
        status["waiting_for"],
    ]
    return "  ".join(part for part in parts if part)


def _headline(status: Status, page: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(f"[bold]{page}[/bold]", _line(status))
    return table


def _table(status: Status) -> Table:
    table = Table("node", "role", "state", "version", "tokens/s", "engine", "doing")
    for node in status["nodes"]:
        table.add_row(
            node["name"], node["role"], node["state"], str(node["version"]), f"{node['tokens_per_s']:.0f}",
            node["engine"], node["activity"],
        )  # fmt: skip
    return table
