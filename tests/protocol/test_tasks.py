"""Tasks are the same everywhere, held-out prompts are never trained on, and only right answers score."""

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.base import TinyShape, create_tiny_base
from node.tokenizer import END_ID, vocabulary_of, write_tokenizer
from node.training import warmup
from protocol.errors import EngineError, ModelMissingError, RolloutMalformedError, UsageError
from protocol.gym_tasks import ReasoningGymEnvironment
from protocol.ids import TaskKey
from protocol.tasks import (
    HELD_OUT_SHARE,
    Task,
    is_held_out,
    load_tokenizer,
    prompt_digest,
    regenerate,
    split_of,
)

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
ALL_PROMPTS = {f"{a}{sign}{b}=" for a in range(10) for b in range(10) for sign in "+-"}
ROOT = Path(__file__).parents[2]


def sums(**changes: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment("chain_sum", **{"params": ONE_DIGIT, "prompt": "expression", **changes})


@pytest.fixture(scope="module")
def environment() -> ReasoningGymEnvironment:
    return sums()


def test_train_and_held_out_share_no_prompt_and_cover_all(environment: ReasoningGymEnvironment) -> None:
    train = {environment.task(seed, index).prompt for seed in (1, 2) for index in range(1_500)}
    held_out = {task.prompt for task in environment.held_out(1_000)}
    assert not train & held_out
    assert train | held_out == ALL_PROMPTS
    assert len(held_out) == 42
    assert abs(len(held_out) / len(ALL_PROMPTS) - 1 / HELD_OUT_SHARE) < 0.05


def test_held_out_tasks_are_distinct_limited_and_regenerable(environment: ReasoningGymEnvironment) -> None:
    tasks = environment.held_out(10)
    assert len({task.prompt for task in tasks}) == len(tasks) == 10
    assert tasks == environment.held_out(1_000)[:10]
    for task in tasks:
        assert task.key.environment == "chain_sum#held-out"
        assert split_of(task.key) == "held-out"
        assert is_held_out(task.prompt)
        assert regenerate(environment, task.key) == task


def test_train_tasks_are_regenerable_in_any_order(environment: ReasoningGymEnvironment) -> None:
    first = [environment.task(5, index) for index in range(40)]
    assert [task.key for task in first] == [TaskKey("chain_sum", 5, index) for index in range(40)]
    order = list(range(40))
    random.Random(1).shuffle(order)
    fresh = sums()
    again = {index: regenerate(fresh, TaskKey("chain_sum", 5, index)) for index in order}
    assert [again[index] for index in range(40)] == first
    assert len({environment.task(seed, 0).prompt for seed in range(30)}) > 10


def test_another_environments_key_is_refused(environment: ReasoningGymEnvironment) -> None:
    with pytest.raises(UsageError, match="not of environment"):
        regenerate(environment, TaskKey("leg_counting", 0, 0))
    with pytest.raises(UsageError, match="negative"):
        environment.task(0, -1)


DUMP = """
import json, random, sys
from protocol.gym_tasks import ReasoningGymEnvironment
random.seed(int(sys.argv[1]))
out = []
for name, params, prompt in json.loads(sys.argv[2]):
    environment = ReasoningGymEnvironment(name, params=params, prompt=prompt)
    tasks = [environment.task(3, i, s) for i in (0, 1, 1030) for s in ("train", "held-out")]
    out.append([environment.digest, [[t.prompt, t.answer] for t in tasks]])
print(json.dumps(out))
"""


def test_other_processes_draw_the_same_tasks() -> None:
    # The last three draw from process-wide generators or keep generators of their own.
    wanted = [
        ("chain_sum", ONE_DIGIT, "expression"),
        ("leg_counting", {}, "question"),
        ("list_functions", {}, "question"),
        ("pool_matrix", {}, "question"),
        ("knights_knaves", {}, "question"),
    ]
    answers = [
        subprocess.run(
            [sys.executable, "-c", DUMP, salt, json.dumps(wanted)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for salt in ("1", "2")
    ]
    assert answers[0] == answers[1]
    assert len(json.loads(answers[0])) == len(wanted)


def test_callers_randomness_and_output_are_left_alone(
    environment: ReasoningGymEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    random.seed(9)
    expected = random.Random(9).random()
    environment.score(environment.task(1, 1), "3")
    assert random.random() == expected
    assert capsys.readouterr().out == ""


def test_digest_names_what_the_prompts_depend_on() -> None:
    digests = [
        sums().digest,
        sums(params={**ONE_DIGIT, "max_terms": 3}).digest,
        sums(prompt="question").digest,
        sums(name="other").digest,
        sums(partial_credit=True).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert sums().digest == sums(params=dict(reversed(ONE_DIGIT.items()))).digest


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("7", "7", 1.0),
        ("7", " 7 ", 1.0),
        ("7", "+07", 1.0),
        ("-3", "-3", 1.0),
        ("7", "8", 0.0),
        ("7", "17", 0.0),  # contains the answer
        ("3", "-3", 0.0),
        ("7", "", 0.0),
        ("7", "7=7", 0.0),
        ("7", "nan", 0.0),
    ],
)
def test_only_right_answers_score(
    environment: ReasoningGymEnvironment, answer: str, completion: str, expected: float
) -> None:
    tasks = (environment.task(1, index) for index in itertools.count())
    task = next(task for task in tasks if task.answer == answer)
    assert environment.score(task, completion) == expected


def test_partial_credit_is_there_for_who_asks() -> None:
    environment = sums(partial_credit=True)
    task = environment.task(1, 0)
    assert environment.score(task, task.answer) == 1.0
    assert 0.0 < environment.score(task, "0 " + task.answer) < 1.0


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.5, 1.5])
def test_nonsense_of_a_grader_is_refused(monkeypatch: pytest.MonkeyPatch, score: float) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    environment = sums()
    task = environment.task(1, 0)
    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda *_: score)
    with pytest.raises(EngineError, match="grader"):
        environment.score(task, "1")


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": "no_such_dataset"},
        {"dataset": "chain_sum", "params": {"no_such_parameter": 1}},
        {"dataset": "chain_sum", "params": {"min_terms": 5, "max_terms": 2}},
        {"dataset": "chain_sum", "params": {"seed": 4}},
        {"dataset": "leg_counting", "prompt": "expression"},
        {"dataset": "chain_sum", "name": "chain#sum"},
    ],
)
def test_wrong_run_files_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ReasoningGymEnvironment(**arguments)


def test_an_environment_without_held_out_prompts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.tasks.is_held_out", lambda _: False)
    with pytest.raises(UsageError, match="no held-out prompts"):
        sums().task(0, 0, "held-out")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, vocabulary_of(["What is 4 - 1 ?", "-3"]), max_length=64)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID], "pad_token_id": 0}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": 9}))
    return folder


def test_text_comes_back_from_its_ids(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    for text in ("-12", "4-1=", "What is 40 - 1 ?", "What  is"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode((*tokenizer.encode("18"), END_ID)) == "18"
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((END_ID,), 0, 32)
    assert len(tokenizer.encode("4-1=")) == 4


def test_ids_out_of_range_and_folders_without_tokenizer_are_refused(model_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.decode([31]) == ""  # a padded place of the vocabulary
    for token in (32, -1):
        with pytest.raises(RolloutMalformedError):
            tokenizer.decode([token])
    with pytest.raises(ModelMissingError):
        load_tokenizer(tmp_path)


def test_prompt_digests_tell_token_boundaries_apart() -> None:
    assert prompt_digest((1, 23)) != prompt_digest((12, 3))
    assert prompt_digest((1, 2)) == prompt_digest((1, 2))


def test_warm_up_never_draws_a_held_out_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = sums()
    drawn: list[Task] = []
    learned: list[tuple[int, ...]] = []
    original_task, original_loss = environment.task, warmup._answer_loss

    def task(seed: int, index: int, split: Any = "train") -> Task:
        drawn.append(original_task(seed, index, split))
        return drawn[-1]

    def answer_loss(model: Any, rows: Any, pad_id: int) -> Any:
        learned.extend(prompt for prompt, _ in rows)
        return original_loss(model, rows, pad_id)

    monkeypatch.setattr(environment, "task", task)
    monkeypatch.setattr(warmup, "_answer_loss", answer_loss)
    checks: list[warmup.WarmUpProgress] = []
    base = create_tiny_base(
        tmp_path,
        environment,
        seed=4,
        shape=TinyShape(hidden=32, layers=1, heads=1, feed_forward=64),
        settings=warmup.WarmUpSettings(target=-1.0, check_steps=5),
        progress=checks.append,
    )
    tokenizer = load_tokenizer(tmp_path)
    held_out = {environment.prompt_ids(t, tokenizer) for t in environment.held_out(1_000)}
    assert base.warm_up_steps == 5 == checks[-1].step
    assert len(learned) == 5 * 64
    assert not set(learned) & held_out
    assert {t.prompt for t in drawn if t.key.environment == "chain_sum"} & ALL_PROMPTS
    assert not any(is_held_out(t.prompt) for t in drawn if t.key.environment == "chain_sum")


def test_tasks_come_again_in_epochs() -> None:
    endless, epochs = sums(), sums(num_tasks=5)
    assert [epochs.task(7, index).prompt for index in range(10)] == [endless.task(7, i % 5).prompt for i in range(10)]
    assert epochs.task(7, 8).key.index == 8, "a task of a later epoch has a name of its own"
    assert epochs.digest != endless.digest
    assert [task.prompt for task in epochs.held_out(8)] == [task.prompt for task in endless.held_out(8)]
