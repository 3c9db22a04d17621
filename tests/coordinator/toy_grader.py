"""A grading child whose environment does what the completion says. `python -m tests.coordinator.toy_grader`."""

import mmap
import os
import resource
import signal
import sys
import tempfile
import time

from coordinator import grader_worker
from protocol.ids import Digest, TaskKey
from protocol.run import EnvironmentSpec
from protocol.tasks import SingleTurn, Split, Task
from protocol.tokens import Tokenizer

WORDS = ["right", "wrong", "hang", "stubborn", "freeze", "die", "leave", "fault", "odd", "memory", "write", "print"]
MEMORY_BYTES = 1 << 30
SCORE_LIMIT_S = 0.3
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)


class ToyEnvironment(SingleTurn):
    """Scores 1 for the word `right`. A task's prompt says how the child is confined."""

    name, digest = "toy", Digest("0" * 64)

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 14:
            freeze()
        return Task(TaskKey(self.name, seed, index), str(index), "", {})

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        limits = (resource.getrlimit(limit)[0] for limit in LIMITS)
        return (
            *(-1 if limit == resource.RLIM_INFINITY else limit for limit in limits),
            len(os.environ),
            task.key.index,
        )

    def score(self, task: Task, completion: str) -> float:
        match completion:
            case "hang":
                while True:
                    time.sleep(0.01)
            case "stubborn":  # as graders do that take every exception for a wrong answer
                try:
                    while True:
                        time.sleep(0.01)
                except Exception:
                    return 0.0
            case "freeze":
                freeze()
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                sys.exit(0)
            case "fault":
                raise AttributeError("the grader has a fault")
            case "odd":
                raise RecursionError("too deep")
            case "memory":
                with mmap.mmap(-1, 2 * MEMORY_BYTES) as memory:
                    return float(len(memory) > MEMORY_BYTES)
            case "write":
                with tempfile.TemporaryFile() as file:
                    file.write(bytes(grader_worker.MAX_WRITTEN_BYTES + 1))
            case "print":
                print("x" * (4 << 20))
        return float(completion in ("right", "print"))

    def held_out(self, limit: int) -> list[Task]:
        return [self.task(0, index) for index in range(limit)]


def freeze() -> None:
    """Hangs as C code does: no signal gets through but SIGKILL."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
    while True:
        time.sleep(1)


def make_toy(spec: EnvironmentSpec) -> ToyEnvironment:
    return ToyEnvironment()


def arrange() -> None:
    """Puts the toy in the place of the real environment."""
    grader_worker.make_environment = make_toy  # type: ignore[assignment]
    grader_worker.MEMORY_BYTES = MEMORY_BYTES
    grader_worker.SCORE_LIMIT_S = SCORE_LIMIT_S


if __name__ == "__main__":
    arrange()
    grader_worker.main()
