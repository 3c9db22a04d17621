"""`[task]` of the run file: where the tasks come from, checked as far as that can be without running anything. Pure.

Invariant: what is only the organizer's (files, modules, templates) is in the part of the specification that no node is
told of.
"""

import re
from collections import Counter
from pathlib import PurePath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.run import EnvironmentSpec, PoolSpec

NAME = r"^([A-Za-z0-9_.-]{1,64})?$"
FILE_SCHEMES = ("jsonl", "dataset")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
MODULE_FIELDS = {"params", "prompt_column", "answer_column"}


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PoolSection(Section):
    """`[[task.pools]]`: one of several sources of tasks, and its share of them against the others' weights."""

    environment: str = Field(min_length=1, max_length=1024)
    params: dict[str, int | float | str | bool] = {}
    name: str = Field("", pattern=NAME)
    weight: float = Field(1.0, gt=0, le=1e6)
    prompt_column: str = Field("prompt", min_length=1)
    answer_column: str = "answer"

    @model_validator(mode="after")
    def _names_a_source(self) -> "PoolSection":
        check_source(self.environment, takes_params=bool(self.params))
        return self

    def spec(self, name: str) -> PoolSpec:
        """The pool under this name."""
        return PoolSpec(self.environment, name, self.params, self.weight, self.prompt_column, self.answer_column)


class RewardSection(Section):
    """`[[task.rewards]]`: `environment`, `math-verify` or `module:function`. With `format = "chat"` prompts and
    completions are lists of messages, as some functions expect them."""

    function: str = Field(pattern=r"^(environment|math-verify|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    weight: float = 1.0
    format: Literal["text", "chat"] = "text"


class RewardLimitsSection(Section):
    """`[task.reward_limits]`: what reward functions may take, in seconds for one call and MB of address space."""

    timeout_s: float = Field(10.0, gt=0, le=600)
    memory_mb: int = Field(2048, ge=256, le=65_536)


class CurriculumSection(Section):
    """`[task.curriculum]`: pools come the more often, the nearer their mean reward is to `target`; each keeps the share
    `floor` of the groups."""

    target: float = Field(0.5, ge=0, le=1)
    floor: float = Field(0.05, gt=0, le=0.5)


class TaskSection(Section):
    """`[task]`: the environment and its parameters, or several as pools. An environment is a data set of reasoning-gym
    by name, `jsonl:FILE`, `dataset:PATH`, `MODULE:FUNCTION` or `verifiers:ID`; `name` is what tasks and page call it.
    `rewards` say what completions are worth.
    With `prompt = "chat"` a question becomes the user's message, and `system` opens each chat. With `num_tasks` the
    sequence of tasks repeats itself after so many, and the coordinator remembers how long each one's completions
    were. With a `curriculum` the pools' shares follow their rewards."""

    environment: str = Field("", max_length=1024)
    params: dict[str, int | float | str | bool] = {}
    prompt: Literal["question", "expression", "chat"] = "question"
    seed: int = 0
    num_tasks: int = Field(0, ge=0, le=10_000_000)
    name: str = Field("", pattern=NAME)
    system: str = Field("", max_length=100_000)
    prompt_column: str = Field("prompt", min_length=1)
    answer_column: str = "answer"
    pools: list[PoolSection] = Field([], max_length=1000)
    curriculum: CurriculumSection | None = None
    rewards: list[RewardSection] = Field([], max_length=16)
    reward_limits: RewardLimitsSection = RewardLimitsSection()
    allow_fooled_grader: bool = False

    @model_validator(mode="after")
    def _has_a_goal(self) -> "TaskSection":
        if self.rewards and not any(reward.weight > 0 for reward in self.rewards):
            raise ValueError("no reward has a weight above 0")
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> "TaskSection":
        if bool(self.environment) == bool(self.pools):
            raise ValueError("it needs either an `environment` or `pools`")
        misplaced = sorted(MODULE_FIELDS & self.model_fields_set)
        if self.pools and misplaced:
            raise ValueError(f"`{misplaced[0]}` belongs into each of the pools")
        if self.environment:
            check_source(self.environment, takes_params=bool(self.params))
        if self.prompt == "expression" and any(":" in pool.source for pool in self._pools()):
            raise ValueError("only reasoning-gym has prompts of the form `expression`")
        return self

    @model_validator(mode="after")
    def _can_choose(self) -> "TaskSection":
        if self.curriculum is None:
            return self
        num_pools = len(self.pools)
        if num_pools < 2:
            raise ValueError("a `curriculum` needs two or more `pools`")
        if self.curriculum.floor * num_pools > 1:
            raise ValueError(f"{num_pools} pools cannot each keep {self.curriculum.floor:g} of the groups")
        if self.num_tasks % num_pools:
            raise ValueError(f"with a `curriculum` `num_tasks` must be a multiple of the number of pools, {num_pools}")
        return self

    def environment_spec(self, folder: str) -> EnvironmentSpec:
        """What the run is told to train on; paths and modules start at `folder`."""
        if self._is_open():
            return EnvironmentSpec(self.name or self.environment, self.params, self.prompt, self.num_tasks)
        return EnvironmentSpec(
            self.name or (name_of(self.environment) if self.environment else "pools"),
            prompt=self.prompt,
            num_tasks=self.num_tasks,
            origin="organizer",
            pools=self._pools(),
            system=self.system,
            folder=folder,
            by_index=self.curriculum is not None,
        )

    def _is_open(self) -> bool:
        """Whether any node that has reasoning-gym can make the same prompts."""
        is_plain = bool(self.environment) and ":" not in self.environment
        return is_plain and self.prompt != "chat" and not self.system and self.name in ("", self.environment)

    def _pools(self) -> tuple[PoolSpec, ...]:
        if not self.pools:
            name = self.name or name_of(self.environment)
            return (PoolSpec(self.environment, name, self.params, 1.0, self.prompt_column, self.answer_column),)
        names = [pool.name or name_of(pool.environment) for pool in self.pools]
        doubled = {name for name, count in Counter(names).items() if count > 1}
        numbered = [f"{name}-{place}" if name in doubled else name for place, name in enumerate(names, start=1)]
        return tuple(pool.spec(name) for pool, name in zip(self.pools, numbered, strict=True))


def check_source(source: str, *, takes_params: bool) -> None:
    """Raises `ValueError` for what cannot be a source of tasks, whatever is installed."""
    scheme, is_scheme, rest = source.partition(":")
    if not is_scheme:
        return
    if scheme in FILE_SCHEMES:
        if not rest:
            raise ValueError(f"`{scheme}:` needs a path")
        if takes_params:
            raise ValueError(f"`{scheme}:` takes no parameters")
    elif scheme == "verifiers":
        if not rest:
            raise ValueError("`verifiers:` needs the id of a task set")
    elif not FUNCTION.fullmatch(source):
        raise ValueError(
            f"{source!r} is no source: write a data set of reasoning-gym, jsonl:FILE, dataset:PATH, verifiers:ID or "
            "MODULE:FUNCTION"
        )


def name_of(source: str) -> str:
    """What an environment is called that nobody gave a name: the file's name, or the source with other marks."""
    scheme, is_scheme, rest = source.partition(":")
    text = (PurePath(rest).stem if scheme in FILE_SCHEMES else rest) if is_scheme else source
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:64] or "tasks"
