"""Tasks that only the organizer has, from the run file to the lease: nodes get token ids, and no bad source, whatever
it does, takes the coordinator down."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from coordinator import grader as grader_module
from coordinator.grader import Grader
from coordinator.settings import RunFile, read_run_file
from node.orders import Lease
from protocol.errors import EngineError, HexcombError, JournalError, UsageError
from protocol.ids import TaskKey
from protocol.tasks import is_held_out, prompt_digest
from protocol.tokens import load_tokenizer
from tests.coordinator.office import Office, run_content, serving
from tests.house.tree import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUMBERS = """
import os, sys
class Numbers:
    def task(self, seed, index):
        if index == 9: raise RuntimeError("this one fails")
        if index == 10: sys.exit(1)
        if index == 11: os._exit(1)
        if index == 12: print("x" * (1 << 26))
        return {"prompt": f"{seed} + {index} = ?", "answer": str(seed + index)}
def make(): return Numbers()
"""
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
ROWS = [{"prompt": f"{a} + {b} = ?", "answer": f"{a + b}"} for a in range(10) for b in range(10)]


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    """An organizer's folder: base, rows, a module."""
    shutil.copytree(base, tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "numbers_of_mine.py").write_text(NUMBERS)
    return tmp_path


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_file(folder: Path, **task: Any) -> tuple[RunFile, dict[str, Any]]:
    """The run as read from the folder, and the section as `serving` wants it."""
    section = {"params": {}, "prompt": "question", **task}
    content = run_content(folder / "base", task=section)
    (folder / "run.toml").write_text(tomlkit.dumps(content))
    return read_run_file(folder / "run.toml"), section


def grader_of(run: RunFile, home: Path) -> Grader:
    return Grader(run.environment, model_dir=run.base, run_dir=home, log_path=home / "grader.log")


def prompts_of(lease: Lease) -> dict[int, tuple[int, ...]]:
    return {work.slot.task.index: work.prompt_ids for work in lease.slots}


async def test_a_lease_carries_the_prompts_and_rewards_come_from_the_rows(
    folder: Path, make_home: Callable[[], Path]
) -> None:
    run, section = run_file(folder, environment="jsonl:rows.jsonl")
    tokenizer = load_tokenizer(folder / "base")
    async with (
        grader_of(run, make_home()) as grader,
        serving(grader, folder / "base", make_home, task=section) as office,
    ):
        _, rollout = await office.swarm()
        lease = await rollout.lease(4)
        texts = {tokenizer.encode(row["prompt"]): row for row in ROWS if not is_held_out(row["prompt"])}
        assert all(ids in texts for ids in prompts_of(lease).values())
        assert all(prompt_digest(work.prompt_ids) == work.prompt_digest for work in lease.slots)
        key = lease.slots[0].slot.task
        assert key.environment == "rows"
        right = tokenizer.encode(texts[lease.slots[0].prompt_ids]["answer"])
        assert await grader.scores([(key, (*right, 1)), (key, (*right, *right))]) == (1.0, 0.0)


async def test_a_chat_goes_out_as_the_models_template_writes_it(folder: Path, make_home: Callable[[], Path]) -> None:
    (folder / "base" / "chat_template.jinja").write_text(CHAT)
    run, _ = run_file(folder, environment="jsonl:rows.jsonl", prompt="chat", system="1")
    tokenizer = load_tokenizer(folder / "base")
    async with grader_of(run, make_home()) as grader:
        keys = [TaskKey("rows", 7, index) for index in range(80)]
        made = await grader.prompts(keys)
        expected = {tokenizer.encode(f"system 1 user {row['prompt']} assistant") for row in ROWS}
        assert set(made) <= expected
        assert len(set(made)) == len([row for row in ROWS if not is_held_out(row["prompt"])])


async def test_a_source_that_fails_for_some_tasks_holds_up_no_other(
    folder: Path, make_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grader_module, "REMEMBER_S", 0.0)
    run, section = run_file(folder, environment="numbers_of_mine:make", name="numbers")
    async with (
        grader_of(run, make_home()) as grader,
        serving(grader, folder / "base", make_home, task=section) as office,
    ):
        made = await grader.try_prompts([TaskKey("numbers", 7, index) for index in range(8, 14)])
        failed = {key.index: value for key, value in made.items() if isinstance(value, HexcombError)}
        assert set(failed) == {9, 10, 11}
        assert "RuntimeError: this one fails" in failed[9].why
        assert "SystemExit" in failed[10].why
        _, rollout = await office.swarm()
        assert len((await rollout.lease(4)).slots) == 4
        assert office.coordinator.ready == ""


async def test_another_content_ends_a_run_that_has_begun(folder: Path, make_home: Callable[[], Path]) -> None:
    home = make_home()
    run, section = run_file(folder, environment="jsonl:rows.jsonl")

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[tuple[Grader, Office]]:
        grader = grader_of(run, make_home())
        async with grader, serving(grader, folder / "base", make_home, on=home, task=section) as office:
            yield grader, office

    async with started() as (_, office):
        _, rollout = await office.swarm()
        await rollout.lease(2)
    write_rows(folder / "rows.jsonl", ROWS[1:])
    with pytest.raises(JournalError, match=r"content of its task's files.*home folder"):
        async with started():
            pass
    write_rows(folder / "rows.jsonl", ROWS)
    async with started() as (grader, _):
        write_rows(folder / "rows.jsonl", ROWS[1:])
        assert grader._warm.child is not None
        await grader._warm.child.terminate(deadline_s=2.0)
        with pytest.raises(UsageError, match="changed while it ran"):
            await grader.prompts([TaskKey("rows", 7, 50)])
        write_rows(folder / "rows.jsonl", ROWS)
        assert await grader.prompts([TaskKey("rows", 7, 50)])


def serve(path: Path, home: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "coordinator.cli", "serve", str(path), "--home", str(home)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def test_a_bad_source_is_refused_before_anything_starts(folder: Path, make_home: Callable[[], Path]) -> None:
    (folder / "fails_on_import.py").write_text("raise OSError('no such disk')")
    (folder / "raises_always.py").write_text(NUMBERS.replace("index == 9", "index >= 0"))
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"environment": "jsonl:none.jsonl"}, 2, "none.jsonl cannot be read because No such file or directory"),
        ({"environment": "jsonl:rows.jsonl", "answer_column": "solution"}, 2, "has no column 'solution'"),
        ({"environment": "no_such_module:make"}, 2, "No module named 'no_such_module'"),
        ({"environment": "numbers_of_mine:mkae"}, 2, "no function 'mkae'"),
        ({"environment": "fails_on_import:make"}, 2, "no such disk"),
        ({"environment": "raises_always:make"}, 12, "this one fails"),
        ({"environment": "jsonl:rows.jsonl", "prompt": "chat"}, 2, "no chat template"),
    ]
    started: list[tuple[subprocess.Popen[str], Path]] = []
    for place, (task, _, _) in enumerate(cases):
        run_file(folder, **task)
        path, home = folder / f"run{place}.toml", make_home()
        os.rename(folder / "run.toml", path)
        started.append((serve(path, home), home))
    for (process, home), (_, code, words) in zip(started, cases, strict=True):
        _, err = process.communicate(timeout=100)
        last = err.strip().splitlines()[-1]
        assert (process.returncode, last.startswith("error: ")) == (code, True), err
        assert words in last
        assert "Traceback" not in err
        assert not (home / "addresses.json").exists(), "no port was opened"


async def test_a_fault_that_is_not_the_sources_is_told_apart(folder: Path, make_home: Callable[[], Path]) -> None:
    run, _ = run_file(folder, environment="numbers_of_mine:make", name="numbers")
    async with grader_of(run, make_home()) as grader:
        with pytest.raises(UsageError, match="not of environment"):
            await grader.prompts([TaskKey("rows", 7, 1)])
        with pytest.raises(EngineError, match="this one fails"):
            await grader.prompts([TaskKey("numbers", 7, 9)])
