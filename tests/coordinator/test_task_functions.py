"""Tasks of the organizer's own functions, of several pools, and as chats."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.tasks.source import check_first_prompt, make_environment
from node.tokenizer import vocabulary_of, write_tokenizer
from protocol.chat import ChatTemplate, Message
from protocol.errors import EngineError, HexcombError, UsageError
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec, PoolSpec
from protocol.tasks import is_held_out, prompts_digest, regenerate
from protocol.tokens import load_tokenizer

SUMS = """
import random

class Sums:
    digest = "1"
    def __init__(self, top): self.top = top
    def task(self, seed, index):
        a, b = random.randrange(self.top), random.randrange(self.top)
        return {"prompt": f"{a}+{b}=", "answer": a + b, "a": a}
    def score(self, row, completion):
        return 1.0 if completion == str(row["answer"]) else 0.25 if "prompt" not in row else 0.5

def make(top=50): return Sums(top)
"""
LISTED = """
LIST = [f"question {n}" for n in range(40)]
class Listed:
    def task(self, seed, index): return {"prompt": LIST[index % len(LIST)], "answer": str(index % len(LIST))}
def make(): return Listed()
"""
TALKS = """
import random
class Talks:
    def task(self, seed, index): return {"prompt": f"{seed} {index}", "answer": "yes", "pool": "own"}
    def reply(self, row, messages):
        if messages[-1]["content"] == "fail": raise OSError("no tool")
        return None if len(messages) > 2 else f"{messages[-1]['role']} {random.random()}"
class Judged(Talks):
    def score(self, row, messages): return len(messages) / 4 if "prompt" not in row else 0.0
def make(): return Judged()
def unjudged(): return Talks()
"""
BROKEN = """
import itertools, time, sys, os
COUNT = itertools.count()
class Source:
    def __init__(self, how): self.how = how
    def task(self, seed, index):
        match self.how:
            case "raises": raise KeyError("no such thing")
            case "leaves": sys.exit(3)
            case "counts": return {"prompt": f"{next(COUNT)}", "answer": ""}
            case "entropy": return {"prompt": os.urandom(8).hex(), "answer": ""}
            case "text": return "a prompt"
            case "bare": return {"question": "1"}
            case "late":
                if index >= 8: raise RuntimeError("only eight")
        return {"prompt": f"{seed} {index}", "answer": ""}
    def score(self, row, completion):
        match self.how:
            case "score raises": raise ValueError("cannot")
            case "score leaves": sys.exit(0)
            case "score nan": return float("nan")
            case "score two": return 2.0
        return None
def make(how): return Source(how)
def nothing(): return None
def fails(): raise OSError("no disk")
NUMBER = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run file's folder with modules, whose names nobody else has."""
    modules, path = set(sys.modules), list(sys.path)
    for name, text in (
        ("hx_sums", SUMS),
        ("hx_listed", LISTED),
        ("hx_broken", BROKEN),
        ("hx_talks", TALKS),
        ("hx_syntax", "def ("),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    sys.path[:] = path
    for name in [name for name in sys.modules if name not in modules and name.startswith("hx_")]:
        del sys.modules[name]


def spec_of(folder: Path, *pools: PoolSpec, **changes: Any) -> EnvironmentSpec:
    return EnvironmentSpec("mine", origin="organizer", pools=pools, folder=str(folder), **changes)


def test_a_function_gives_tasks_and_scores(folder: Path) -> None:
    environment = make_environment(spec_of(folder, PoolSpec("hx_sums:make", "sums", {"top": 9})))
    tasks = [environment.task(5, index) for index in range(100)]
    assert [regenerate(environment, task.key) for task in reversed(tasks)] == tasks[::-1]
    assert not any(is_held_out(task.prompt) for task in tasks)
    assert all(is_held_out(task.prompt) for task in environment.held_out(10))
    assert tasks[0].entry == {"answer": int(tasks[0].answer), "a": int(tasks[0].prompt[0])}
    assert environment.score(tasks[0], tasks[0].answer) == 1.0
    assert environment.score(tasks[0], "x") == 0.25
    few = make_environment(spec_of(folder, PoolSpec("hx_sums:make", "sums", {"top": 9}), num_tasks=3))
    assert [few.task(5, i).prompt for i in range(6)] == [environment.task(5, i % 3).prompt for i in range(6)]


def test_a_list_that_knows_no_seed_gives_both_splits(folder: Path) -> None:
    environment = make_environment(spec_of(folder, PoolSpec("hx_listed:make", "listed")))
    train = {environment.task(0, index).prompt for index in range(40)}
    held_out = {task.prompt for task in environment.held_out(40)}
    assert train == {f"question {n}" for n in range(40) if not is_held_out(f"question {n}")}
    assert held_out
    assert not train & held_out
    own = next(n for n in range(40) if not is_held_out(f"question {n}"))
    assert environment.task(3, own).prompt == f"question {own}", "an index of the right split is kept"


def test_the_digest_names_code_parameters_and_declared_data(folder: Path) -> None:
    def digest(**params: int) -> str:
        sys.modules.pop("hx_sums", None)
        return make_environment(spec_of(folder, PoolSpec("hx_sums:make", "sums", dict(params)))).digest

    first = digest(top=9)
    assert digest(top=9) == first != digest(top=8)
    (folder / "hx_sums.py").write_text(SUMS.replace('digest = "1"', 'digest = "2"'))
    second = digest(top=9)
    assert second != first
    (folder / "hx_sums.py").write_text(SUMS.replace('digest = "1"', 'digest = "2"') + "# the same tasks\n")
    assert digest(top=9) not in (first, second)


@pytest.mark.parametrize(
    ("source", "how", "kind", "match"),
    [
        ("hx_missing:make", None, UsageError, "No module named 'hx_missing'"),
        ("hx_syntax:make", None, UsageError, "SyntaxError"),
        ("hx_broken:mkae", None, UsageError, "no function 'mkae'"),
        ("hx_broken:NUMBER", None, UsageError, "no function 'NUMBER'"),
        ("hx_broken:make", None, UsageError, "missing 1 required"),
        ("hx_broken:nothing", None, UsageError, "returned NoneType"),
        ("hx_broken:fails", None, UsageError, "no disk"),
        ("hx_broken:make", "raises", EngineError, "no such thing"),
        ("hx_broken:make", "leaves", EngineError, "SystemExit: 3"),
        ("hx_broken:make", "counts", UsageError, "was another when asked for again"),
        ("hx_broken:make", "entropy", UsageError, "was another when asked for again"),
        ("hx_broken:make", "text", EngineError, "gave str"),
    ],
)
def test_bad_functions_are_refused_at_the_start(
    folder: Path, source: str, how: str | None, kind: type[HexcombError], match: str
) -> None:
    with pytest.raises(kind, match=match):
        make_environment(spec_of(folder, PoolSpec(source, "x", {} if how is None else {"how": how})))


def test_a_task_without_the_column_is_refused_at_the_start(folder: Path) -> None:
    write_tokenizer(folder, vocabulary_of(["1"]), max_length=64)
    (folder / "config.json").write_text('{"vocab_size": 64, "eos_token_id": 1}')
    environment = make_environment(spec_of(folder, PoolSpec("hx_broken:make", "x", {"how": "bare"})))
    with pytest.raises(UsageError, match=r"task\(0, 0\) of hx_broken:make has no column 'prompt'.*it has question"):
        check_first_prompt(environment, load_tokenizer(folder))


def test_a_task_that_fails_later_fails_alone(folder: Path) -> None:
    environment = make_environment(spec_of(folder, PoolSpec("hx_broken:make", "x", {"how": "late"})))
    good = next(i for i in range(8) if not is_held_out(f"2 {i}"))
    assert environment.task(2, good).prompt == f"2 {good}"
    with pytest.raises(EngineError, match=r"task\(2, 9\) of hx_broken:make failed because RuntimeError: only eight"):
        environment.task(2, 9)


@pytest.mark.parametrize("how", ["score raises", "score leaves", "score nan", "score two", "score none"])
def test_a_bad_score_is_an_error_and_not_a_number(folder: Path, how: str) -> None:
    environment = make_environment(spec_of(folder, PoolSpec("hx_broken:make", "x", {"how": how})))
    with pytest.raises(EngineError):
        environment.score(environment.task(0, 0), "1")


def test_no_answer_is_not_the_empty_answer(folder: Path) -> None:
    environment = make_environment(spec_of(folder, PoolSpec("hx_listed:make", "x", answer_column="")))
    with pytest.raises(EngineError, match="no answers"):
        environment.score(environment.task(0, 0), "")


def test_the_folders_modules_take_no_name_from_installed_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (folder / "colorsys.py").write_text("raise RuntimeError('not the real one')")
    (folder / "hx_uses.py").write_text("import colorsys\n" + LISTED)
    assert make_environment(spec_of(folder, PoolSpec("hx_uses:make", "x"))).task(0, 0)


# Pools and chats

EASY = PoolSpec("chain_sum", "easy", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, weight=3)
HARD = PoolSpec("chain_sum", "hard", {"min_terms": 4, "max_terms": 4}, weight=1)


def test_pools_are_mixed_by_weight_and_the_same_again(folder: Path) -> None:
    environment = make_environment(spec_of(folder, EASY, HARD))
    tasks = [environment.task(1, index) for index in range(400)]
    shares = Counter(task.entry["pool"] for task in tasks)
    assert abs(shares["easy"] / 400 - 0.75) < 0.08
    assert {task.key.environment for task in tasks} == {"mine"}
    again = make_environment(spec_of(folder, EASY, HARD))
    assert [again.task(1, index) for index in (399, 0, 7)] == [tasks[399], tasks[0], tasks[7]]
    assert not {t.prompt for t in tasks} & {t.prompt for t in environment.held_out(200)}
    assert {task.entry["pool"] for task in environment.held_out(20)} == {"easy", "hard"}
    for task in (*tasks[:20], *environment.held_out(5)):
        assert environment.score(task, task.answer) == 1.0
        assert environment.score(task, task.answer + "1") == 0.0
        assert regenerate(environment, task.key) == task


def test_pools_of_other_weights_are_another_environment(folder: Path) -> None:
    digests = {
        make_environment(spec_of(folder, *pools)).digest
        for pools in ((EASY, HARD), (HARD, EASY), (EASY, PoolSpec("chain_sum", "hard", HARD.params, weight=2)), (EASY,))
    }
    assert len(digests) == 4


def test_pools_come_again_after_so_many(folder: Path) -> None:
    environment = make_environment(spec_of(folder, EASY, HARD, num_tasks=4))
    assert [environment.task(1, i).prompt for i in range(4)] == [environment.task(1, i).prompt for i in range(4, 8)]
    assert environment.task(1, 6).key == TaskKey("mine", 1, 6)


@pytest.mark.parametrize("num_tasks", [0, 8])
def test_with_a_curriculum_the_index_names_the_pool(num_tasks: int, folder: Path) -> None:
    """Whatever the rewards are, so that a task is made from its key alone, by whoever has the pools."""
    mixed = make_environment(spec_of(folder, EASY, HARD, num_tasks=num_tasks, by_index=True))
    own = [make_environment(spec_of(folder, pool)) for pool in (EASY, HARD)]
    for index in (0, 1, 2, 5, 7):
        task = mixed.task(3, index)
        assert task.key == TaskKey("mine", 3, index)
        assert task.entry["pool"] == ("easy", "hard")[index % 2]
        assert task.prompt == own[index % 2].task(3, index // 2).prompt
        assert mixed.score(task, task.answer) == 1.0
        assert regenerate(mixed, task.key) == task
    assert (mixed.task(3, 9).prompt == mixed.task(3, 1).prompt) == (num_tasks == 8)
    held_out = mixed.held_out(20)
    assert {task.entry["pool"] for task in held_out} == {"easy", "hard"}
    assert not {task.prompt for task in held_out} & {mixed.task(3, index).prompt for index in range(40)}


def test_a_curriculum_makes_another_environment(folder: Path) -> None:
    """So that a run that has begun is not gone on with other tasks: the journal pins the digest."""
    digests = {make_environment(spec_of(folder, EASY, HARD, by_index=by_index)).digest for by_index in (False, True)}
    assert len(digests) == 2


def test_a_question_becomes_a_chat(folder: Path) -> None:
    environment = make_environment(spec_of(folder, EASY, prompt="chat", system="Answer with a number."))
    plain = make_environment(EnvironmentSpec("chain_sum", EASY.params))
    task = environment.task(0, 0)
    question = plain.task(0, 0).prompt
    assert task.messages == (Message("system", "Answer with a number."), Message("user", question))
    assert task.prompt == question, "the split is that of the question"
    assert environment.score(task, task.answer) == 1.0
    other = make_environment(spec_of(folder, EASY, prompt="chat", system="Another."))
    assert len({environment.digest, other.digest, make_environment(spec_of(folder, EASY)).digest}) == 3


def test_the_digest_names_the_chat_template(folder: Path) -> None:
    write_tokenizer(folder, vocabulary_of(["1"]), max_length=64)
    environment = make_environment(spec_of(folder, EASY, prompt="chat"))
    tokenizer = load_tokenizer(folder)
    digests = {environment.digest, prompts_digest(environment, tokenizer)}
    for text in ("a", "b"):
        object.__setattr__(tokenizer, "chat_template", ChatTemplate(text, {}))
        digests.add(prompts_digest(environment, tokenizer))
    assert len(digests) == 3


def test_an_object_with_a_reply_holds_conversations_also_as_a_pool_and_as_a_chat(folder: Path) -> None:
    sums, talks = PoolSpec("hx_sums:make", "sums"), PoolSpec("hx_talks:make", "talks")
    assert not make_environment(spec_of(folder, sums)).is_multi_turn
    said = [Message("assistant", "hello")]
    for spec in (spec_of(folder, talks), spec_of(folder, sums, talks), spec_of(folder, talks, prompt="chat")):
        environment = make_environment(spec)
        assert environment.is_multi_turn
        task = next(task for i in range(50) if "+" not in (task := environment.task(0, i)).prompt)
        reply = environment.reply(task, said)
        assert reply is not None
        assert reply.startswith("assistant 0.")
        assert environment.reply(task, said) == reply, "chance is seeded"
        whole = [*said, Message("tool", reply), Message("assistant", "yes ")]
        assert environment.reply(task, whole) is None
        assert environment.score_turns(task, whole) == 0.75
        with pytest.raises(EngineError, match="OSError: no tool"):
            environment.reply(task, [Message("assistant", "fail")])
    mixed = make_environment(spec_of(folder, sums, talks))
    single = next(task for i in range(50) if "+" in (task := mixed.task(0, i)).prompt)
    assert mixed.reply(single, said) is None
    assert mixed.score_turns(single, [Message("assistant", single.answer)]) == 1.0
    plain = make_environment(spec_of(folder, PoolSpec("hx_talks:unjudged", "talks")))
    scores = [plain.score_turns(plain.task(0, 0), [*said, Message("assistant", text)]) for text in (" yes", "no")]
    assert scores == [1.0, 0.0]
