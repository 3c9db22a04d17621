"""hexcomb's side of the averaging bench: a trainer's own job, with its server, links, checks and commit. Impure.

The trainer is the one that the compute child runs; only its gradient is given instead of computed, so that the time
is of the exchange. The plan comes signed and is verified here, where in a node the daemon does it.
"""

import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from node.compute.messages import Commit
from node.training.loss_metrics import MetricSums
from node.training.optimizer import Vector, adamw_step
from node.training.trainer import ShareGradient
from protocol.heap import steady_heap
from protocol.manifest import Body
from protocol.round import SignedPlan, open_plan
from tests.bench.averaging_member import Seating
from tests.training.trainers import COORDINATOR, RUN_ID, Seat, seat

MODEL, BODY = "model", "body.msgpack"


def make(seating: Seating) -> "Hexcomb":
    """The side, its heap as the compute child's."""
    steady_heap()
    return Hexcomb(seating)


class Hexcomb:
    """A trainer's job."""

    def __init__(self, seating: Seating) -> None:
        self._seating, self._folder = seating, Path(seating.folder)
        self._seat: Seat | None = None
        self._own: Vector | None = None
        self._average: Vector | None = None

    async def hello(self) -> list[str]:
        """Loads version 0 and listens."""
        model_dir = self._folder / MODEL
        self._seat = await seat(
            self._seating.index,
            self._folder,
            model_dir,
            body=Body.from_bytes((self._folder / BODY).read_bytes()),
            weights=str(model_dir / "model.safetensors"),
        )
        trainer: Any = self._seat.job._trainer
        trainer.gradient = lambda *_, **__: ShareGradient(self._own, 1, MetricSums())  # type: ignore[arg-type]
        self._watch_averages(self._seat.job)
        return [self._seat.member.peer_id, self._seat.member.endpoint]

    def _watch_averages(self, job: Any) -> None:
        """Keeps the average that the optimizer's step is given, which the job itself throws away."""
        heavy = job._heavy

        def watched(function: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
            if function is adamw_step:
                self._average = args[1]
            result: Awaitable[Any] = heavy(function, *args, **kwargs)
            return result

        job._heavy = watched

    async def meet(self, places: list[Any]) -> None:
        """The plan says who takes part."""

    async def fill(self, own_P: Vector) -> None:
        """The gradient of the next round."""
        self._own, self._average = own_P, None

    async def seek(self) -> None:
        """The plan says who takes part."""

    async def average(self, word: Any) -> dict[str, Any]:
        """The member's part of the round, plan first; what it staged, and the round's own times."""
        assert self._seat is not None
        signed = SignedPlan(bytes.fromhex(word["payload"]), bytes.fromhex(word["signature"]))
        plan = open_plan(signed, coordinator_key=COORDINATOR.public_bytes, run_id=RUN_ID)
        done = await self._seat.run(plan)
        ended_s, times = time.monotonic(), done.metrics
        settled_s = ended_s - times["time/store_s"]
        stepped_s = settled_s - times["time/settle_s"]
        return {
            "averaged_s": stepped_s - times["time/step_s"],
            "settled_s": settled_s,
            "body": done.body.hex(),
            "num_replaced": times["num_shards_replaced"],
            **{name.removeprefix("time/"): value for name, value in times.items() if name.startswith("time/")},
        }

    async def commit(self, word: Any) -> None:
        """The committed version comes into force."""
        assert self._seat is not None
        await self._seat.job.handle(Commit(word["version"], word["root"]))

    def result(self) -> Vector:
        """The average. What the round has stored is removed, so that the disk is as it was before."""
        assert self._seat is not None
        assert self._average is not None
        for path in Path(self._seat.message.blob_dir).iterdir():
            path.unlink()
        self._own = None
        return self._average

    async def close(self) -> None:
        """Hangs up."""
        if self._seat is not None:
            await self._seat.job.close()
