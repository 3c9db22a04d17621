"""Reward functions as organizers write them, good and bad."""

from typing import Any


def exact(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def contains(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


def always(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def never(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def has_tags(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """As functions for chats are written."""
    return [float("<answer>" in said[0]["content"]) for said in completions]


async def short(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    return [None if not ids else -float(len(ids)) for ids in completion_ids]


def columns(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    assert {"answer", "question", "metadata"} <= set(kwargs)
    assert all(isinstance(column, list) and len(column) == len(prompts) for column in kwargs.values())
    assert kwargs["question"] == prompts or all(text.endswith("=") for text in prompts)
    return [float(metadata["num_terms"]) for metadata in kwargs["metadata"]]


NOTHING = 7
