"""From what a run file says to the environment that it means. Impure: reads files, imports the organizer's code.

Called in the grading child alone. Invariant: what cannot give a single prompt is refused here, before anything starts.
"""

from pathlib import Path

from coordinator.tasks.files import dataset_rows, jsonl_rows
from coordinator.tasks.function import FunctionEnvironment
from coordinator.tasks.mixture import ChatEnvironment, MixtureEnvironment
from coordinator.tasks.rows import RowsEnvironment
from coordinator.tasks.verifiers_tasks import verifiers_rows
from protocol import gym_tasks
from protocol.errors import UsageError
from protocol.run import EnvironmentSpec, PoolSpec
from protocol.tasks import Environment
from protocol.tokens import Tokenizer


def make_environment(spec: EnvironmentSpec) -> Environment:
    """The environment of a run. Raises `UsageError` when there is none like it, and `MachineUnfitError` where a package
    that it needs is missing."""
    if spec.origin == "reasoning-gym":
        return gym_tasks.make_environment(spec)
    if len(spec.pools) == 1:
        environment = _pool(spec.name, spec.pools[0], spec, num_tasks=spec.num_tasks)
    else:
        pools = [_pool(pool.name, pool, spec, num_tasks=0) for pool in spec.pools]
        weights = [pool.weight for pool in spec.pools]
        environment = MixtureEnvironment(spec.name, pools, weights, num_tasks=spec.num_tasks, by_index=spec.by_index)
    return ChatEnvironment(environment, is_wrapped=spec.prompt == "chat", system=spec.system)


def _pool(name: str, pool: PoolSpec, spec: EnvironmentSpec, *, num_tasks: int) -> Environment:
    kind, is_scheme, rest = pool.source.partition(":")
    if not is_scheme:
        form: gym_tasks.PromptForm = "expression" if spec.prompt == "expression" else "question"
        return gym_tasks.ReasoningGymEnvironment(
            pool.source, params=pool.params, prompt=form, name=name, num_tasks=num_tasks
        )
    path = Path(spec.folder) / rest
    match kind:
        case "jsonl":
            rows, digest = jsonl_rows(path, pool)
            return RowsEnvironment(name, rows, digest=digest, num_tasks=num_tasks)
        case "dataset":
            rows, digest = dataset_rows(path, pool)
            return RowsEnvironment(name, rows, digest=digest, num_tasks=num_tasks)
        case "verifiers":
            rows, digest, score = verifiers_rows(pool)
            return RowsEnvironment(name, rows, digest=digest, num_tasks=num_tasks, score=score)
        case _:
            return FunctionEnvironment(name, pool, folder=Path(spec.folder), num_tasks=num_tasks)


def check_first_prompt(environment: Environment, tokenizer: Tokenizer) -> None:
    """Makes the first task's prompt, and a reply where there may be some. Raises `UsageError` where the tokenizer gives
    no token for them, or the chat template cannot write them, and as the environment does."""
    task = environment.task(0, 0)
    if environment.is_multi_turn and tokenizer.stop_ids:
        tokenizer.encode_reply(task.messages, "1", end=tokenizer.stop_ids[0])
    prompt_ids = environment.prompt_ids(task, tokenizer)
    if not prompt_ids:
        raise UsageError(
            f"environment {environment.name!r} cannot be used",
            why="the model's tokenizer makes no token of its first prompt",
            remedy="Check the base folder's tokenizer and the task's prompts.",
        )
