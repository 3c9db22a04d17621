"""Task sets of `verifiers`: single-turn ones give tasks and scores, others are refused; the package may be missing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.tasks.source import make_environment
from protocol.chat import Message
from protocol.errors import MachineUnfitError, UsageError
from protocol.run import EnvironmentSpec, PoolSpec
from protocol.tasks import Environment, is_held_out, regenerate

SET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class ReverseTask(vf.Task[Data]):
    NEEDS_CONTAINER = {container}

    @vf.reward(weight=3.0)
    async def right(self, task, trace{more}) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def short(self, trace) -> float:
        assert trace.num_turns == 1
        if "break" in trace.last_reply:
            raise ValueError("broken")
        return float(len(trace.last_reply) < 10)
{hooks}

class Config(vf.TasksetConfig):
    size: int = 20

class Reverse(vf.Taskset[ReverseTask, Config]):
    INFINITE = {infinite}

    def load(self):
        for n in range(self.config.size):
            data = Data(prompt=f"Reverse {{n:04}}", system_prompt="Be brief.", answer=f"{{n:04}}"[::-1])
            yield ReverseTask(data, self.config.task)

__all__ = ["Reverse"]
"""
PLAIN = {"container": "False", "more": "", "hooks": "", "infinite": "False"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packages of task sets are."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("hx_")]:
        del sys.modules[name]


def environment(name: str, **params: int) -> Environment:
    pool = PoolSpec(f"verifiers:{name}", "mine", dict(params))
    return make_environment(EnvironmentSpec("mine", origin="organizer", pools=(pool,)))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MachineUnfitError, match="verifiers is not installed") as caught:
        environment("gsm8k")
    assert "hexcomb[tasks]" in caught.value.remedy


def test_a_task_set_gives_tasks_and_scores(folder: Path) -> None:
    pytest.importorskip("verifiers.v1")
    (folder / "hx_reverse.py").write_text(SET.format(**PLAIN))
    mine = environment("hx-reverse", size=30)
    tasks = [mine.task(1, index) for index in range(60)]
    expected = {f"Reverse {n:04}" for n in range(30)}
    assert {task.prompt for task in tasks} == {prompt for prompt in expected if not is_held_out(prompt)}
    task = tasks[0]
    assert task.messages == (Message("system", "Be brief."), Message("user", task.prompt))
    assert {name: task.entry[name] for name in task.entry if name != "verifiers_index"} == {"answer": task.answer}
    assert [mine.score(task, text) for text in (task.answer, "x", "x" * 20)] == [1.0, 0.25, 0.0]
    assert regenerate(environment("hx-reverse", size=30), task.key) == task
    assert environment("hx-reverse", size=30).digest == mine.digest != environment("hx-reverse", size=31).digest
    with pytest.raises(Exception, match="broken"):
        mine.score(task, "break")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"container": "True"}, "tools or a container"),
        ({"more": ", runtime"}, "right needs a sandbox"),
        ({"hooks": "    async def setup(self, trace, runtime): pass"}, "prepare a sandbox"),
        ({"infinite": "True"}, "never end"),
    ],
)
def test_task_sets_that_need_more_than_an_answer_are_refused(folder: Path, changes: dict[str, str], match: str) -> None:
    pytest.importorskip("verifiers.v1")
    (folder / "hx_more.py").write_text(SET.format(**{**PLAIN, **changes}))
    with pytest.raises(UsageError, match=match):
        environment("hx-more")


def test_task_sets_that_are_not_there_are_refused(folder: Path) -> None:
    pytest.importorskip("verifiers.v1")
    (folder / "hx_empty.py").write_text("")
    (folder / "hx_reverse.py").write_text(SET.format(**PLAIN))
    for name, params in (("hx-none", {}), ("hx-empty", {}), ("hx-reverse", {"sise": 3})):
        with pytest.raises(UsageError, match="cannot be loaded"):
            environment(name, **params)
