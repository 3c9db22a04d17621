"""A tiny base model is an ordinary model folder, equal for equal seeds, and good enough to start from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from coordinator.base import read_base_canary
from node.base import TinyShape, build_tiny_model, create_tiny_base
from node.base_folder import CANARY_FILE, write_canary
from node.training import evaluation
from node.training.evaluation import greedy_completions
from node.training.warmup import WarmUpProgress, WarmUpSettings
from protocol.canary import max_difference, probe_for
from protocol.errors import EngineError
from protocol.gym_tasks import ReasoningGymEnvironment
from protocol.tasks import load_tokenizer

SMALL = TinyShape(hidden=32, layers=1, heads=1, feed_forward=64)
BRIEF = WarmUpSettings(target=-1.0, check_steps=3)


@pytest.fixture(scope="module")
def environment() -> ReasoningGymEnvironment:
    torch.set_num_threads(1)
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return ReasoningGymEnvironment("chain_sum", params=params, prompt="expression")


@pytest.fixture(scope="module")
def folder(environment: ReasoningGymEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = create_tiny_base(tmp_path_factory.mktemp("base"), environment, seed=1, shape=SMALL, settings=BRIEF)
    return base.folder


def test_transformers_reads_the_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in ("4-13=", "-12"):
        assert tuple(theirs(text)["input_ids"]) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id,) == ours.stop_ids
    assert theirs.pad_token_id == ours.pad_id
    assert ours.vocab_size == model.config.vocab_size


def test_weights_are_float32_and_the_tied_tensor_is_stored_once(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.float32}


def test_equal_seeds_give_equal_bytes(environment: ReasoningGymEnvironment, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = create_tiny_base(tmp_path / "same", environment, seed=1, shape=SMALL, settings=BRIEF).folder
    other = create_tiny_base(tmp_path / "other", environment, seed=2, shape=SMALL, warm_up_first=False).folder
    for path in sorted(folder.iterdir()):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (folder / weights).read_bytes()


def test_default_shape_is_about_a_million_parameters() -> None:
    model = build_tiny_model(TinyShape(), num_tokens=20, seed=0)
    assert 0.6e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert model.config.head_dim >= 32


def test_warm_up_stops_at_the_first_check_over_its_target(environment: ReasoningGymEnvironment, tmp_path: Path) -> None:
    checks: list[WarmUpProgress] = []
    settings = WarmUpSettings(target=0.02, check_steps=5, learning_rate=3e-3)
    shape = TinyShape(hidden=64, layers=2, heads=2, feed_forward=128)
    base = create_tiny_base(tmp_path, environment, seed=0, shape=shape, settings=settings, progress=checks.append)
    assert all(check.accuracy <= 0.02 for check in checks[:-1])
    assert checks[-1].accuracy == base.accuracy > 0.02
    assert [check.step for check in checks] == list(range(5, base.warm_up_steps + 1, 5))


def test_a_warm_up_out_of_reach_says_so(environment: ReasoningGymEnvironment, tmp_path: Path) -> None:
    settings = WarmUpSettings(target=1.0, check_steps=1, max_steps=2, batch_size=2)
    with pytest.raises(EngineError, match="did not pass 100%"):
        create_tiny_base(tmp_path, environment, shape=SMALL, settings=settings)


def test_greedy_completions_stop_and_do_not_depend_on_their_company() -> None:
    model = build_tiny_model(SMALL, num_tokens=20, seed=5)
    prompts = [(3, 4, 5), (6, 7), (3, 4, 5)]
    free = greedy_completions(model, prompts, stop_ids=(), max_new_tokens=4)
    assert [len(ids) for ids in free] == [4, 4, 4]
    assert free[0] == free[2]
    alone = greedy_completions(model, prompts[1:2], stop_ids=(), max_new_tokens=4)
    assert free[1] == alone[0]
    stopped = greedy_completions(model, prompts[:1], stop_ids=free[0][:1], max_new_tokens=4)
    assert stopped == [()]


def test_kept_keys_and_values_change_no_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(SMALL, num_tokens=20, seed=5)
    prompts = [(3, 4, 5), (6, 7, 8), (9, 3, 2), (4, 4)]

    def naive(prompt: tuple[int, ...]) -> tuple[int, ...]:
        ids = list(prompt)
        for _ in range(6):
            with torch.inference_mode():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return tuple(ids[len(prompt) :])

    monkeypatch.setattr(evaluation, "MAX_ROWS", 2)
    assert greedy_completions(model, prompts, stop_ids=(), max_new_tokens=6) == [naive(prompt) for prompt in prompts]


def test_a_base_folder_has_the_canary_of_version_0(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    shutil.copytree(folder, base)
    write_canary(base)
    probe = probe_for(json.loads((base / "config.json").read_text())["vocab_size"])
    model = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([[*probe.prompt_ids, *probe.completion_ids]])
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits[0, 3:-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logprobs, probe.completion_ids, strict=True)]
    assert max_difference(json.loads((base / CANARY_FILE).read_text()), expected) < 1e-5
    assert read_base_canary(base) == tuple(json.loads((base / CANARY_FILE).read_text()))
    for spoilt in ("", "[1, 2]", '{"a": 1}', "[NaN]"):
        (base / CANARY_FILE).write_text(spoilt)
        assert read_base_canary(base) == ()
    (base / CANARY_FILE).unlink()
    assert read_base_canary(base) == ()
