"""Rewards that a run file may name without a module, each made when it is wanted. Pure but for imports.

Invariant: they set no time limit of their own, since limits by signals would put ours out.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from protocol.errors import MachineUnfitError


def make_math_verify() -> Callable[..., list[float | None]]:
    """1 where the completion's answer equals the task's as mathematics, else 0; None where the task's own answer is no
    mathematics. Raises `MachineUnfitError` without the package."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MachineUnfitError(
            "the reward `math-verify` cannot be had",
            why="the package math-verify is not installed",
            remedy="Install it: pip install 'hexcomb[math]'.",
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each time limit that is off

    def parsed(text: str) -> list[Any]:
        return list(parse(text, parsing_timeout=None))

    def math_verify_reward(*, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
        golds = {text: parsed(text) for text in dict.fromkeys(answer)}
        return [
            float(verify(golds[text], parsed(completion), timeout_seconds=None)) if golds[text] else None
            for completion, text in zip(completions, answer, strict=True)
        ]

    return math_verify_reward


BUILT_IN: dict[str, Callable[[], Callable[..., Any]]] = {"math-verify": make_math_verify}
