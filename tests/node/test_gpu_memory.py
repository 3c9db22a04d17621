"""The owner's share of the GPU's memory reaches engine, trainer and probe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import fields

from node.compute.messages import Probe, StartRollout, StartTrainer
from node.rollout import worker
from node.training.gpu_memory import cap_gpu_memory
from protocol.errors import EngineError
from protocol.run import EnvironmentSpec
from tests.node.fakes import SPEC


@pytest.fixture
def capped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """What torch was told, on a machine that seems to have two GPUs."""
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: told.append((share, index)))
    return told


def test_each_gpu_is_capped(capped: list[tuple[float, int]]) -> None:
    cap_gpu_memory(0.5)
    assert capped == [(0.5, 0), (0.5, 1)]


def test_without_a_limit_or_a_gpu_nothing_is_capped(
    capped: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_gpu_memory(0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cap_gpu_memory(0.5)
    assert capped == []


async def test_the_rollout_job_hands_it_to_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(name: str, **wishes: Any) -> Any:
        asked.append(wishes)
        raise EngineError("no engine here")

    monkeypatch.setattr(worker, "make_engine", refuse)
    (tmp_path / "config.json").write_text("{}")
    order = StartRollout(
        engine="transformers",
        model_dir=str(tmp_path),
        version=0,
        weights="",
        environment=EnvironmentSpec("chain_sum"),
        contract=SPEC.sampling,
        gpu_memory_share=0.4,
    )
    with pytest.raises(EngineError):
        await worker.RolloutJob.start(order)
    assert asked[0]["limits"].gpu_memory_share == 0.4


def test_orders_carry_no_limit_unless_one_is_set() -> None:
    assert Probe("x").gpu_memory_share == 0.0
    assert {field.name: field.default for field in fields(StartTrainer)}["gpu_memory_share"] == 0.0
