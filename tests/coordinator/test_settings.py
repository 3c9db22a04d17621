"""The run file: every good value arrives, every bad one is refused with its key, the reason and what to do."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomlkit

from coordinator.grading import RewardPlan, RewardSpec
from coordinator.settings import parse_run_file, read_run_file, valid_keys
from protocol.errors import UnknownSettingError, UsageError
from protocol.ids import RunId
from protocol.loss import NUMBERS, LossSpec, Preset, default_aggregation
from protocol.run import RunSpec
from protocol.tokens import Tokenizer

MINIMAL: dict[str, Any] = {"name": "sums", "base": "base", "task": {"environment": "chain_sum"}}
TOKENIZER = Tokenizer(stop_ids=(1, 2), pad_id=0, vocab_size=99, _backend=None)


def with_value(key: str, value: Any) -> dict[str, Any]:
    """The minimal file with one value changed; a dot leads into a table."""
    table, _, leaf = key.rpartition(".")
    if not table:
        return {**MINIMAL, leaf: value}
    return {**MINIMAL, table: {**MINIMAL.get(table, {}), leaf: value}}


def test_the_smallest_run_file_has_sound_defaults() -> None:
    run = parse_run_file(MINIMAL)
    assert (run.batch.mode, run.batch.max_lag, run.listen.status_host) == ("async", 4, "127.0.0.1")
    rules = run.rules(RunId("ab" * 16), TOKENIZER)
    assert (rules.spec.sampling.stop_ids, rules.spec.sampling.vocab_size) == ((1, 2), 99)
    assert (rules.spec.max_lag, rules.max_concurrent, rules.stop_version) == (4, 1024, None)


def test_rewards_arrive_at_the_grader_and_nowhere_else(tmp_path: Path) -> None:
    rewards = [{"function": "environment"}, {"function": "my.rewards:f", "weight": 0.5, "format": "chat"}]
    task = {**MINIMAL["task"], "rewards": rewards, "reward_limits": {"timeout_s": 3.0, "memory_mb": 512}}
    path = tmp_path / "run.toml"
    path.write_text(tomlkit.dumps({**MINIMAL, "task": task}))
    run = read_run_file(path)
    specs = RewardSpec("environment", 1.0), RewardSpec("my.rewards:f", 0.5, is_chat=True)
    assert run.rewards(hidden=[tmp_path]) == RewardPlan(specs, 3.0, 512 << 20, str(tmp_path), (str(tmp_path),))
    plain = parse_run_file(MINIMAL)
    assert plain.rewards().rewards == (RewardSpec("environment"),)
    of_nodes = [one.rules(RunId("ab" * 16), TOKENIZER).spec.to_bytes() for one in (run, plain)]
    assert of_nodes[0] == of_nodes[1]


def test_a_mistyped_key_of_a_reward_is_refused_with_the_right_one() -> None:
    with pytest.raises(UnknownSettingError, match=r"`task\.rewards\.weight`"):
        parse_run_file(with_value("task.rewards", [{"function": "a:b", "weigth": 1.0}]))


@pytest.mark.parametrize(("mode", "max_lag"), [("sequential", 0), ("periodic", 0), ("async", 7)])
def test_only_the_asynchronous_mode_has_a_lag(mode: str, max_lag: int) -> None:
    run = parse_run_file({**MINIMAL, "batch": {"mode": mode, "max_lag": 7}})
    assert run.rules(RunId("ab" * 16), TOKENIZER).spec.max_lag == max_lag


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty", "typical_p"])
def test_samplers_that_truncate_are_no_settings(key: str) -> None:
    """They would sample from another distribution than the one whose log-probabilities are trained on."""
    with pytest.raises(UnknownSettingError, match=f"sampling.{key}"):
        parse_run_file(with_value(f"sampling.{key}", 1))
    assert parse_run_file(with_value("sampling.temperature", 0.5)).sampling.temperature == 0.5


def test_every_section_arrives_in_the_rules() -> None:
    content = {
        **MINIMAL,
        "stop_version": 9,
        "task": {"environment": "chain_sum", "params": {"min_terms": 2, "hard": True}, "seed": 5},
        "sampling": {"temperature": 0.7, "max_new_tokens": 11},
        "batch": {"groups": 3, "group_size": 5, "max_concurrent_groups": 17},
        "optimizer": {"lr": 0.5, "warmup_versions": 2},
        "loss": {"preset": "icepop", "weight_low": 0.25, "aggregation": "dr_grpo"},
        "averaging": {"wire": "bf16"},
        "nodes": {"trainers": 2, "rollouts": 3, "expected": 4, "settle_s": 1.5},
        "limits": {"heartbeat_s": 1.0, "lease_s": 2.0, "round_s": 3.0},
        "evaluation": {"every": 6},
    }
    rules = parse_run_file(content).rules(RunId("ab" * 16), TOKENIZER)
    spec = rules.spec
    assert spec.environment.params == {"min_terms": 2, "hard": True}
    assert type(spec.environment.params["hard"]) is bool
    assert (spec.seed, spec.sampling.temperature, spec.sampling.max_new_tokens) == (5, 0.7, 11)
    assert (spec.groups_per_batch, spec.group_size, rules.max_concurrent) == (3, 5, 17)
    assert (spec.optimizer.lr, spec.optimizer.warmup_versions) == (0.5, 2)
    assert (rules.num_trainers, rules.num_rollouts, rules.expected_nodes, rules.settle_s) == (2, 3, 4, 1.5)
    assert spec.loss == LossSpec("icepop", {"weight_low": 0.25}, "dr_grpo", "centred", 11)
    assert spec.wire == "bf16"
    assert (spec.heartbeat_s, spec.lease_s, spec.round_s) == (1.0, 2.0, 3.0)
    assert (rules.evaluate_every, rules.stop_version) == (6, 9)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("batch.max_lagg", "batch.max_lag"),
        ("batch.eta", ""),
        ("batches", "batch"),
        ("optimizer.learning_rate", ""),
        ("loss.clip", "loss.clip_low"),
        ("limits.max_lag", "batch.max_lag"),
        ("max_lag", "batch.max_lag"),
        ("listen.joinport", "listen.join_port"),
        ("task.enviroment", "task.environment"),
        ("nodes.trainer", "nodes.trainers"),
        ("task.reward", "task.rewards"),
        ("", ""),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_that_would_be_valid(key: str, nearest: str) -> None:
    with pytest.raises(UnknownSettingError) as caught:
        parse_run_file(with_value(key, 1))
    assert f"`{key}`" in caught.value.what
    (offered,) = re.findall(r"Did you mean `(.+)`\?", caught.value.remedy)
    assert offered in valid_keys()
    assert offered == (nearest or offered)
    assert (caught.value.code, caught.value.exit_code) == ("UNKNOWN_SETTING", 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "Sums"),
        ("name", "<script>"),
        ("name", "a" * 33),
        ("name", "sums\n"),
        ("base", 7),
        ("stop_version", 0),
        ("task", {}),
        ("task", "chain_sum"),
        ("task.prompt", "song"),
        ("task.params", {"x": [1]}),
        ("task.rewards", {"function": "a:b"}),
        ("task.rewards", [{}]),
        ("task.rewards", [{"function": "print"}]),
        ("task.rewards", [{"function": "os.path"}]),
        ("task.rewards", [{"function": "../secret:f"}]),
        ("task.rewards", [{"function": "a:b", "weight": float("inf")}]),
        ("task.rewards", [{"function": "a:b", "weight": 0.0}, {"function": "c:d", "weight": -1.0}]),
        ("task.rewards", [{"function": "a:b", "format": "xml"}]),
        ("task.rewards", [{"function": "a:b"}] * 17),
        ("task.reward_limits", {"timeout_s": 0.0}),
        ("task.reward_limits", {"memory_mb": 1}),
        ("task.allow_fooled_grader", "yes"),
        ("sampling.temperature", 0.0),
        ("sampling.temperature", float("nan")),
        ("sampling.temperature", "hot"),
        ("sampling.max_new_tokens", 0),
        ("sampling.max_new_tokens", 131_073),
        ("sampling.max_new_tokens", 1.5),
        ("batch.groups", 0),
        ("batch.group_size", 1),
        ("batch.max_lag", -1),
        ("batch.mode", "turbo"),
        ("optimizer.lr", float("inf")),
        ("optimizer.beta1", 1.0),
        ("optimizer.max_grad_norm", 0),
        ("loss.preset", "ppo"),
        ("loss.sigma", 0.5),
        ("loss.weight_low", 0.5),
        ("loss", {"preset": "gspo", "aggregation": "token_mean"}),
        ("loss", {"preset": "naive", "weight_cut": 2.0}),
        ("loss", {"preset": "icepop", "weight_low": 6.0}),
        ("loss", {"aggregation": "dr_grpo", "advantage": "standardised"}),
        ("loss.clip_low", 1.0),
        ("loss.dual_clip", 1.0),
        ("averaging.wire", "f16"),
        ("nodes.trainers", 0),
        ("nodes.settle_s", float("inf")),
        ("limits.heartbeat_s", 0),
        ("limits.heartbeat_s", float("inf")),
        ("limits.lease_s", float("nan")),
        ("evaluation.tasks", 0),
        ("listen.join_port", 65_536),
        ("listen.join_port", "7701"),
        ("batch.groups", True),
        ("batch.groups", 2.0),
        ("listen.host", "0.0.0.0"),
        ("listen.host", "[::]"),
        ("listen.host", "no host"),
        ("listen.status_host", ""),
        ("listen.advertise", ["host:7701"]),
        ("listen.advertise", ["http://host"]),
        ("listen.advertise", ["host"] * 9),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run_file(with_value(key, value))
    assert type(caught.value) is UsageError
    assert f"`{key.partition('.')[0]}" in caught.value.what
    assert caught.value.why
    assert caught.value.remedy
    assert caught.value.exit_code == 2


def test_a_run_file_without_a_loss_trains_by_the_default() -> None:
    spec = parse_run_file(MINIMAL).rules(RunId("ab" * 16), TOKENIZER).spec
    assert spec.loss == LossSpec(max_tokens=spec.sampling.max_new_tokens)
    assert RunSpec.from_bytes(spec.to_bytes()) == spec
    before = msgspec.msgpack.decode(spec.to_bytes())
    del before["loss"], before["wire"]  # as a coordinator of an earlier release sends it
    earlier = RunSpec.from_bytes(msgspec.msgpack.encode(before))
    assert (earlier.loss, earlier.wire) == (LossSpec(), "f32")


@pytest.mark.parametrize("preset", NUMBERS)
def test_every_number_of_a_preset_is_a_setting(preset: Preset) -> None:
    loss = {"preset": preset, **NUMBERS[preset]}
    spec = parse_run_file({**MINIMAL, "loss": loss}).rules(RunId("ab" * 16), TOKENIZER).spec
    assert spec.loss.numbers == NUMBERS[preset]
    assert spec.loss.aggregation == default_aggregation(preset)


def test_a_machine_may_listen_everywhere_under_a_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "sums"\nbase = "../models/base"\n[task]\nenvironment = "chain_sum"\n'
        '[listen]\nhost = "0.0.0.0"\nadvertise = ["run.example.org", "[2001:db8::1]"]\n'
    )
    run = read_run_file(path)
    assert run.listen.advertise == ["run.example.org", "[2001:db8::1]"]
    assert run.base == (tmp_path.parent / "models" / "base").resolve()


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"a = 1\na = 2", b"a = " + b"[" * 10_000])
def test_what_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.toml is not TOML"):
        read_run_file(path)


def test_a_run_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot be read because"):
            read_run_file(path)


def test_the_example_of_a_whole_file_needs_every_key_to_be_known() -> None:
    keys = valid_keys()
    assert len(keys) == len(set(keys))
    assert {"batch", "batch.max_lag", "listen.advertise", "evaluation.every", "task.params"} <= set(keys)
