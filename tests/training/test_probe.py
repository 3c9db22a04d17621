"""The probe measures a real model, and a large one by a part of it."""

import json
from pathlib import Path

import pytest

from node.compute.messages import Probe
from node.training import probe as probing
from protocol.errors import ModelMissingError
from tests.training.trainers import CONFIG


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 6}))
    return tmp_path


def test_rates_are_positive_and_memory_is_told(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "train_tokens_per_s", lambda folder: 3.0)
    monkeypatch.setattr(probing, "decode_tokens_per_s", lambda folder: 2.0)
    probed = probing.probe(Probe(str(model_dir)))
    assert (probed.train_tokens_per_s, probed.decode_tokens_per_s) == (3.0, 2.0)
    assert probed.memory_bytes > 1 << 20
    assert probed.device


def test_a_small_model_is_measured_whole(model_dir: Path) -> None:
    assert probing.train_tokens_per_s(model_dir, measure_s=0.05) > 100
    assert probing.decode_tokens_per_s(model_dir, measure_s=0.05) > 100


def test_a_large_model_is_measured_by_a_few_layers(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, share = probing._model(model_dir)
    assert (whole.config.num_hidden_layers, share) == (6, 1.0)
    monkeypatch.setattr(probing, "MAX_PARAMETERS", {"cuda": 1000, "cpu": 1000})
    part, share = probing._model(model_dir)
    assert part.config.num_hidden_layers == probing.REDUCED_LAYERS
    num_whole = sum(p.numel() for p in whole.parameters())
    assert share == pytest.approx(sum(p.numel() for p in part.parameters()) / num_whole)
    assert 0.2 < share < 0.5


def test_a_folder_without_a_model_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError):
        probing.train_tokens_per_s(tmp_path)
