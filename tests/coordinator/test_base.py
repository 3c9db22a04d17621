"""What the coordinator reads of a base model's folder: what long slots cost its trainers."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.base import read_square_cost
from coordinator.settings import parse_run_file
from protocol.ids import RunId, Version
from protocol.manifest import Body, TensorSpec, digest_of
from tests.coordinator.test_settings import MINIMAL, TOKENIZER

BODY = Body(
    None, Version(0), None, (TensorSpec("w", (30, 20), "F32"), TensorSpec("x", (200,), "F32")), (), 1024,
    (digest_of(b""),) * 4, None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 3, "hidden_size": 16}, 3 * 16 / 800),
        ({"num_hidden_layers": 3}, 0.0),
        ({"hidden_size": 16}, 0.0),
        ({"num_hidden_layers": 0, "hidden_size": 16}, 0.0),
        ({"num_hidden_layers": "3", "hidden_size": 16}, 0.0),
        (None, 0.0),
    ],
)
def test_attention_costs_by_depth_width_and_size(
    tmp_path: Path, config: dict[str, Any] | None, expected: float
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_square_cost(tmp_path, BODY) == expected
    rules = parse_run_file(MINIMAL).rules(RunId("ab" * 16), TOKENIZER, square_cost=expected)
    assert rules.square_cost == expected


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"null"])
def test_a_config_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert read_square_cost(tmp_path, BODY) == 0.0
