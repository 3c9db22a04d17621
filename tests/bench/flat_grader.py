"""A grading child that costs next to nothing, so that the coordinator is what is measured. It is run as a module."""

from coordinator import grader_worker
from protocol.ids import Digest, TaskKey
from protocol.run import EnvironmentSpec
from protocol.tasks import SingleTurn, Split, Task
from protocol.tokens import Tokenizer

PROMPT_TOKENS = 32


class FlatEnvironment(SingleTurn):
    """Prompts of a fixed length, and a reward that any completion may have."""

    name, digest = "flat", Digest("0" * 64)

    def task(self, seed: int, index: int, split: Split = "train") -> Task:
        return Task(TaskKey(self.name, seed, index), str(index), "", {})

    def prompt_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
        return tuple(2 + (task.key.index + position) % 32 for position in range(PROMPT_TOKENS))

    def score(self, task: Task, completion: str) -> float:
        return float(len(completion) % 2)

    def held_out(self, limit: int) -> list[Task]:
        return [self.task(0, index) for index in range(limit)]


def make_flat(spec: EnvironmentSpec) -> FlatEnvironment:
    return FlatEnvironment()


if __name__ == "__main__":
    grader_worker.make_environment = make_flat  # type: ignore[assignment]
    grader_worker.main()
