"""Who trains and who generates: one pure function from measured rates to roles.

Invariants: the answer depends on nothing but its arguments, ties are broken by peer id; no node is given a role that
its invite or its owner does not allow; a living node keeps its role as long as its owner lets it work in it, with
three exceptions that keep the swarm going: the best rollout node takes the seat of a lost trainer if another
rollout node remains; it changes places with a trainer whose rounds fail; and the slowest trainer generates if no
rollout node is left and another one can train. A trainer must be reachable and must have a training rate. A node alone
becomes trainer if it can: the role whose work (fetch, warm up) takes longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.core.events import ANY_ROLE, Capability, InviteRole
from protocol.ids import PeerId
from protocol.run import Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living node. One whose `capability` is not known (again) yet keeps its role and gets no other; one whose owner
    wants no work for it (`unwilling` says why) is idle until that is over. `allowed` is the invite's limit, `wish` what
    the owner lets it do."""

    peer_id: PeerId
    allowed: InviteRole
    capability: Capability | None
    role: Role | None
    is_failing: bool = False
    unwilling: str = ""
    wish: tuple[Role, ...] = ANY_ROLE

    @property
    def may(self) -> tuple[Role, ...]:
        """Roles that both invite and owner allow."""
        return tuple(role for role in self.wish if self.allowed in ("auto", role))

    @property
    def can_train(self) -> bool:
        """Whether it may be given a trainer's seat."""
        known = self.capability
        fit = known is not None and known.reachable and known.train_tokens_per_s > 0
        return fit and "trainer" in self.may and not self.is_failing

    @property
    def can_generate(self) -> bool:
        """Whether it may be given rollouts to fill."""
        return "rollout" in self.may and self.capability is not None

    @property
    def rank(self) -> tuple[bool, float, PeerId]:
        """Best trainer first: who may do nothing else, then who trains fastest."""
        rate = self.capability.train_tokens_per_s if self.capability else 0.0
        return ("rollout" in self.may, -rate, self.peer_id)


@dataclass(frozen=True, slots=True)
class Given:
    """A role, and why, for people."""

    role: Role
    reason: str


def wanted_trainers(num_nodes: int, *, num_trainers: int | None, num_rollouts: int | None) -> int:
    """Seats for trainers: as pinned, else about one in four nodes; one node at least generates if there are two."""
    if num_nodes == 0:
        return 0
    if num_trainers is not None:
        wanted = num_trainers
    elif num_rollouts is not None:
        wanted = num_nodes - num_rollouts
    else:
        wanted = (num_nodes + 2) // 4
    return min(max(1, wanted), max(1, num_nodes - 1))


def decide_roles(
    candidates: Sequence[Candidate],
    *,
    num_trainers: int | None,
    num_rollouts: int | None,
    num_vacant_seats: int = 0,
) -> dict[PeerId, Given]:
    """The roles that change, by node. `num_vacant_seats` counts lost trainers that were not replaced yet."""
    given = {c.peer_id: Given("idle", c.unwilling) for c in candidates if c.unwilling and c.role != "idle"}
    candidates = [c for c in candidates if not c.unwilling]
    refused = [
        c for c in candidates if c.role not in (*c.wish, "idle", None)
    ]  # what they were given under another wish
    num_vacant_seats += sum(c.role == "trainer" for c in refused)
    candidates = [replace(c, role=None) if c in refused else c for c in candidates]
    wanted = wanted_trainers(len(candidates), num_trainers=num_trainers, num_rollouts=num_rollouts)
    trainers = [c for c in candidates if c.role == "trainer"]
    rollouts = [c for c in candidates if c.role == "rollout"]
    free = sorted((c for c in candidates if c.role in (None, "idle")), key=lambda c: c.rank)

    for node in [c for c in free if c.can_train][: max(0, wanted - len(trainers))]:
        given[node.peer_id] = Given("trainer", "among the fastest at training")
        trainers.append(node)
    for node in [c for c in free if c.peer_id not in given and c.can_generate]:
        if num_rollouts is not None and len(rollouts) >= num_rollouts:
            break
        given[node.peer_id] = Given("rollout", "generates rollouts")
        rollouts.append(node)

    _replace_failing(given, trainers, rollouts)
    _fill_vacancy(given, trainers, rollouts, num_seats=min(wanted - len(trainers), num_vacant_seats))
    spare = [c for c in free if c.peer_id not in given and c.can_train]
    _keep_one_generating(given, trainers, rollouts, spare, num_rollouts=num_rollouts)
    for node in free:
        if node.peer_id not in given and node.role is None:
            given[node.peer_id] = Given("idle", _why_idle(node))
    return given


def _replace_failing(given: dict[PeerId, Given], trainers: list[Candidate], rollouts: list[Candidate]) -> None:
    """A failing trainer and the best rollout node change places, as long as somebody is left to generate."""
    able = sorted((c for c in rollouts if c.can_train), key=lambda c: c.rank)
    for node in [c for c in trainers if c.is_failing]:
        if not able or not (node.can_generate or len(rollouts) > 1):
            return
        other = able.pop(0)
        given[other.peer_id] = Given("trainer", "takes the seat of a trainer that failed")
        given[node.peer_id] = Given("rollout" if node.can_generate else "idle", "its rounds failed again and again")
        trainers.remove(node)
        rollouts.remove(other)
        trainers.append(other)
        if node.can_generate:
            rollouts.append(node)


def _fill_vacancy(
    given: dict[PeerId, Given], trainers: list[Candidate], rollouts: list[Candidate], *, num_seats: int
) -> None:
    num_seats = max(num_seats, 0 if trainers else 1)
    for node in sorted((c for c in rollouts if c.can_train), key=lambda c: c.rank)[:num_seats]:
        if len(rollouts) < 2:
            return
        given[node.peer_id] = Given("trainer", "takes the seat of a lost trainer")
        rollouts.remove(node)
        trainers.append(node)


def _keep_one_generating(
    given: dict[PeerId, Given],
    trainers: list[Candidate],
    rollouts: list[Candidate],
    spare: list[Candidate],
    *,
    num_rollouts: int | None,
) -> None:
    """The slowest trainer that may generates, if nobody else does and another one trains, or can instead."""
    able = sorted((c for c in trainers if c.can_generate), key=lambda c: c.rank)
    if rollouts or num_rollouts == 0 or not able or len(trainers) + len(spare) < 2:
        return
    if len(trainers) < 2:
        given[spare[0].peer_id] = Given("trainer", "takes the seat of one that can generate, too")
    given[able[-1].peer_id] = Given("rollout", "no other node is left to generate")


def _why_idle(node: Candidate) -> str:
    if not node.may:
        return (
            f"invite and owner allow no role in common: {node.allowed}; {' or '.join(node.wish) or 'none known here'}"
        )
    if node.may == ("trainer",) and not node.can_train:
        return "a trainer must be reachable and have a training rate"
    return "enough nodes do what this one may do"
