"""Models that an engine does not take, each with an error that says why; and the memory that it finds."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from node.rollout import measured, reference
from node.rollout.measured import free_bytes_here
from node.rollout.memory import Limits, Memory
from node.rollout.model_files import check_code
from node.rollout.reference import Reference
from protocol.errors import ModelRefusedError, WeightsUnfitError
from protocol.ids import Version
from tests.engine.checks import collect, new_engine, some_requests


def altered(model: Any, folder: Path, **changes: Any) -> Path:
    """The model's folder with other values in its configuration."""
    shutil.copytree(model.folder, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, ModelRefusedError, "code of its own"),
        ({"model_type": "martian"}, ModelRefusedError, "does not know its kind"),
        ({"model_type": "t5"}, ModelRefusedError, "does not know its kind"),
        ({"hidden_size": "many"}, ModelRefusedError, "its configuration is broken"),
        ({"num_attention_heads": 0}, ModelRefusedError, "its configuration is broken"),
        ({"hidden_size": 64}, WeightsUnfitError, "of another shape"),
    ],
)
async def test_a_model_that_no_engine_takes_is_refused(
    tied_model: Any, tmp_path: Path, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    engine = new_engine("transformers")
    with pytest.raises(error, match=why):
        await engine.start(altered(tied_model, tmp_path / "model", **changes), Version(0), tied_model.files["A"])
    await engine.close()


async def test_a_configuration_that_is_no_json_is_refused(tied_model: Any, tmp_path: Path) -> None:
    folder = altered(tied_model, tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelRefusedError, match="cannot be read"):
        check_code(folder, trust_remote_code=True)


def test_code_runs_only_where_the_owner_allows_it(tied_model: Any, tmp_path: Path) -> None:
    folder = altered(tied_model, tmp_path / "model", auto_map={"AutoConfig": "configuration.Config"})
    check_code(folder, trust_remote_code=True)
    with pytest.raises(ModelRefusedError, match="trust_remote_code = true"):
        check_code(folder, trust_remote_code=Limits().trust_remote_code)


async def test_an_engine_takes_what_the_machine_has(
    tied_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2048 bytes a token, so that 32 MiB are 16384 tokens, nine tenths of them for 35 samples of up to 13 blocks."""
    monkeypatch.setattr(measured, "device_memory", lambda share, **_: Memory(1 << 30, 2.0, 0.25 * share, 32 << 20))
    engine = measured_engine(max_num_seqs=64)
    await engine.start(tied_model.folder, Version(0), tied_model.files["A"])
    assert engine.max_num_seqs == 35
    samples = await collect(engine, some_requests(40, length=20))
    assert {len(sample.token_ids) for sample in samples.values()} == {20}
    await engine.close()
    small = Memory(8 << 20, 2.0, 0.25, 64 << 20)
    monkeypatch.setattr(measured, "device_memory", lambda share, **_: small)
    engine = measured_engine(max_num_seqs=64)
    await engine.start(tied_model.folder, Version(0), tied_model.files["A"])
    assert (engine.max_num_seqs, engine._facts.max_len) == (1, 160)
    await engine.close()
    monkeypatch.setattr(measured, "device_memory", lambda share, **_: Memory(6 << 20, 2.0, 0.25, 64 << 20))
    with pytest.raises(ModelRefusedError, match="too large for this machine"):
        await measured_engine(max_num_seqs=64).start(tied_model.folder, Version(0), tied_model.files["A"])


def measured_engine(*, max_num_seqs: int) -> Any:
    from node.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(max_num_seqs=max_num_seqs, max_model_len=400)


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    assert free_bytes_here(tmp_path) <= psutil.virtual_memory().total  # no container
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    assert free_bytes_here(tmp_path) == 500_000
    (tmp_path / "memory.current").write_text("1200000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert free_bytes_here(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes_here(tmp_path) > 1_000_000


def test_a_second_copy_is_made_only_where_there_is_room(tied_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tied_model.files["A"]
    assert Reference.is_affordable(weights)
    num_bytes = weights.stat().st_size
    for name, value in (("free_bytes_here", lambda: 4 * num_bytes - 1), ("MAX_WEIGHT_BYTES", num_bytes - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, value)
            assert not Reference.is_affordable(weights)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * num_bytes - 1))
    assert not Reference.is_affordable(weights)
