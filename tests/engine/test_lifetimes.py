"""How engines end: closed, lost, or with the process that owns them, and leave nothing behind."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.rollout.vllm_process import EarlyProcess
from node.rollout.vllm_surroundings import process_of
from protocol.errors import EngineError
from protocol.ids import Version
from tests.engine.checks import (
    EVENT_DEADLINE_S,
    KINDS,
    OWNER_DEADLINE_S,
    check_swap,
    collect,
    new_engine,
    some_requests,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while vllm is imported
]


def engine_processes() -> set[psutil.Process]:
    """Children of this process, but for the helper of multiprocessing, which ends with its owner."""
    children = psutil.Process().children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return {child for child in living if "resource_tracker" not in " ".join(child.cmdline())}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_untied_model_from_start_to_loss_or_close(kind: str, untied_model: Any) -> None:
    before = engine_processes()
    engine = new_engine(kind)
    with pytest.raises(EngineError):
        await collect(engine, some_requests(1, length=1))
    await engine.start(untied_model.folder, Version(0), untied_model.files["A"])
    await check_swap(engine, untied_model)

    doomed = asyncio.create_task(collect(engine, some_requests(2, length=350)))
    await collect(engine, some_requests(1, length=2))
    started = engine_processes() - before
    if kind == "vllm":
        assert isinstance(process_of(engine._engine), EarlyProcess), "what vLLM preloads is not what was guessed"
        for process in started:
            process.kill()
        async with asyncio.timeout(EVENT_DEADLINE_S):
            with pytest.raises(EngineError):
                await doomed
            with pytest.raises(EngineError):
                await engine.load(Version(2), untied_model.files["A"])
        await engine.close()
    else:
        await engine.close()
        assert {sample.finish_reason for sample in (await doomed).values()} == {"abort"}
    with pytest.raises(EngineError):
        await engine.score((1,), (2,))
    assert bool(started) == (kind == "vllm")
    assert not [process for process in started if process.is_running()]


OWNER = """
import asyncio, sys
from pathlib import Path
import psutil
from node.rollout.engine import SampleRequest
from node.rollout.selection import make_engine

async def main(folder, weights):
    engine = make_engine("vllm", max_num_seqs=4, max_model_len=64)
    await engine.start(Path(folder), 0, Path(weights))
    pids = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    print("ready", *pids, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_no_process_outlives_a_killed_owner(tied_model: Any, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    arguments = [sys.executable, str(script), str(tied_model.folder), str(tied_model.files["A"])]
    temporary = Path(tempfile.mkdtemp(prefix="hexcomb-test-"))  # a short path: sockets lie in it
    root = Path(__file__).parents[2]
    owner = await asyncio.create_subprocess_exec(
        *arguments,
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"], "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout
    try:
        async with asyncio.timeout(OWNER_DEADLINE_S):
            while not (line := await owner.stdout.readline()).startswith(b"ready"):
                assert line, "the owner ended before its engine was ready"  # vllm prints lines of its own
        children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        assert children
        assert any(name.startswith("hexcomb-engine-") for name in os.listdir(temporary))
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=EVENT_DEADLINE_S)
    assert not alive
    assert not any(name.startswith("hexcomb-engine-") for name in os.listdir(temporary))
    shutil.rmtree(temporary)
