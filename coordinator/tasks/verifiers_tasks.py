"""Single-turn task sets of the package `verifiers`, as rows with a scorer. Impure: imports installed packages.

Only what one answer of the model can be judged by is taken: task sets with tools, a container, a judge, or hooks and
rewards that need a running sandbox are refused. `verifiers` is imported only here, and only in the grading child.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Coroutine
from importlib import metadata
from typing import Any, TypeVar

from blake3 import blake3

from coordinator.tasks.prompts import Draft, prompt_of
from protocol.chat import Message
from protocol.errors import EngineError, MachineUnfitError, UsageError
from protocol.ids import Digest
from protocol.run import PoolSpec
from protocol.tasks import Task

PLACE = "verifiers_index"
"""The column that says which task of the set an entry is."""

T = TypeVar("T")


def verifiers_rows(pool: PoolSpec) -> tuple[list[Draft], Digest, Callable[[Task, str], float]]:
    """The tasks of the set `verifiers:ID`, their digest, and what scores a completion. Raises `MachineUnfitError`
    without the package, `UsageError` for a set that there is not or that is not single-turn."""
    name = pool.source.partition(":")[2]
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise MachineUnfitError(
            f"the task set {pool.source} cannot be used",
            why=f"the package verifiers is not installed as this release knows it ({error})",
            remedy="Install `hexcomb[tasks]` beside the coordinator.",
        ) from error
    try:
        taskset = loaders.load_taskset(loaders.taskset_config_type(name).model_validate({"id": name, **pool.params}))
        tasks = list(taskset) if taskset.bounded else []
    except Exception as error:  # a plugin may fail in any way that Python can
        raise UsageError(
            f"the task set {pool.source} cannot be loaded",
            why=f"{type(error).__name__}: {error}",
            remedy="Install its package, and check its parameters in the run file.",
        ) from error
    why = _why_not_single_turn(vf, taskset, tasks) if tasks else "it has no tasks, or they never end"
    if why:
        raise UsageError(f"the task set {pool.source} is refused", why=why, remedy="Take a single-turn task set.")
    rows = [_draft(vf, task, f"{pool.source}, task {index}", index) for index, task in enumerate(tasks)]

    def score(task: Task, completion: str) -> float:
        return _run_apart(lambda: _score(vf, tasks[task.entry[PLACE]], task, completion))

    content = [metadata.version("verifiers"), pool.source, [task.hash for task in tasks]]
    return rows, Digest(blake3(json.dumps(content).encode()).hexdigest()), score


def _why_not_single_turn(vf: Any, taskset: Any, tasks: list[Any]) -> str:
    """What one answer alone cannot do for these tasks; "" where it can."""
    first = tasks[0]
    kind = type(first)
    if taskset.toolsets(taskset.config) or kind.toolsets(first.config) or kind.NEEDS_CONTAINER:
        return "its tasks need tools or a container"
    if any(getattr(kind, hook) is not getattr(vf.Task, hook) for hook in ("setup", "finalize", "stage_verifier")):
        return "its tasks prepare a sandbox"
    if first.plugged_judges():
        return "its tasks are judged by another model"
    needing = [hook.__name__ for hook in first.hooks("reward") if _needs_runtime(hook)]
    if needing:
        return f"its reward {needing[0]} needs a sandbox"
    return "" if first.hooks("reward") else "it has no reward"


def _needs_runtime(function: Callable[..., Any]) -> bool:
    runtime = inspect.signature(function).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _draft(vf: Any, task: Any, where: str, index: int) -> Draft:
    data = task.data.model_dump(mode="json", exclude_none=True)
    text, messages = prompt_of(data.get("prompt"), where=where)
    if task.data.system_prompt:
        messages = (Message("system", task.data.system_prompt), *(messages or (Message("user", text),)))
    own = {name: value for name, value in data.items() if name not in vf.TaskData.model_fields}
    entry = {**own, PLACE: index}
    return Draft(text, str(data.get("answer", "")), entry, messages)


async def _score(vf: Any, source: Any, task: Task, completion: str) -> float:
    from verifiers.v1.state import state_cls

    prompt = task.messages or (Message("user", task.prompt),)
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [kinds[message.role](content=message.content) for message in prompt]
    messages.append(vf.AssistantMessage(content=completion))
    last = len(messages) - 1
    trace = vf.Trace(
        task=vf.TraceTask(type=type(source).__name__, data=source.data, key=source.key, hash=source.hash),
        state=state_cls(type(source))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=place - 1 if place else None, message=message, sampled=place == last)
            for place, message in enumerate(messages)
        ],
        is_completed=True,
        ok=True,
    )
    await source.score(trace)
    rewards = [reward for reward in trace.rewards.values() if reward is not None]
    total = sum(abs(reward.weight) for reward in rewards)
    if len(rewards) < len(trace.rewards) or not total:
        raise EngineError(f"task {task.key} was not scored", why="a reward of its task set gave nothing")
    return float(sum(reward.value for reward in rewards) / total)


def _run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The coroutine's result, from a loop in a thread of its own: this thread has one that runs. An alarm ends the
    waiting."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(make()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
