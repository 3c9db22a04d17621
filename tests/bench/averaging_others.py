"""hivemind's averager and gloo as sides of the averaging bench. Impure.

hivemind 1.1.12 as its documentation has it, without compression: a DHT and a `DecentralizedAverager`, both of which
fork; time-outs are given, since there are none by default. A step waits for a trigger, so that matchmaking ends before
the exchange begins and is timed apart. gloo encrypts nothing and checks nothing.
"""

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from node.training.optimizer import Vector
from tests.bench.averaging_member import Seating

MATCHMAKING_S, REQUEST_S = 2.0, 1.0
STEP_S, CHUNK_S = 120.0, 30.0
LOOK_EVERY_S = 0.005


def make(seating: Seating) -> "Hivemind | Gloo":
    """The side that the seating names."""
    return Hivemind(seating) if seating.side == "hivemind" else Gloo(seating)


class Hivemind:
    """A `DecentralizedAverager`. It is driven from the main thread, as it must be, and blocks it."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._dht: Any = None
        self._averager: Any = None
        self._control: Any = None

    async def hello(self) -> list[str]:
        """The first member starts the DHT."""
        if self._seating.index > 0:
            return []
        self._start_dht([])
        return [str(address) for address in self._dht.get_visible_maddrs()]

    async def meet(self, places: list[Any]) -> None:
        """The others join it; everybody starts an averager."""
        import torch
        from hivemind.averaging import DecentralizedAverager

        if self._dht is None:
            self._start_dht(places[0])
        self._averager = DecentralizedAverager(
            [torch.zeros(self._seating.num_values)],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._seating.num,
            min_group_size=self._seating.num,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            sender_timeout=CHUNK_S,
            reducer_timeout=2 * CHUNK_S,
            allreduce_timeout=STEP_S,
        )

    def _start_dht(self, initial_peers: list[str]) -> None:
        from hivemind import DHT

        self._dht = DHT(
            initial_peers, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], auto_nat=False, nat_port_map=False
        )

    async def fill(self, own_P: Vector) -> None:
        """The local tensor."""
        import torch

        with self._averager.get_tensors() as (tensor_P,):
            tensor_P.copy_(torch.from_numpy(own_P))

    async def seek(self) -> None:
        """Matchmaking, until the group stands and waits for the trigger."""
        from hivemind.averaging.control import AveragingStage
        from hivemind.utils import get_dht_time

        ends_at = time.monotonic() + STEP_S
        self._control = self._averager.step(
            scheduled_time=get_dht_time() + MATCHMAKING_S, timeout=STEP_S, require_trigger=True, wait=False
        )
        while self._control.stage != AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > ends_at or self._control.done():
                raise TimeoutError("hivemind found no group")
            await asyncio.sleep(LOOK_EVERY_S)

    async def average(self, word: Any) -> dict[str, Any]:
        """The exchange, from the trigger to the averaged tensor."""
        self._control.allow_allreduce()
        group = self._control.result(timeout=STEP_S)
        averaged_s = time.monotonic()
        return {"averaged_s": averaged_s, "group": len(group)}

    async def commit(self, word: Any) -> None:
        """Nothing is agreed on."""

    def result(self) -> Vector:
        """The local tensor, a view."""
        with self._averager.get_tensors() as (tensor_P,):
            result: Vector = tensor_P.numpy()
            return result

    async def close(self) -> None:
        """Ends the forked processes."""
        for part in (self._averager, self._dht):
            if part is not None:
                part.shutdown()


class Gloo:
    """`torch.distributed.all_reduce` over gloo on loopback."""

    def __init__(self, seating: Seating) -> None:
        import torch

        self._seating, self._tensor_P = seating, torch.zeros(seating.num_values)

    async def hello(self) -> None:
        """They meet at a file."""

    async def meet(self, places: list[Any]) -> None:
        """Forms the group."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(self._seating.folder) / 'gloo'}",
            rank=self._seating.index,
            world_size=self._seating.num,
            timeout=timedelta(seconds=STEP_S),
        )

    async def fill(self, own_P: Vector) -> None:
        """The tensor."""
        import torch

        self._tensor_P.copy_(torch.from_numpy(own_P))

    async def seek(self) -> None:
        """The group stands."""

    async def average(self, word: Any) -> dict[str, Any]:
        """Sum over all, divided here."""
        import torch.distributed as dist

        dist.all_reduce(self._tensor_P)
        self._tensor_P /= self._seating.num
        return {"averaged_s": time.monotonic()}

    async def commit(self, word: Any) -> None:
        """Nothing is agreed on."""

    def result(self) -> Vector:
        """The tensor, a view."""
        result: Vector = self._tensor_P.numpy()
        return result

    async def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
