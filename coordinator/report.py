"""The shape of `/api/v1/status`: what the coordinator tells people and programs. Pure: types alone.

`schema` rises by one when a field changes its meaning or goes; new fields may come at any time.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RunReport(BaseModel):
    """What the run file fixed."""

    run_id: str
    name: str
    environment: str
    mode: str
    max_lag: int
    groups_per_batch: int
    group_size: int
    stop_version: int | None


class RefusalReport(BaseModel):
    """Why a node got no work when it last asked: a stable code, a sentence, and when (Unix ms)."""

    code: str
    sentence: str
    at_ms: int


class NodeReport(BaseModel):
    """One node; rates are tokens per second: `tokens_per_s` is now, `measured_tokens_per_s` is what the coordinator
    measured from accepted rollouts, the others are the node's own measurements. `failure` is the share of its slots
    that it failed to fill (0 to 1); `refused` is empty where it last got work; `allowed_roles` are those that both its
    invite and its owner allow."""

    peer_id: str
    name: str
    role: str
    allowed_roles: list[str]
    state: Literal["live", "lost"]
    version: int
    tokens_per_s: float
    engine: str
    activity: str
    device: str
    decode_tokens_per_s: float
    train_tokens_per_s: float
    measured_tokens_per_s: float
    failure: float
    num_leased: int
    rollouts_trained: int
    refused: RefusalReport | None


class DeadLetterReport(BaseModel):
    """A slot that nobody could fill, why the last node gave up, and the version at that time."""

    slot: str
    reason: str
    at_version: int


class BooksReport(BaseModel):
    """Slots: issued = running + queued + in_round + trained + dropped + filtered + failed."""

    issued: int
    running: int
    queued: int
    in_round: int
    trained: int
    dropped: int
    filtered: int
    failed: int


class LeaseReport(BaseModel):
    """Leased slots: granted = open + filled + expired + returned."""

    granted: int
    open: int
    filled: int
    expired: int
    returned: int


class VersionReport(BaseModel):
    """A committed version and the batch that made it; metrics are named as in the trainers' loss."""

    version: int
    committed_ms: int
    reward: float
    num_rollouts: int
    mean_lag: float
    max_lag: int
    metrics: dict[str, float]


class EvaluationReport(BaseModel):
    """Greedy accuracy of a version on the held-out tasks."""

    version: int
    accuracy: float
    num_tasks: int


class PoolReport(BaseModel):
    """A pool of tasks of a curriculum: its share of the next groups, how many were opened, and the mean of its rewards
    so far, lately above all (None = there are too few)."""

    name: str
    share: float
    num_groups: int
    num_rewards: int
    mean_reward: float | None


class StatusReport(BaseModel):
    """Everything at once. `state` is a stable code, `waiting_for` its sentence."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_number: Literal[1] = Field(1, alias="schema")
    run: RunReport
    state: str
    waiting_for: str
    version: int
    epoch: int
    uptime_s: float
    versions_per_hour: float
    tokens_per_s: float
    num_accepted: int
    num_diverged: int
    num_masked_tokens: int
    num_moved_slots: int
    pools: list[PoolReport]
    nodes: list[NodeReport]
    books: BooksReport
    leases: LeaseReport
    lag_histogram: dict[int, int]
    history: list[VersionReport]
    evaluations: list[EvaluationReport]
    dead_letters: list[DeadLetterReport]
    refusals: dict[str, int]
