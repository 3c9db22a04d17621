"""A stage for tasks of several turns: the calculator of docs/tasks.md, and tools that fail."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.grader import Grader
from coordinator.settings import parse_run_file
from node.orders import Lease, SlotWork
from node.tokenizer import END, vocabulary_of, write_tokenizer
from protocol.ids import SlotKey
from protocol.rollout import FinishReason, Rollout
from protocol.tokens import Tokenizer, load_tokenizer
from tests.coordinator.office import STOP_ID, Member, Office, run_content, serving, write_base
from tests.house.tree import ROOT

EXAMPLE = re.search(r"```python\n(# calculator\.py.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BROKEN = """
import os
class Broken:
    def task(self, seed, index): return {"prompt": f"{seed}+{index}=", "answer": ""}
    def reply(self, row, messages):
        said = messages[-1]["content"]
        if said == "7": raise KeyError("no such tool")
        if said == "8":
            while True: pass
        if said == "9": return 9
        if said == "3": os.kill(os.getpid(), 9)
        return "" if said == "6" else "1" * 99 if said == "5" else "1" if said == "4" else None
    def score(self, row, messages): return float(len(messages))
def make(): return Broken()
"""


@dataclass
class Stage:
    """A coordinator with an environment that replies, its tokenizer, and a way to start it again on its home."""

    office: Office
    tokenizer: Tokenizer
    grader: Grader

    def said(self, text: str) -> tuple[int, ...]:
        """A turn of the model."""
        return (*self.tokenizer.encode(text), STOP_ID)

    def answer(self, prompt_ids: tuple[int, ...]) -> tuple[str, str, str]:
        """(the call that a good model writes, what the calculator says, the answer)."""
        numbers = re.search(r"(\d+)\*(\d+)\+(\d+)=", self.tokenizer.decode(prompt_ids))
        assert numbers is not None
        a, b, c = map(int, numbers.groups())
        return f"calc({a}*{b})", str(a * b), str(a * b + c)

    def prefix(self, slot: SlotKey) -> Any:
        found = self.office.core.state.find(slot)
        assert found is not None
        return found.prefix


def write_folder(tmp_path: Path) -> Path:
    """An organizer's folder: base, template, modules."""
    assert EXAMPLE is not None
    write_base(tmp_path / "base")
    words = [EXAMPLE[1], TEMPLATE, "[system][user][tool]", "0123456789"]
    write_tokenizer(tmp_path / "base", vocabulary_of(words), max_length=512)
    config = {"vocab_size": 512, "eos_token_id": STOP_ID, "pad_token_id": 0}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "calculator.py").write_text(EXAMPLE[1])
    (tmp_path / "broken_tools.py").write_text(BROKEN)
    return tmp_path


@asynccontextmanager
async def on_stage(
    folder: Path,
    make_home: Callable[[], Path],
    *,
    module: str = "calculator",
    on: Path | None = None,
    evaluation: dict[str, int] | None = None,
    limits: dict[str, int] | None = None,
    **sampling: int,
) -> AsyncIterator[Stage]:
    """`sampling` is of the run file's section."""
    section = {
        "environment": f"{module}:make",
        "params": {},
        "prompt": "chat" if module == "calculator" else "question",
    }
    changes = {
        "task": section,
        "sampling": {"max_new_tokens": 96, **sampling},
        "evaluation": evaluation or {},
        "limits": {"heartbeat_s": 0.5, **(limits or {})},
    }
    run = parse_run_file(run_content(folder / "base", **changes))
    run._folder = str(folder)
    log_home = make_home()
    grader = Grader(run.environment, model_dir=folder / "base", run_dir=log_home, log_path=log_home / "grader.log")
    async with grader, serving(grader, folder / "base", make_home, on=on, **changes) as office:
        yield Stage(office, load_tokenizer(folder / "base"), grader)


async def joined(office: Office) -> Member:
    node = await office.join(role="rollout")
    await node.hello()
    await office.until(lambda: node.identity.peer_id in office.core.state.roles)
    return node


def turn(member: Member, work: SlotWork, *parts: tuple[int, ...]) -> Rollout:
    """What came with the slot, and own pieces after it."""
    start = sum(len(piece.token_ids) for piece in work.pieces)
    reason: FinishReason = "stop" if parts[-1][-1] == STOP_ID else "length"
    return Rollout(work.slot, (*work.pieces, *member.pieces(work.slot, *parts, start=start)), reason)


async def again(member: Member, slot: SlotKey) -> tuple[Lease, SlotWork]:
    """The slot under a new lease."""
    lease = await member.lease(8)
    return lease, next(work for work in lease.slots if work.slot == slot)
