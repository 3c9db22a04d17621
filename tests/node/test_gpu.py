"""What is asked of the GPUs, against a library that answers as a test wants."""

import sys
from pathlib import Path

import pytest

from node.gpu import GpuUser, NvmlGpus, has_gpu, open_gpus
from protocol.errors import MachineUnfitError
from tests.node.fake_gpus import FakeNvml


def test_users_compute_or_keep_the_gpu_busy() -> None:
    nvml = FakeNvml(2)
    nvml.users[1] = [7, 7]
    gpus = NvmlGpus(nvml)
    assert gpus.users() == [GpuUser(7, 1)]
    nvml.busy = [(8, 60), (9, 3)]  # a game, and a desktop that only draws
    assert {user.pid for user in gpus.users()} == {7, 8}


def test_only_the_gpus_that_cuda_may_use_count() -> None:
    nvml = FakeNvml(3)
    nvml.users = {0: [10], 1: [11], 2: [12]}
    assert {user.pid for user in NvmlGpus(nvml, visible="1").users()} == {11}
    assert {user.pid for user in NvmlGpus(nvml, visible="0, GPU-2f00").users()} == {10, 12}
    with pytest.raises(MachineUnfitError, match="no GPU"):
        NvmlGpus(nvml, visible="")


def test_power_is_capped_once_and_given_back() -> None:
    nvml = FakeNvml(2)
    nvml.caps_mw[1] = 150_000
    gpus = NvmlGpus(nvml)
    gpus.cap_power(200)
    gpus.cap_power(200)
    assert nvml.sets == [(0, 200_000)], "a GPU that is capped lower already is left alone"
    nvml.caps_mw[0] = 300_000  # a driver that was restarted
    gpus.cap_power(200)
    assert nvml.caps_mw == {0: 200_000, 1: 150_000}
    gpus.restore_power()
    gpus.restore_power()
    assert nvml.caps_mw == {0: 300_000, 1: 150_000}
    assert len(nvml.sets) == 3


def test_caps_that_cannot_be_set_say_why() -> None:
    with pytest.raises(MachineUnfitError, match="only an administrator may"):
        NvmlGpus(FakeNvml(may_set=False)).cap_power(200)
    with pytest.raises(MachineUnfitError, match="below 100 W"):
        NvmlGpus(FakeNvml()).cap_power(50)
    nvml = FakeNvml()
    gpus = NvmlGpus(nvml)
    nvml.is_broken = True
    with pytest.raises(MachineUnfitError, match="GPU is lost"):
        gpus.users()


def test_absent_library_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MachineUnfitError, match="not installed"):
        open_gpus()
    nvml = FakeNvml()
    nvml.is_broken = True
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(MachineUnfitError, match="driver does not answer"):
        open_gpus()
    assert not has_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert has_gpu(tmp_path)
