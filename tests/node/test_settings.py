"""The owner's settings: known keys alone, options over the file, and what `join` was told is found by `up`."""

from pathlib import Path

import pytest

from node.settings import NodeSettings, read_settings, write_settings
from protocol.errors import UnknownSettingError, UsageError


def test_defaults_and_file_and_options(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == NodeSettings()
    (tmp_path / "node.toml").write_text('name = "fox"\nengine = "vllm"\n')
    settings = read_settings(tmp_path, options={"engine": "transformers", "role": None})
    assert (settings.name, settings.engine, settings.role) == ("fox", "transformers", "auto")


def test_written_settings_come_back(tmp_path: Path) -> None:
    settings = NodeSettings(name="fox", listen_host="192.0.2.7", capability_in_hello=False)
    write_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('enginee = "vllm"\n')
    with pytest.raises(UnknownSettingError, match="'engine'"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ['engine = "cuda"', "name = 7", "engine = ", 'role = "boss"'])
def test_wrong_values_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(UsageError):
        read_settings(tmp_path)
