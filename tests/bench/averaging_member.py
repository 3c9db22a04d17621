"""One member of one side of the averaging bench: `python -m tests.bench.averaging_member FILE`. A process of its own.

FILE (JSON, `Seating`) says which side and which member it is. Orders come as JSON on standard input, one a line, and
are answered on standard output, `{}` at least. All sides answer the same orders: `hello` gives the member's place,
`meet` the places of all, `fill` puts the member's own vector where the side wants it, `seek` finds the others where a
side must do so for every round, `average` and `commit` are what is timed, `look` names the result. Times are of the
system's monotonic clock, which all processes share.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np

from node.training.optimizer import Vector, bytes_of

SIDES = {
    "hexcomb": "tests.bench.averaging_hexcomb",
    "grpc": "tests.bench.averaging_bare",
    "hivemind": "tests.bench.averaging_others",
    "gloo": "tests.bench.averaging_others",
}
NUM_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Seating:
    """Member `index` of `num` on one side; `folder` is shared by all members of that side."""

    side: str
    index: int
    num: int
    num_values: int
    folder: str


class Side(Protocol):
    """How a side does what it is asked; an order that a side has no use for does nothing."""

    async def hello(self) -> Any:
        """Where the others find this member."""
        ...

    async def meet(self, places: list[Any]) -> None:
        """Connects to the others, as far as that is done once and for all."""
        ...

    async def fill(self, own_P: Vector) -> None:
        """Takes the vector that is to be averaged in the next round."""
        ...

    async def seek(self) -> None:
        """Finds the others for one round."""
        ...

    async def average(self, word: Any) -> dict[str, Any]:
        """Does the round until the average is here; `averaged_s` is when it was, if that was before the end."""
        ...

    async def commit(self, word: Any) -> None:
        """Puts the round's result in force."""
        ...

    def result(self) -> Vector:
        """The average, as this member has it."""
        ...

    async def close(self) -> None:
        """Ends what it has started."""
        ...


def own_vector(seating: Seating, round_number: int) -> Vector:
    """What this member brings to a round: P float32 values around nought."""
    chance = np.random.default_rng([seating.index, round_number])
    return chance.standard_normal(seating.num_values, np.float32)


async def serve(seating: Seating, side: Side) -> None:
    """Answers orders until standard input ends."""
    loop, out = asyncio.get_running_loop(), sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    places: list[Any] = []
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            answer: dict[str, Any] = {}
            match order["do"]:
                case "hello":
                    answer["place"] = await side.hello()
                case "meet":
                    places[:] = order["places"]
                    await side.meet(places)
                case "fill":
                    await side.fill(own_vector(seating, order["round"]))
                case "seek":
                    await side.seek()
                case "average":
                    answer = await side.average(order.get("word"))
                    answer = {"averaged_s": time.monotonic(), **answer}
                case "commit":
                    await side.commit(order.get("word"))
                case "look":
                    answer = look(seating, side.result(), order["round"], order["keep"])
            print(json.dumps(answer), file=out, flush=True)
    finally:
        await side.close()


def look(seating: Seating, result_P: Vector, round_number: int, keep: str) -> dict[str, Any]:
    """The result's name, and how far it is from the mean of all members' vectors at `NUM_SAMPLES` places; the whole
    goes to the file `keep`, if one is named."""
    if keep:
        result_P.tofile(keep)
    step = max(1, len(result_P) // NUM_SAMPLES)
    members = [
        Seating(seating.side, index, seating.num, seating.num_values, seating.folder) for index in range(seating.num)
    ]
    mean = sum(own_vector(member, round_number)[::step].astype(np.float64) for member in members) / seating.num
    return {"digest": blake3.blake3(bytes_of(result_P)).hexdigest(), "error": float(abs(result_P[::step] - mean).max())}


async def main(seating: Seating) -> None:
    """The process."""
    side: Side = importlib.import_module(SIDES[seating.side]).make(seating)
    await serve(seating, side)


if __name__ == "__main__":
    os.environ["GRPC_VERBOSITY"] = "NONE"
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Seating)))
