"""The core's own constants of a run: what the run file says that the core must know. Pure."""

from dataclasses import dataclass

from protocol.run import RunSpec


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Pools of tasks, by their `weights`, of which those count most whose mean reward is nearest to `target`; each
    keeps the share `floor` of all groups."""

    weights: tuple[float, ...]
    target: float = 0.5
    floor: float = 0.05


@dataclass(frozen=True, slots=True)
class Rules:
    """`spec` is what nodes see too. `num_trainers` and `num_rollouts` pin counts of roles (None = decide from measured
    rates); the first version waits for `num_trainers`. Roles are first given when `expected_nodes` have told their
    capability, or `settle_s` after the last newcomer. `max_concurrent` bounds running groups. Held-out accuracy is
    asked for at each multiple of `evaluate_every` and at the last version (0 = never). No round starts from
    `stop_version`. With a `curriculum` rewards decide which pool the next tasks come from. To a trainer a slot of L
    tokens costs `L + square_cost * L * L`."""

    spec: RunSpec
    num_trainers: int | None = None
    num_rollouts: int | None = None
    expected_nodes: int = 2
    settle_s: float = 10.0
    max_concurrent: int = 1024
    evaluate_every: int = 0
    stop_version: int | None = None
    curriculum: Curriculum | None = None
    square_cost: float = 0.0
