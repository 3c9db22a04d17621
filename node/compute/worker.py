"""The compute child: `python -m node.compute.worker --socket PATH`. Impure.

It probes the machine, then does one job, rollout engine or trainer, until the daemon ends it. torch and
what stands on it are imported on demand, so that the child is up at once and a missing library is an
answer, not a death. An engine may import this module again in a process of its own, which must start
nothing.
"""

import argparse
import asyncio
from typing import TYPE_CHECKING, assert_never

import msgspec

from node.compute.messages import (
    AbortRound,
    Commit,
    Done,
    Evaluate,
    FetchOptimizerState,
    Generate,
    Load,
    MakePrompts,
    Probe,
    Request,
    RunRound,
    Started,
    StartRollout,
    StartTrainer,
    StopSlots,
)
from node.torch_guard import block_broken_extras
from protocol.child import Emit, serve
from protocol.errors import EngineError, MachineUnfitError
from protocol.heap import steady_heap

if TYPE_CHECKING:
    from node.rollout.worker import RolloutJob
    from node.training.worker import TrainerJob


class ComputeChild:
    """Dispatches requests to the one job that this process does."""

    def __init__(self) -> None:
        self._rollout: RolloutJob | None = None
        self._trainer: TrainerJob | None = None
        self._starting = asyncio.Lock()

    async def handle(self, request: Request, emit: Emit) -> msgspec.Struct:
        """Answers one request; raises an error of the tree."""
        try:
            block_broken_extras()
            return await self._dispatch(request, emit)
        except ImportError as error:
            raise MachineUnfitError(
                "a library is missing or broken",
                why=str(error),
                remedy="Install hexcomb[cpu] or hexcomb[gpu] in this environment.",
            ) from error

    async def close(self) -> None:
        """Ends the job."""
        if self._rollout is not None:
            await self._rollout.close()
        if self._trainer is not None:
            await self._trainer.close()

    async def _dispatch(self, request: Request, emit: Emit) -> msgspec.Struct:
        match request:
            case Probe():
                from node.training.probe import probe

                return await asyncio.to_thread(probe, request)
            case StartRollout() | StartTrainer():
                return await self._start(request)
            case FetchOptimizerState():
                from node.training.optimizer_fetch import fetch_optimizer_state

                await fetch_optimizer_state(request)
                return Done()
            case Generate() | StopSlots() | MakePrompts() | Load():
                if self._rollout is None:
                    raise EngineError("this process is no rollout engine")
                return await self._rollout.handle(request, emit)
            case RunRound() | Commit() | AbortRound() | Evaluate():
                if self._trainer is None:
                    raise EngineError("this process is no trainer")
                return await self._trainer.handle(request, emit)
            case _:
                assert_never(request)

    async def _start(self, request: StartRollout | StartTrainer) -> Started:
        async with self._starting:
            if self._rollout is not None or (self._trainer is not None and isinstance(request, StartRollout)):
                raise EngineError("this process has a job already")
            if isinstance(request, StartRollout):
                from node.rollout.worker import RolloutJob

                self._rollout, started = await RolloutJob.start(request)
                return started
            return await self._start_trainer(request)

    async def _start_trainer(self, request: StartTrainer) -> Started:
        """A trainer that was left behind begins anew in the same process, where everything is imported
        already."""
        from node.training.worker import TrainerJob

        if self._trainer is not None:
            old, self._trainer = self._trainer, None
            await old.close()
        self._trainer, started = await TrainerJob.start(request)
        return started


async def main(socket_path: str) -> None:
    """Serves the daemon at `socket_path` until it is gone."""
    child = ComputeChild()
    await serve(socket_path, child.handle, requests=Request, on_stop=child.close)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    steady_heap()
    asyncio.run(main(parser.parse_args().socket))
