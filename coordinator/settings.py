"""The run file: what an organizer writes, checked, and turned into the core's rules.

Every key is known; an unknown one is refused with the nearest that would be valid, and nothing starts. Impure only
in `read_run_file`, which reads the file.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from coordinator.core.rules import Curriculum, Rules
from coordinator.grading import RewardPlan, RewardSpec
from coordinator.task_settings import Section, TaskSection
from protocol.endpoint import parse_endpoint
from protocol.errors import HexcombError, UnknownSettingError, UsageError
from protocol.ids import RunId
from protocol.invite import MAX_ADDRESSES
from protocol.loss import Advantage, Aggregation, LossSpec, Preset, default_aggregation
from protocol.run import EnvironmentSpec, OptimizerSpec, RunSpec, SamplingContract, Staleness, Wire
from protocol.tokens import Tokenizer


class SamplingSection(Section):
    """`[sampling]`: how completions are sampled. Where the environment replies, `max_new_tokens` bounds a conversation
    with all replies, and after `max_turns` turns of the model it is not asked any more."""

    temperature: float = Field(1.0, gt=0, le=10)
    max_new_tokens: int = Field(256, ge=1, le=131_072)
    max_turns: int = Field(8, ge=1, le=64)


class BatchSection(Section):
    """`[batch]`: what makes one version, how stale a token may be, and what becomes of tokens that are staler. With
    `dynamic_sampling` groups whose rewards are all equal are left out, and others made in their place."""

    groups: int = Field(32, ge=1)
    group_size: int = Field(8, ge=2)
    max_lag: int = Field(4, ge=0, le=1000)
    mode: Literal["sequential", "periodic", "async"] = "async"
    staleness: Staleness = "mask_tokens"
    dynamic_sampling: bool = False
    max_concurrent_groups: int = Field(1024, ge=1)


class OptimizerSection(Section):
    """`[optimizer]`: AdamW."""

    lr: float = Field(1e-6, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(0.5, gt=0)
    warmup_versions: int = Field(0, ge=0)
    decay_versions: int = Field(0, ge=0)
    final_share: float = Field(0.1, ge=0, le=1)


class LossSection(Section):
    """`[loss]`: a preset, and those of its numbers that differ from its defaults; `docs/losses.md` has them all."""

    preset: Preset = "decoupled"
    aggregation: Aggregation | None = None
    advantage: Advantage = "centred"
    clip_low: float | None = Field(None, gt=0, lt=1)
    clip_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    weight_low: float | None = Field(None, ge=0)
    weight_high: float | None = Field(None, gt=0)
    weight_cut: float | None = Field(None, gt=0)
    ratio_low: float | None = Field(None, ge=0)
    ratio_high: float | None = Field(None, gt=0)
    ratio_cut: float | None = Field(None, gt=0)
    sigma: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, le=1)
    tau: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _goes_together(self) -> "LossSection":
        try:
            self.spec(max_tokens=1)
        except HexcombError as error:
            raise ValueError(error.sentence()) from error
        return self

    def spec(self, *, max_tokens: int) -> LossSpec:
        """The loss as trainers get it."""
        named = self.model_dump(exclude={"preset", "aggregation", "advantage"}, exclude_none=True)
        aggregation = self.aggregation or default_aggregation(self.preset)
        return LossSpec(self.preset, named, aggregation, self.advantage, max_tokens)


class AveragingSection(Section):
    """`[averaging]`: as what gradients and their averages travel between trainers."""

    wire: Wire = "f32"


class NodesSection(Section):
    """`[nodes]`: how many are expected, and pinned counts of roles."""

    trainers: int | None = Field(None, ge=1)
    rollouts: int | None = Field(None, ge=0)
    expected: int = Field(2, ge=1)
    settle_s: float = Field(10.0, ge=0)


class LimitsSection(Section):
    """`[limits]`: deadlines, and how often tokens of running slots are handed in (`piece_tokens = 0`: not at all). No
    lease lasts longer than `lease_s`; most are shorter, by the node's measured speed."""

    heartbeat_s: float = Field(5.0, gt=0)
    lease_s: float = Field(600.0, gt=0)
    round_s: float = Field(600.0, gt=0)
    piece_tokens: int = Field(32, ge=0, le=32)
    piece_s: float = Field(1.0, gt=0, le=60)


class EvaluationSection(Section):
    """`[evaluation]`: greedy accuracy on held-out tasks, at version 0 and at each multiple of `every` (0 = never)."""

    every: int = Field(0, ge=0)
    tasks: int = Field(64, ge=1, le=4096)


class ListenSection(Section):
    """`[listen]`: addresses; port 0 takes any free one at first and keeps it. `advertise` holds the names by which
    nodes reach this machine, needed where `host` is none. The status page stays on loopback unless `status_host` says
    otherwise."""

    host: str = "127.0.0.1"
    join_port: int = Field(7701, ge=0, le=65535)
    control_port: int = Field(7702, ge=0, le=65535)
    dht_port: int = Field(7703, ge=0, le=65535)
    status_host: str = "127.0.0.1"
    status_port: int = Field(7704, ge=0, le=65535)
    advertise: list[str] = Field([], max_length=MAX_ADDRESSES)

    @field_validator("host", "status_host", "advertise")
    @classmethod
    def _name_hosts(cls, value: str | list[str]) -> str | list[str]:
        for host in [value] if isinstance(value, str) else value:
            parse_endpoint(f"{host}:1")
        return value

    @model_validator(mode="after")
    def _can_be_reached(self) -> "ListenSection":
        if self.host in ("0.0.0.0", "[::]") and not self.advertise:
            raise ValueError(f"nodes cannot dial {self.host}: name this machine in `listen.advertise`")
        return self


class RunFile(Section):
    """The whole file. `base` is the folder that `hexcomb base create` made; relative paths start at the run file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    base: Path = Field(strict=False)
    stop_version: int | None = Field(None, ge=1)
    task: TaskSection
    sampling: SamplingSection = SamplingSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    loss: LossSection = LossSection()
    averaging: AveragingSection = AveragingSection()
    nodes: NodesSection = NodesSection()
    limits: LimitsSection = LimitsSection()
    evaluation: EvaluationSection = EvaluationSection()
    listen: ListenSection = ListenSection()
    _folder: str = PrivateAttr("")

    def rewards(self, *, hidden: Sequence[Path] = ()) -> RewardPlan:
        """What completions are worth, for the grader alone; functions must not read the `hidden` folders."""
        named = [RewardSpec(one.function, one.weight, one.format == "chat") for one in self.task.rewards]
        return RewardPlan(
            rewards=tuple(named) or (RewardSpec(),),
            timeout_s=self.task.reward_limits.timeout_s,
            memory_bytes=self.task.reward_limits.memory_mb << 20,
            folder=self._folder or None,
            hidden=tuple(map(str, hidden)),
        )

    @property
    def environment(self) -> EnvironmentSpec:
        """The environment as the organizer has it; nodes are told less."""
        return self.task.environment_spec(self._folder)

    def rules(self, run_id: RunId, tokenizer: Tokenizer, *, square_cost: float = 0.0) -> Rules:
        """What the core works by; stop ids, vocabulary and `square_cost` are the base model's."""
        spec = RunSpec(
            run_id=run_id,
            name=self.name,
            environment=self.environment.for_nodes(),
            seed=self.task.seed,
            sampling=SamplingContract(
                self.sampling.temperature,
                self.sampling.max_new_tokens,
                tokenizer.stop_ids,
                tokenizer.vocab_size,
                self.sampling.max_turns,
            ),
            optimizer=OptimizerSpec(**self.optimizer.model_dump()),
            groups_per_batch=self.batch.groups,
            group_size=self.batch.group_size,
            max_lag=0 if self.batch.mode != "async" else self.batch.max_lag,
            mode=self.batch.mode,
            heartbeat_s=self.limits.heartbeat_s,
            lease_s=self.limits.lease_s,
            round_s=self.limits.round_s,
            staleness=self.batch.staleness,
            dynamic_sampling=self.batch.dynamic_sampling,
            piece_tokens=self.limits.piece_tokens,
            piece_s=self.limits.piece_s,
            loss=self.loss.spec(max_tokens=self.sampling.max_new_tokens),
            wire=self.averaging.wire,
        )
        return Rules(
            spec=spec,
            num_trainers=self.nodes.trainers,
            num_rollouts=self.nodes.rollouts,
            expected_nodes=self.nodes.expected,
            settle_s=self.nodes.settle_s,
            max_concurrent=self.batch.max_concurrent_groups,
            evaluate_every=self.evaluation.every,
            stop_version=self.stop_version,
            curriculum=self._curriculum(),
            square_cost=square_cost,
        )

    def _curriculum(self) -> Curriculum | None:
        section, weights = self.task.curriculum, tuple(pool.weight for pool in self.task.pools)
        return Curriculum(weights, section.target, section.floor) if section else None


def read_run_file(path: Path) -> RunFile:
    """The run file at `path`. Raises `UsageError`, `UnknownSettingError`."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"the run file {path} cannot be read", why=str(error.strerror), remedy="Name a file that exists."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the run file {path} is not TOML", why=str(error), remedy="Mend the line.") from error
    run = parse_run_file(content)
    placed = run.model_copy(update={"base": (path.parent / run.base).resolve()})
    placed._folder = str(path.parent.resolve())
    return placed


def parse_run_file(content: dict[str, Any]) -> RunFile:
    """The checked content of a run file. Raises `UsageError`, `UnknownSettingError`."""
    try:
        return RunFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UnknownSettingError(
                f"the run file has an unknown key `{where}`", remedy=f"Did you mean `{_nearest(where)}`?"
            ) from error
        raise UsageError(
            f"`{where}` in the run file is wrong", why=first["msg"], remedy="Mend it, and start again."
        ) from error


def valid_keys(section: type[BaseModel] = RunFile, prefix: str = "") -> list[str]:
    """Every key that a run file may have, with its tables: `batch.max_lag`."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        kind = field.annotation
        for part in (kind, *get_args(kind)):
            if isinstance(part, type) and issubclass(part, Section):
                keys += valid_keys(part, f"{prefix}{name}.")
    return keys


def _nearest(key: str) -> str:
    by_path = difflib.get_close_matches(key, valid_keys(), n=1, cutoff=0.0)
    leaf = key.rpartition(".")[2]
    same_leaf = [valid for valid in valid_keys() if valid.rpartition(".")[2] == leaf]
    return (same_leaf or by_path)[0]
