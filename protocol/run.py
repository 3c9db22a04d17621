"""What every member of a run must agree on: model shape of work, sampling contract, optimizer, loss, limits. Pure.

The coordinator derives a `RunSpec` from the run file and hands it to each node at the start of its session; it does
not change while the run lives.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from protocol.ids import RunId
from protocol.loss import LossSpec

Mode = Literal["sequential", "periodic", "async"]
Role = Literal["trainer", "rollout", "idle"]
Staleness = Literal["mask_tokens", "drop", "wait"]
"""What becomes of tokens whose lag is over the bound at the cut: masked alone, dropped with their whole rollout, or
avoided by waiting for the slots that would come to hold them."""

Wire = Literal["f32", "bf16"]
"""As what gradients and their averages travel between trainers: float32, or bfloat16 at half the bytes."""


Params = dict[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Where tasks of an organizer's environment come from: `chain_sum` (any data set of reasoning-gym), `jsonl:FILE`,
    `dataset:PATH`, `MODULE:FUNCTION` or `verifiers:ID`, with its parameters; what it is called; how often, against the
    other pools; and the columns of rows that hold prompt and answer (an empty name = there are no answers)."""

    source: str
    name: str = ""
    params: Params = field(default_factory=dict)
    weight: float = 1.0
    prompt_column: str = "prompt"
    answer_column: str = "answer"


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment by name, with the parameters that it is built with, e.g. `chain_sum` and `{"min_terms": 2}`;
    `prompt` chooses the form of its prompts. With `num_tasks` the sequence of tasks repeats itself after so many, in
    epochs (0 = it is endless).

    Tasks of origin `organizer` are made by him alone, from `pools`; `folder` is where his modules are, `system` opens
    each chat; with `by_index` the pool of a task is its index modulo their number, and not chosen by weight. No node is
    told any of that."""

    name: str
    params: Params = field(default_factory=dict)
    prompt: Literal["question", "expression", "chat"] = "question"
    num_tasks: int = 0
    origin: Literal["reasoning-gym", "organizer"] = "reasoning-gym"
    pools: tuple[PoolSpec, ...] = ()
    system: str = ""
    folder: str = ""
    by_index: bool = False

    def for_nodes(self) -> "EnvironmentSpec":
        """What nodes are told: all, where they can make the tasks too, and else the name alone."""
        if self.origin == "reasoning-gym":
            return self
        return EnvironmentSpec(self.name, num_tasks=self.num_tasks, origin="organizer")


@dataclass(frozen=True, slots=True)
class SamplingContract:
    """How a slot must be sampled. Temperature only: truncating samplers would bias the importance weights. Where the
    environment replies, `max_new_tokens` bounds its tokens and those of all turns together, and after `max_turns` turns
    it is not asked any more."""

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_turns: int = 8


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW over the averaged gradient, clipped by its global norm; `warmup_versions` steps of linear warm-up, and
    linear decay of the rate to `final_share` of it at `decay_versions` (0 = none)."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    warmup_versions: int = 0
    decay_versions: int = 0
    final_share: float = 0.1


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One training job. `groups_per_batch` groups of `group_size` slots make one version. `lease_s` bounds every lease,
    however well it goes. With `dynamic_sampling` groups whose rewards are all equal are filtered. Slots under way are
    handed in by pieces of at most `piece_tokens` tokens or `piece_s` seconds (0 tokens = not at all)."""

    run_id: RunId
    name: str
    environment: EnvironmentSpec
    seed: int
    sampling: SamplingContract
    optimizer: OptimizerSpec
    groups_per_batch: int
    group_size: int
    max_lag: int
    mode: Mode
    heartbeat_s: float
    lease_s: float
    round_s: float
    interrupt: bool = True
    staleness: Staleness = "mask_tokens"
    dynamic_sampling: bool = False
    piece_tokens: int = 32
    piece_s: float = 1.0
    loss: LossSpec = field(default_factory=LossSpec)
    wire: Wire = "f32"

    def to_bytes(self) -> bytes:
        """The spec as msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "RunSpec":
        """The inverse of `to_bytes`; raises `msgspec.ValidationError` on anything else."""
        return msgspec.msgpack.decode(data, type=RunSpec)
