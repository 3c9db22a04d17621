"""The owner's settings: known keys alone, options over the file, and what `join` was told is found by `up`."""

from pathlib import Path

import pytest

from node.limits import Limits, parse_hours
from node.settings import LimitSettings, NodeSettings, read_settings, write_settings
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


def test_limits_are_read_and_come_back(tmp_path: Path) -> None:
    text = '[limits]\nhours = "22:00-07:00"\nidle_only_s = 300\npause_on_gpu_use = true\ncpu_threads = 2\n'
    (tmp_path / "node.toml").write_text(text)
    settings = read_settings(tmp_path, options={"name": "fox"})
    assert settings.limits.standing() == Limits(
        hours=parse_hours("22:00-07:00"), hours_text="22:00-07:00", idle_only_s=300, pause_on_gpu_use=True
    )
    write_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings


def test_unknown_limits_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("[limits]\nupload_mbits_per_s = 8\n")
    with pytest.raises(UnknownSettingError, match=r"'limits\.upload_mbit_per_s'"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        'hours = "22-7"',
        "gpu_memory_share = 1.5",
        "upload_mbit_per_s = 0.1",
        "power_cap_required = true",
        "idle_only_s = -1",
        "cpu_threads = 1.5",
    ],
)
def test_limits_that_mean_nothing_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.toml").write_text(f"[limits]\n{text}\n")
    with pytest.raises(UsageError, match="limits"):
        read_settings(tmp_path)


@pytest.mark.parametrize(("threads", "allowed", "used"), [(8, 0, 8), (8, 2, 2), (1, 2, 1), (0, 0, 0), (0, 1, 1)])
def test_threads_keep_to_the_limit(threads: int, allowed: int, used: int) -> None:
    assert NodeSettings(threads=threads, limits=LimitSettings(cpu_threads=allowed)).num_threads == used
