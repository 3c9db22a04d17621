"""What the coordinator and its grading child say to each other. Pure: types alone."""

import msgspec

from protocol.run import EnvironmentSpec


class Open(msgspec.Struct, tag=True, frozen=True):
    """First request: the environment, and the folder with the tokenizer. Reply: `Opened`."""

    environment: EnvironmentSpec
    model_dir: str


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The child is ready; `digest` is the environment's content hash."""

    digest: str


class MakePrompts(msgspec.Struct, tag=True, frozen=True):
    """Canonical prompts of tasks (environment, seed, index). Reply: `Prompts`."""

    tasks: tuple[tuple[str, int, int], ...]


class HeldOut(msgspec.Struct, tag=True, frozen=True):
    """At most `limit` distinct held-out tasks. Reply: `Prompts`."""

    limit: int


class Prompts(msgspec.Struct, tag=True, frozen=True):
    """Tasks and their prompts' token ids, in the order asked."""

    tasks: tuple[tuple[str, int, int], ...]
    prompt_ids: tuple[tuple[int, ...], ...]


class Score(msgspec.Struct, tag=True, frozen=True):
    """Rewards of completions. Reply: `Scores`."""

    tasks: tuple[tuple[str, int, int], ...]
    completions: tuple[tuple[int, ...], ...]


class Scores(msgspec.Struct, tag=True, frozen=True):
    """One reward for each completion; None = missing (a fault of the grader, never a zero)."""

    rewards: tuple[float | None, ...]


Request = Open | MakePrompts | HeldOut | Score
Reply = Opened | Prompts | Scores
