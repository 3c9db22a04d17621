"""Rows of files as tasks: the same from the same bytes, split by prompt, each once an epoch; bad files are refused."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from coordinator.tasks.source import make_environment
from protocol.chat import Message
from protocol.errors import EngineError, MachineUnfitError, UsageError
from protocol.ids import TaskKey
from protocol.run import EnvironmentSpec, PoolSpec
from protocol.tasks import Environment, is_held_out, regenerate

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "level": a} for a in range(10) for b in range(10)]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def environment(source: str, folder: Path, *, num_tasks: int = 0, **columns: str) -> Environment:
    """The environment of one source, as the grading child makes it."""
    pool = PoolSpec(source, "rows", **columns)  # type: ignore[arg-type]
    spec = EnvironmentSpec("rows", num_tasks=num_tasks, origin="organizer", pools=(pool,), folder=str(folder))
    return make_environment(spec)


def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sums.jsonl")
    rows = environment("jsonl:sums.jsonl", tmp_path)
    train = {row["prompt"] for row in ROWS if not is_held_out(str(row["prompt"]))}
    size = len(train)
    epochs = [[rows.task(3, index).prompt for index in range(start, start + size)] for start in (0, size)]
    assert set(epochs[0]) == set(epochs[1]) == train
    assert epochs[0] != epochs[1]
    assert epochs[0] != [rows.task(4, index).prompt for index in range(size)]
    again = environment("jsonl:sums.jsonl", tmp_path)
    keys = [TaskKey("rows", 3, index) for index in reversed(range(2 * size))]
    assert [regenerate(again, key).prompt for key in keys] == [*reversed(epochs[1]), *reversed(epochs[0])]


def test_held_out_rows_are_never_trained_on_and_distinct(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sums.jsonl", [*ROWS, *ROWS])
    rows = environment("jsonl:sums.jsonl", tmp_path)
    held_out = rows.held_out(1000)
    assert {task.prompt for task in held_out} == {row["prompt"] for row in ROWS if is_held_out(str(row["prompt"]))}
    assert len({task.prompt for task in held_out}) == len(held_out)
    assert rows.held_out(5) == held_out[:5]
    assert [regenerate(rows, task.key) for task in held_out] == held_out
    assert not any(is_held_out(rows.task(1, index).prompt) for index in range(300))


def test_tasks_come_again_after_so_many(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sums.jsonl")
    endless, few = environment("jsonl:sums.jsonl", tmp_path), environment("jsonl:sums.jsonl", tmp_path, num_tasks=5)
    assert [few.task(7, i).prompt for i in range(12)] == [endless.task(7, i % 5).prompt for i in range(12)]
    assert few.digest != endless.digest
    assert few.task(7, 8).key == TaskKey("rows", 7, 8)


def test_answers_score_and_other_columns_are_kept(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sums.jsonl")
    rows = environment("jsonl:sums.jsonl", tmp_path)
    task = rows.task(0, 0)
    a, b = int(task.prompt[0]), int(task.prompt[2])
    assert task.answer == str(a + b)
    assert task.entry == {"answer": a + b, "level": a}
    assert [rows.score(task, text) for text in (f" {a + b}\n", f"{a + b + 1}", "", f"={a + b}")] == [1.0, 0.0, 0.0, 0.0]


def test_columns_have_the_names_that_the_run_file_gives_them(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": row["prompt"], "n": row["level"]} for row in ROWS])
    rows = environment("jsonl:a.jsonl", tmp_path, prompt_column="question", answer_column="")
    task = rows.task(0, 0)
    assert set(task.entry) == {"n"}
    with pytest.raises(EngineError, match="no answers"):
        rows.score(task, "")  # not even where the completion is empty, too


def test_messages_are_a_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat, "answer": "4"}, *ROWS])
    rows = environment("jsonl:a.jsonl", tmp_path)
    found = [task for i in range(101) if (task := rows.task(0, i, "train")).messages] + rows.held_out(100)
    assert next(task for task in found if task.messages).messages == (Message("system", "Add."), Message("user", "2+2"))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "holds no tasks"),
        ("\n\n", "holds no tasks"),
        ('{"prompt": "1"', "line 1 is not JSON"),
        ('{"prompt": "1", "answer": "1"}\nnull\n', "line 2 is no JSON object"),
        ('{"prompt": "1"}\n', "has no column 'answer'"),
        ('{"question": "1", "answer": ""}\n', "has no column 'prompt'"),
        ('{"prompt": null, "answer": ""}\n', "has no column 'prompt'"),
        ('{"prompt": " ", "answer": ""}\n', "it is empty"),
        ('{"prompt": 7, "answer": ""}\n', "it is int"),
        ('{"prompt": [], "answer": ""}\n', "it is list"),
        ('{"prompt": [{"role": "user"}], "answer": ""}\n', "no text as its content"),
        ('{"prompt": [{"role": "tool", "content": "x"}], "answer": ""}\n', "has the role 'tool'"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": ""}\n', "last message is of the assistant"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "\xff"}', "is not JSON"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, match: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=match) as caught:
        environment("jsonl:a.jsonl", tmp_path)
    assert caught.value.why
    assert caught.value.remedy


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for source in ("jsonl:none.jsonl", "dataset:none.parquet", "dataset:none", "jsonl:."):
        with pytest.raises(UsageError, match="cannot be read"):
            environment(source, tmp_path)


def test_rows_that_are_all_held_out_are_refused(tmp_path: Path) -> None:
    held_out = [row for row in ROWS if is_held_out(str(row["prompt"]))]
    write_jsonl(tmp_path / "a.jsonl", held_out)
    with pytest.raises(UsageError, match="no train prompts"):
        environment("jsonl:a.jsonl", tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [row for row in ROWS if row not in held_out])
    with pytest.raises(UsageError, match="no held-out prompts"):
        environment("jsonl:a.jsonl", tmp_path).held_out(1)


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS), ("b", ROWS), ("c", [*ROWS[:-1], {**ROWS[-1], "answer": 19}])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    digests = [environment(f"jsonl:{name}.jsonl", tmp_path).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
    assert environment("jsonl:a.jsonl", tmp_path, answer_column="level").digest != digests[0]


# Data sets


def save_to_disk(folder: Path, rows: Sequence[dict[str, Any]], *, num_files: int = 2) -> None:
    """The layout that `datasets` writes."""
    folder.mkdir()
    names = [f"data-{i:05}-of-{num_files:05}.arrow" for i in range(num_files)]
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(list(rows[i::num_files]))
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def write_data_set(tmp_path: Path, form: str) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    match form:
        case "parquet":
            pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
            return tmp_path / "a.parquet"
        case "arrow":
            with (
                pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
                pyarrow.ipc.new_file(sink, table.schema) as file,
            ):
                file.write_table(table)
            return tmp_path / "a.arrow"
        case "several":
            (tmp_path / "a").mkdir()
            for start in (0, 50):
                pyarrow.parquet.write_table(table.slice(start, 50), tmp_path / "a" / f"{start:03}.parquet")
            return tmp_path / "a"
        case _:
            save_to_disk(tmp_path / "a", ROWS)
            return tmp_path / "a"


@pytest.mark.parametrize("form", ["parquet", "arrow", "several", "saved"])
def test_data_sets_give_the_rows_of_their_files(tmp_path: Path, form: str) -> None:
    path = write_data_set(tmp_path, form)
    rows = environment(f"dataset:{path}", tmp_path)
    train = Counter(str(row["prompt"]) for row in ROWS if not is_held_out(str(row["prompt"])))
    tasks = [rows.task(0, index) for index in range(train.total())]
    assert Counter(task.prompt for task in tasks) == train
    assert all(set(task.entry) == {"answer", "level"} for task in tasks)
    assert rows.digest == environment(f"dataset:{path}", tmp_path).digest


def test_a_data_set_with_several_splits_must_be_named_whole(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("test", "train"):
        save_to_disk(tmp_path / "a" / name, ROWS)
    with pytest.raises(UsageError, match=r"several data sets because it has test, train\. Name one: .*a/test"):
        environment("dataset:a", tmp_path)
    assert environment("dataset:a/train", tmp_path).task(0, 0).prompt


def test_damaged_and_foreign_data_sets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    (tmp_path / "a.arrow").write_bytes(b"nothing")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    save_to_disk(tmp_path / "saved", ROWS)
    (tmp_path / "saved" / "state.json").write_text("{}")
    for name, match in (
        ("a.parquet", "cannot be read"),
        ("a.arrow", "cannot be read"),
        ("a.txt", "no data set"),
        ("empty", "no data set"),
        ("saved", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=match):
            environment(f"dataset:{name}", tmp_path)


def test_a_saved_folder_leads_nowhere_else(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "a", ROWS)
    secret = write_data_set(tmp_path, "arrow").rename(tmp_path / "secret.arrow")
    assert environment(f"dataset:{secret}", tmp_path).task(0, 0).prompt
    (tmp_path / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(UsageError, match="cannot be read"):
        environment("dataset:a", tmp_path)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data_set(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MachineUnfitError, match="pyarrow is not installed") as caught:
        environment("dataset:a.parquet", tmp_path)
    assert "hexcomb[tasks]" in caught.value.remedy
