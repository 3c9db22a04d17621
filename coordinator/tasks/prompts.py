"""What a source may give as a prompt, brought into one form. Pure.

Invariant: a prompt is a text, or messages of which the last is the user's; nothing else becomes a task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.chat import Message
from protocol.errors import EngineError, UsageError
from protocol.tasks import Task

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Draft:
    """A task without its key; `prompt` is the text by which the split is chosen."""

    prompt: str
    answer: str
    entry: Mapping[str, Any]
    messages: tuple[Message, ...] = ()


def draft_of(row: Mapping[str, Any], *, prompt: str, answer: str, where: str) -> Draft:
    """A task from the columns named `prompt` and `answer` (none if that is empty); the others are its entry. `where`
    tells a person which row it is. Raises `UsageError`."""
    missing = [name for name in (prompt, answer) if name and row.get(name) is None]
    if missing:
        raise UsageError(
            f"{where} has no column {missing[0]!r}",
            why=f"it has {', '.join(sorted(map(str, row))) or 'none'}",
            remedy="Name the columns with `prompt_column` and `answer_column` in the run file ('' = no answers).",
        )
    text, messages = prompt_of(row[prompt], where=where)
    entry = {name: value for name, value in row.items() if name != prompt}
    return Draft(text, str(row[answer]) if answer else "", entry, messages)


def prompt_of(value: Any, *, where: str) -> tuple[str, tuple[Message, ...]]:
    """The text of a prompt, and its messages if it is a chat. Raises `UsageError`."""
    if isinstance(value, str):
        if not value.strip():
            raise _refused(where, "it is empty")
        return value, ()
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise _refused(where, f"it is {type(value).__name__}")
    messages = tuple(_message(item, where) for item in value)
    if messages[-1].role != "user":
        raise _refused(where, f"its last message is of the {messages[-1].role}")
    return "\n\n".join(message.content for message in messages), messages


def is_the_answer(task: Task, completion: str) -> float:
    """1 for the answer, white space around it aside, and 0 for all else. Raises `EngineError` where there is none."""
    if not task.answer:
        raise EngineError(
            f"task {task.key} cannot be scored", why="its source has no answers", remedy="Name a column with answers."
        )
    return float(completion.strip() == task.answer.strip())


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or not isinstance(item.get("content"), str):
        raise _refused(where, "a message of it has no text as its content")
    if item.get("role") not in ROLES:
        raise _refused(where, f"a message of it has the role {item.get('role')!r}")
    return Message(item["role"], item["content"])


def _refused(where: str, why: str) -> UsageError:
    return UsageError(
        f"the prompt of {where} cannot be used",
        why=why,
        remedy=f"Give a text, or a list of messages with `content` and a `role` ({', '.join(ROLES)}), the user's last.",
    )
