"""How long a round takes to average, against hivemind, a bare exchange and gloo. `python -m tests.bench.averaging`.

Two and then four processes on loopback, 50 million float32 values. The sides take turns, there and back; in a turn the
processes of one side live alone, and a first round, in which connections are made, does not count. A round begins when
every member holds its vector and ends when the last one holds the average: for hexcomb with the commit added, but
without optimizer step, settling and storing, which the other sides do not have and which are given apart. hivemind's
matchmaking is over when its round begins. What each side leaves is looked at afterwards, outside of all times.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from node.weights.blobs import BlobStore
from node.weights.content import body_of
from protocol.ids import PeerId
from protocol.manifest import Body
from protocol.round import Member, sign_plan
from tests.bench.averaging_figures import Turn, figures_of
from tests.bench.averaging_hexcomb import BODY, MODEL
from tests.bench.averaging_member import Seating
from tests.bench.table import Figure, print_table
from tests.training.trainers import CONFIG, COORDINATOR, RUN_ID, plan_for, write_model

NUM_VALUES = 50_000_000
NUM_ROUNDS = 3
"""Rounds in a turn that count; every side has two turns."""
SIDES = ("hexcomb", "hivemind", "grpc", "gloo")
GROUPS = (2, 4)
ANSWER_S, END_S, ROUND_S = 300.0, 20.0, 240.0
LARGE, SMALL = 512, 64
"""Hidden sizes of the model whose parameters the values are."""


@dataclass(frozen=True, slots=True)
class Process:
    """A member's process, which answers orders one by one."""

    process: asyncio.subprocess.Process

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises `TimeoutError` or `ConnectionError` when there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            await self.process.stdin.drain()
            line = await self.process.stdout.readline()
        if not line:
            raise ConnectionError(f"a member ended while it was asked to {order['do']}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Lets it end by itself, then ends it and all that it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@dataclass(slots=True)
class Table:
    """All members of one side; `body` is the version that hexcomb's members have in force."""

    side: str
    processes: list[Process]
    folder: Path
    body: Body
    members: tuple[Member, ...] = ()

    async def all(self, do: str, **rest: Any) -> list[dict[str, Any]]:
        """The same order to all at once; their answers in order."""
        return await asyncio.gather(*(process.ask({"do": do, **rest}) for process in self.processes))

    async def sit_down(self) -> None:
        """Everybody gets to know everybody."""
        places = [answer["place"] for answer in await self.all("hello")]
        if self.side == "hexcomb":
            self.members = tuple(Member(PeerId(peer_id), endpoint) for peer_id, endpoint in places)
        await self.all("meet", places=places)

    async def play(self, number: int, *, is_kept: bool) -> Turn:
        """One round and what came of it; the results are compared value by value if they are kept."""
        await self.all("fill", round=number)
        seeking_s = time.monotonic()
        await self.all("seek")
        began_s = time.monotonic()
        answers = await self.all("average", word=self._plan() if self.members else None)
        averaged_s = max(answer["averaged_s"] for answer in answers) - began_s
        committing_s = time.monotonic()
        is_agreed = await self._commit([answer.get("body", "") for answer in answers])
        commit_s = time.monotonic() - committing_s
        keeps = [self.folder / f"result{index}" if is_kept else None for index in range(len(self.processes))]
        looks = await asyncio.gather(
            *(
                process.ask({"do": "look", "round": number, "keep": str(keep or "")})
                for process, keep in zip(self.processes, keeps, strict=True)
            )
        )
        stepped_s = max(answer.get("settled_s", began_s) for answer in answers) - began_s
        return Turn(
            side=self.side,
            num_members=len(self.processes),
            round_s=averaged_s + commit_s,
            stepped_s=stepped_s + commit_s,
            whole_s=committing_s - began_s + commit_s,
            seek_s=began_s - seeking_s,
            check_s=max(answer.get("gradient_s", 0.0) for answer in answers),
            exchange_s=max(answer.get("average_s", 0.0) for answer in answers),
            commit_s=commit_s,
            is_same=is_agreed and len({look["digest"] for look in looks}) == 1,
            error=max(look["error"] for look in looks),
            share_differing=share_differing([keep for keep in keeps if keep is not None]),
            num_replaced=int(sum(answer.get("num_replaced", 0) for answer in answers)),
        )

    def _plan(self) -> dict[str, str]:
        """The coordinator's signed word on the round; its divisor makes the average the members' mean."""
        plan = plan_for(self.body, self.members, num_tokens=len(self.members), round_s=ROUND_S)
        signed = sign_plan(COORDINATOR, plan)
        return {"payload": signed.payload.hex(), "signature": signed.signature.hex()}

    async def _commit(self, bodies: Sequence[str]) -> bool:
        """The coordinator's part: whether all attest one version, which is then put in force."""
        if not self.members or len(set(bodies)) != 1:
            return not self.members
        self.body = Body.from_bytes(bytes.fromhex(bodies[0]))
        await self.all("commit", word={"version": self.body.version, "root": self.body.root})
        return True


def share_differing(paths: Sequence[Path]) -> float:
    """The share of values that are not the same bits in all files of float32; the files are removed."""
    if not paths:
        return 0.0
    first, *others = [np.fromfile(path, np.uint32) for path in paths]
    differs = np.zeros(len(first), np.bool_)
    for other in others:
        differs |= first != other
    for path in paths:
        path.unlink()
    return float(differs.mean())


@asynccontextmanager
async def seated(side: str, num: int, folder: Path, body: Body) -> AsyncIterator[Table]:
    """The members of a side, as processes in sessions of their own."""
    num_values = sum(tensor.num_elements for tensor in body.tensors)
    threads = str(max(1, (os.cpu_count() or 1) // num))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "GRPC_VERBOSITY": "NONE", "GLOO_SOCKET_IFNAME": "lo"}
    table = Table(side, [], folder, body)
    try:
        for index in range(num):
            file = folder / f"seating{index}.json"
            file.write_bytes(msgspec.json.encode(Seating(side, index, num, num_values, str(folder))))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.bench.averaging_member", str(file)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=1 << 26,
                start_new_session=True,
            )
            table.processes.append(Process(process))
        await table.sit_down()
        yield table
    finally:
        await asyncio.gather(*(process.end() for process in table.processes))


async def measure(num_values: int, groups: Sequence[int], num_rounds: int) -> list[Turn]:
    """Every side's rounds, in turns."""
    turns: list[Turn] = []
    for num, side in itertools.chain.from_iterable(
        ((num, side) for side in (*SIDES, *reversed(SIDES))) for num in groups
    ):
        with tempfile.TemporaryDirectory(prefix="hx-") as name:
            folder = Path(name)
            body = make_model(folder, num_values)
            print(f"    {num} members of {side}", file=sys.stderr, flush=True)
            async with seated(side, num, folder, body) as table:
                for number in range(num_rounds + 1):
                    turn = await table.play(number, is_kept=number == num_rounds)
                    print(f"      {json.dumps(asdict(turn))}", file=sys.stderr, flush=True)
                    turns += [turn] if number else []
    return turns


def make_model(folder: Path, num_values: int) -> Body:
    """A model of about so many parameters (all but less than a hidden size of them) and its version 0."""
    hidden = LARGE if num_values >= 20_000_000 else SMALL
    heads, layers, feed_forward = hidden // 32, 2, 3 * hidden // 2
    fixed = layers * (4 * hidden**2 + 3 * hidden * feed_forward + 2 * hidden + 2 * 32) + hidden
    config = {
        **CONFIG,
        "vocab_size": (num_values - fixed) // hidden,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    model_dir = write_model(folder / MODEL, config)
    blobs = BlobStore(folder / "blobs")
    body = body_of(model_dir / "model.safetensors", blobs, model_dir=model_dir, run_id=RUN_ID)
    blobs.delete(body.chunks)
    (folder / BODY).write_bytes(body.to_bytes())
    return body


def figures() -> list[Figure]:
    """Measures, which takes about fifteen minutes."""
    return figures_of(asyncio.run(measure(NUM_VALUES, GROUPS, NUM_ROUNDS)))


def main() -> int:
    """The command, which can also measure something smaller."""
    parser = argparse.ArgumentParser(description="Time the averaging of a round against others.")
    parser.add_argument("--values", type=int, default=NUM_VALUES)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--members", type=int, nargs="+", default=GROUPS)
    options = parser.parse_args()
    turns = asyncio.run(measure(options.values, options.members, options.rounds))
    return 0 if print_table(figures_of(turns)) else 1


if __name__ == "__main__":
    sys.exit(main())
