"""`[task]`: every source arrives in the grading child's specification, nodes are told a name, nonsense is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.core.rules import Curriculum
from coordinator.settings import parse_run_file, read_run_file
from protocol.errors import UnknownSettingError, UsageError
from protocol.ids import RunId
from protocol.run import EnvironmentSpec, PoolSpec, RunSpec
from protocol.tokens import Tokenizer

TOKENIZER = Tokenizer(stop_ids=(1,), pad_id=0, vocab_size=9, _backend=None)


def spec_of(**task: Any) -> EnvironmentSpec:
    return parse_run_file({"name": "a", "base": "base", "task": task}).environment


def test_a_data_set_of_reasoning_gym_is_open_to_nodes_as_ever() -> None:
    spec = spec_of(environment="chain_sum", params={"min_terms": 2}, prompt="expression", num_tasks=5)
    assert spec == EnvironmentSpec("chain_sum", {"min_terms": 2}, "expression", 5)
    assert spec.for_nodes() is spec


PAIR: list[dict[str, Any]] = [
    {"environment": "chain_sum", "name": "easy"},
    {"environment": "chain_sum", "name": "hard"},
]


@pytest.mark.parametrize(
    ("task", "name", "pools"),
    [
        ({"environment": "jsonl:a/math-7.jsonl"}, "math-7", [PoolSpec("jsonl:a/math-7.jsonl", "math-7")]),
        ({"environment": "dataset:a b/c d"}, "c-d", [PoolSpec("dataset:a b/c d", "c-d")]),
        (
            {"environment": "a.b:make", "params": {"n": 1}, "name": "mine", "prompt_column": "q", "answer_column": ""},
            "mine",
            [PoolSpec("a.b:make", "mine", {"n": 1}, 1.0, "q", "")],
        ),
        ({"environment": "verifiers:me/x@1"}, "me-x-1", [PoolSpec("verifiers:me/x@1", "me-x-1")]),
        ({"environment": "chain_sum", "prompt": "chat"}, "chain_sum", [PoolSpec("chain_sum", "chain_sum")]),
        (
            {
                "pools": [
                    {"environment": "chain_sum", "weight": 2.0},
                    {"environment": "chain_sum"},
                    {"environment": "m:f"},
                ]
            },
            "pools",
            [PoolSpec("chain_sum", "chain_sum-1", {}, 2.0), PoolSpec("chain_sum", "chain_sum-2"), PoolSpec("m:f", "f")],
        ),
    ],
)
def test_what_is_the_organizers_alone_goes_to_no_node(task: dict[str, Any], name: str, pools: list[PoolSpec]) -> None:
    spec = spec_of(**task, num_tasks=3, system="Be brief.")
    assert (spec.name, spec.origin, spec.system, list(spec.pools)) == (name, "organizer", "Be brief.", pools)
    assert spec.for_nodes() == EnvironmentSpec(name, num_tasks=3, origin="organizer")


def test_the_run_that_nodes_get_tells_nothing_of_the_organizers_disk(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    task = '[task]\nenvironment = "jsonl:secret-place/x.jsonl"\nname = "sums"\nsystem = "hidden words"\n'
    path.write_text(f'name = "a"\nbase = "base"\n{task}')
    run = read_run_file(path)
    assert run.environment.folder == str(tmp_path)
    sent = run.rules(RunId("ab" * 16), TOKENIZER).spec.to_bytes()
    assert b"sums" in sent
    assert not any(word in sent for word in (b"secret", b"hidden", str(tmp_path).encode()))
    assert RunSpec.from_bytes(sent).environment == EnvironmentSpec("sums", origin="organizer")


def test_the_run_of_an_older_coordinator_is_understood() -> None:
    spec = parse_run_file({"name": "a", "base": "b", "task": {"environment": "chain_sum"}}).rules(
        RunId("ab" * 16), TOKENIZER
    )
    sent = spec.spec.to_bytes()
    for name in (b"origin", b"pools", b"system", b"folder"):
        assert name in sent  # what the older one did not send, and this one does
    old = msgspec.msgpack.decode(sent)
    old["environment"] = {"name": "chain_sum", "params": {}, "prompt": "question", "num_tasks": 0}
    assert RunSpec.from_bytes(msgspec.msgpack.encode(old)) == spec.spec


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ({}, "either an `environment` or `pools`"),
        ({"environment": "a", "pools": [{"environment": "b"}]}, "either an `environment` or `pools`"),
        ({"pools": []}, "either an `environment` or `pools`"),
        ({"pools": [{"environment": "b"}], "params": {"x": 1}}, "`params` belongs into each of the pools"),
        ({"pools": [{"environment": "b"}], "answer_column": "x"}, "`answer_column` belongs into each of the pools"),
        ({"pools": [{"environment": "b", "weight": 0}]}, "greater than 0"),
        ({"pools": [{"environment": "b", "weight": float("inf")}]}, "finite"),
        ({"pools": [{"environment": "jsonl:"}]}, "needs a path"),
        ({"environment": "jsonl:"}, "needs a path"),
        ({"environment": "dataset:x", "params": {"x": 1}}, "takes no parameters"),
        ({"environment": "verifiers:"}, "needs the id"),
        ({"environment": "json:x-1.jsonl"}, "is no source"),
        ({"environment": "a b:c"}, "is no source"),
        ({"environment": "m:f", "prompt": "expression"}, "only reasoning-gym"),
        ({"environment": "m:f", "name": "a:b"}, "pattern"),
        ({"environment": "m:f", "prompt_column": ""}, "at least 1"),
        ({"environment": "m:f", "curriculum": {}}, "two or more `pools`"),
        ({"pools": PAIR[:1], "curriculum": {}}, "two or more `pools`"),
        ({"pools": PAIR, "curriculum": {"floor": 0.0}}, "greater than 0"),
        ({"pools": PAIR, "curriculum": {"target": 1.5}}, "less than or equal to 1"),
        ({"pools": PAIR, "curriculum": {"target": float("nan")}}, "finite"),
        ({"pools": [*PAIR, {"environment": "c"}], "curriculum": {"floor": 0.4}}, "cannot each keep 0.4"),
        ({"pools": PAIR, "curriculum": {}, "num_tasks": 7}, "a multiple of the number of pools, 2"),
    ],
)
def test_nonsense_is_refused(task: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        spec_of(**task)
    assert "task" in caught.value.what


def test_a_curriculum_reaches_the_core_and_no_node() -> None:
    task = {"pools": [{**PAIR[0], "weight": 3.0}, PAIR[1]], "curriculum": {"target": 0.4}, "num_tasks": 8}
    run = parse_run_file({"name": "a", "base": "b", "task": task})
    assert run.environment.by_index
    rules = run.rules(RunId("ab" * 16), TOKENIZER)
    assert rules.curriculum == Curriculum((3.0, 1.0), target=0.4, floor=0.05)
    assert not rules.spec.environment.by_index
    plain = parse_run_file({"name": "a", "base": "b", "task": {"pools": PAIR}})
    assert plain.rules(RunId("ab" * 16), TOKENIZER).curriculum is None
    assert not plain.environment.by_index


def test_an_unknown_key_of_a_pool_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownSettingError, match=r"Did you mean `task\.pools\.weight`"):
        spec_of(pools=[{"environment": "chain_sum", "wieght": 1.0}])
