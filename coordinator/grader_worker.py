"""The grading child: canonical prompts and rewards, in a process that can do little else.

It holds the tokenizer and the environment, no weights and no keys; its memory and the files that it may write are
limited before the environment's code is imported. A sample whose grading takes too long or raises is *missing*,
never 0.
"""

import argparse
import asyncio
import io
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from coordinator import grading
from coordinator.tasks.source import check_first_prompt, make_environment
from protocol.chat import Message
from protocol.child_serve import Emit, serve
from protocol.errors import EngineError, HexcombError
from protocol.ids import TaskKey
from protocol.tasks import Environment, Task, prompts_digest, regenerate
from protocol.tokens import Tokenizer, load_tokenizer

SCORE_LIMIT_S = 5.0
MAX_KEPT_TASKS = 4096
MEMORY_BYTES = 4 << 30
MAX_WRITTEN_BYTES = 32 << 20
"""For each file, the log among them, which is set aside well below that."""

MAX_PRINTED = 1 << 20
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Threads take address space, of which there is little."""


class TooSlow(BaseException):
    """The grader ran into its time limit; no `except Exception` of an environment takes it for a wrong answer."""


class Grader:
    """Answers the requests of `coordinator.grading`; `Open` comes first."""

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._tokenizer: Tokenizer | None = None
        self._tasks: dict[TaskKey, Task] = {}

    async def handle(self, request: msgspec.Struct, emit: Emit) -> msgspec.Struct:
        """One request; grading is short and must run in the main thread, where its alarm works."""
        match request:
            case grading.Open(environment=spec, model_dir=model_dir):
                self._environment, self._tokenizer = make_environment(spec), load_tokenizer(Path(model_dir))
                check_first_prompt(self._environment, self._tokenizer)
                digest = prompts_digest(self._environment, self._tokenizer)
                return grading.Opened(digest, self._environment.name, self._environment.is_multi_turn)
            case grading.MakePrompts(tasks=tasks):
                return self._prompts([TaskKey(*task) for task in tasks])
            case grading.HeldOut(limit=limit):
                environment, _ = self._opened()
                return self._prompts([task.key for task in environment.held_out(limit)])
            case grading.Reply(tasks=tasks, completions=completions):
                pairs = zip(tasks, completions, strict=True)
                return grading.Replies(tuple(self._reply(TaskKey(*task), said) for task, said in pairs))
            case grading.Score(tasks=tasks, completions=completions):
                pairs = zip(tasks, completions, strict=True)
                return grading.Scores(tuple(self._score(TaskKey(*task), said) for task, said in pairs))
            case grading.Describe(tasks=tasks, completions=completions):
                pairs = zip(tasks, completions, strict=True)
                return grading.Samples(tuple(self._describe(TaskKey(*task), said) for task, said in pairs))
        raise EngineError(f"the grader got a request that it does not know: {type(request).__name__}")

    def _opened(self) -> tuple[Environment, Tokenizer]:
        if self._environment is None or self._tokenizer is None:
            raise EngineError("the grader was asked before it was given an environment")
        return self._environment, self._tokenizer

    def _prompts(self, keys: list[TaskKey]) -> grading.Prompts:
        environment, tokenizer = self._opened()
        ids = tuple(environment.prompt_ids(self._task(key), tokenizer) for key in keys)
        return grading.Prompts(tuple((key.environment, key.seed, key.index) for key in keys), ids)

    def _task(self, key: TaskKey) -> Task:
        """The task, kept for the other samples of its group."""
        environment, _ = self._opened()
        if key not in self._tasks:
            if len(self._tasks) >= MAX_KEPT_TASKS:
                self._tasks.clear()
            self._tasks[key] = regenerate(environment, key)
        return self._tasks[key]

    def _describe(self, key: TaskKey, completion: grading.Completion) -> grading.Sample:
        """The completion with its task's record, as far as JSON can carry it."""
        _, tokenizer = self._opened()
        task = self._task(key)
        ids = tokenizer.encode(completion) if isinstance(completion, str) else _ids(completion)
        answer = task.answer if task.entry.get("answer", task.answer) is not None else None
        columns = json.dumps({**task.entry, "answer": answer}, default=str, skipkeys=True)
        return grading.Sample(task.prompt, self._text(completion), ids, columns)

    def _text(self, completion: grading.Completion) -> str:
        _, tokenizer = self._opened()
        return completion if isinstance(completion, str) else tokenizer.decode(_ids(completion))

    def _said(self, task: Task, completion: grading.Completion) -> list[Message]:
        """The messages of a conversation after the prompt; the environment's are had by asking it again."""
        environment, tokenizer = self._opened()
        if isinstance(completion, str):
            return [Message("assistant", completion)]
        ids, given = _ids(completion), completion.given if isinstance(completion, grading.Conversation) else ()
        said, start = list[Message](), 0
        for stop, num_tokens in (*given, (len(ids), 0)):
            said.append(Message("assistant", tokenizer.decode(ids[start:stop])))
            start = stop + num_tokens
            if not num_tokens:
                break
            reply = environment.reply(task, said)
            if reply is None or tokenizer.encode_reply(task.messages, reply, end=ids[stop - 1]) != ids[stop:start]:
                raise EngineError(f"the environment of task {task.key} does not reply to a turn as it did before")
            said.append(Message("tool", reply))
        return said

    def _reply(self, key: TaskKey, completion: grading.Completion) -> tuple[int, ...] | str | None:
        """The tokens that follow, None at the end, or why nobody knows."""
        environment, tokenizer = self._opened()
        signal.setitimer(signal.ITIMER_REAL, SCORE_LIMIT_S)
        try:
            task = self._task(key)
            reply = environment.reply(task, self._said(task, completion))
            if reply is None:
                return None
            return tokenizer.encode_reply(task.messages, reply, end=_ids(completion)[-1])
        except TooSlow:
            return f"it took longer than {SCORE_LIMIT_S:g} s"
        except HexcombError as error:
            traceback.print_exc()
            return error.sentence()
        except (SystemExit, Exception) as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _score(self, key: TaskKey, completion: grading.Completion) -> float | None:
        environment, _ = self._opened()
        signal.setitimer(signal.ITIMER_REAL, SCORE_LIMIT_S)
        try:
            task = self._task(key)
            if environment.is_multi_turn:
                return environment.score_turns(task, self._said(task, completion))
            return environment.score(task, self._text(completion))
        except (TooSlow, SystemExit, Exception):
            traceback.print_exc()
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _ids(completion: tuple[int, ...] | grading.Conversation | str) -> tuple[int, ...]:
    assert not isinstance(completion, str)
    return completion if isinstance(completion, tuple) else completion.token_ids


class Forgetful(io.TextIOBase):
    """A log that takes so many characters and forgets the rest: a full one must not fail a score."""

    def __init__(self, stream: TextIO, num_characters: int) -> None:
        self._stream, self._left = stream, num_characters

    def write(self, text: str) -> int:
        """Keeps what there is room for."""
        kept = text[: self._left]
        self._left -= len(kept)
        if kept:
            self._stream.write(kept)
        return len(text)

    def flush(self) -> None:
        """Passes on what was kept."""
        self._stream.flush()


def confine() -> None:
    """Takes away what grading does not need: memory, big files, core dumps, threads, the coordinator's environment."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WRITTEN_BYTES, MAX_WRITTEN_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in [name for name in os.environ if name not in ("PATH", "HOME", "LANG", "TMPDIR")]:
        del os.environ[name]
    os.environ.update(ONE_THREAD)
    sys.stdout = sys.stderr = Forgetful(sys.stderr, MAX_PRINTED)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow


def main() -> None:
    """`python -m coordinator.grader_worker --socket PATH`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    confine()
    signal.signal(signal.SIGALRM, _on_alarm)
    asyncio.run(serve(options.socket, Grader().handle, requests=grading.Request))


if __name__ == "__main__":
    main()
