"""Seeded bugs, by the invariant of the design ("What can never happen") that each of them breaks.

`INVARIANTS` says of each which tests cover the part that is not the core's to decide. The machine in `swarm.py` must
find every bug.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.core import apply, attestation, leases, ledger, returns, roster, rounds, shares
from coordinator.core.rules import Curriculum
from coordinator.core.soft import Attestation
from coordinator.core.state import Batch, Round, Slot, State
from coordinator.core.turn import Turn
from protocol.errors import RoundStaleError
from protocol.ids import Digest, PeerId, RoundId
from protocol.manifest import Body

LIVE_MASK = shares.live_mask


@dataclass(frozen=True)
class Bug:
    """`wrong` stands for `name` in `place`; `kind` pins what kind of histories to look at, so that it is found soon."""

    place: object
    name: str
    wrong: object
    kind: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Invariant:
    """One line of the design; `elsewhere` names the tests of what the core does not decide."""

    sentence: str
    bugs: dict[str, Bug]
    elsewhere: str = ""


def always(value: object) -> Callable[..., object]:
    """A function that says the same whatever it is asked."""
    return lambda *_, **__: value


def forget_leases(turn: Turn) -> None:
    """Leases end without giving their slots back."""
    turn.state.leases.clear()


def take_for_equal(digest: Digest, body: Body, *rest: Any) -> Attestation:
    """All bodies pass for the same."""
    return Attestation(Digest("same"), body, *rest)


def count_parts(slot: Slot, **how: Any) -> int:
    """What is fresh of a rollout counts, also where the policy is to drop it as a whole."""
    return shares.num_live_tokens(slot, **{**how, "staleness": "mask_tokens"})


def learn_all(slot: Slot, **how: Any) -> bytes:
    """No matter who said it."""
    return LIVE_MASK(replace(slot, given=()), **how)


def listen_to_anybody(turn: Turn, peer_id: PeerId, round_id: RoundId) -> tuple[Round, Batch]:
    """Who speaks for a round need not be its member."""
    round_, batch = turn.state.round, turn.state.batch
    if round_ is None or batch is None or round_.round_id != round_id:
        raise RoundStaleError("round", why="it is not open")
    return round_, batch


def issue_again(state: State, place: tuple[int, int], *, before: Callable[..., None] = apply._wait_again) -> None:
    """A slot that waits again is counted as a new one."""
    before(state, place)
    state.num_issued += 1
    state.tally["waiting"] += 1


def forget_batch(state: State, fact: Any, *, before: Callable[..., None] = apply._abort) -> None:
    """An attempt that fails gives its slots up."""
    before(state, fact)
    for index in state.batch.groups if state.batch else ():
        apply._retire(state, index)
    state.batch = None


INVARIANTS: dict[int, Invariant] = {
    1: Invariant(
        "A token with lag over the bound contributes to a gradient.",
        {
            "gate 3 lets old tokens through": Bug(shares, "is_fresh", always(True)),
            "gate 1 gives work to old weights": Bug(leases, "is_fresh", always(True)),
            "gate 2 takes rollouts that are too old": Bug(ledger, "is_fresh", always(True)),
            "modes of lag 0 do not bind": Bug(
                Turn, "max_lag", property(lambda turn: turn.rules.spec.max_lag), {"mode": "sequential", "max_lag": 2}
            ),
            "a rollout is dropped by halves": Bug(
                rounds, "num_live_tokens", count_parts, {"policy": "drop", "mode": "async"}
            ),
        },
        elsewhere="that the mask reaches the loss: tests/training, tests/network",
    ),
    2: Invariant(
        "An acknowledged rollout is lost, or trained on twice.",
        {
            "duplicates are not known": Bug(ledger, "_fill_of", always(None)),
            "trained groups stay": Bug(apply, "_retire", always(None)),
            "an aborted batch is given up": Bug(apply, "_abort", forget_batch),
            "what was received of a slot is not kept": Bug(returns, "_keep_prefix", always(None)),
        },
        elsewhere="that an acknowledgement is durable: tests/coordinator/test_journal.py, test_failpoints.py",
    ),
    3: Invariant(
        "Two different weight sets carry the same version number; a version is skipped; two trainers hold different "
        "bits for one version.",
        {
            "bodies that differ are committed": Bug(attestation, "Attestation", take_for_equal),
            "a body need not follow the head": Bug(attestation, "_check_body", always(None)),
            "every attempt has the same name": Bug(rounds, "RoundId", lambda text: RoundId("0.0")),
        },
        elsewhere="the trainers' bits: tests/training, tests/network",
    ),
    4: Invariant(
        "An unverified byte is loaded as weight, or an unauthenticated message changes state.",
        {
            "strangers are heard": Bug(Turn, "require_enrolled", always(None)),
            "who is no member speaks for a round": Bug(attestation, "_open_round", listen_to_anybody),
            "any lease will do": Bug(ledger, "_check_lease", always(None)),
        },
        elsewhere="bytes: tests/weights; signatures and certificates: tests/coordinator/test_submissions.py, "
        "test_join_service.py, test_control_service.py",
    ),
    5: Invariant(
        "A reward, advantage, weight, length or version claimed by a rollout node is used without recomputation or "
        "check.",
        {
            "any version is accepted": Bug(ledger, "_check_segments", lambda turn, event: turn.require_head().version),
            "a moved slot starts anew at will": Bug(ledger, "_check_prefix", always(None)),
            "a node speaks for the environment": Bug(ledger, "_check_given", always(None)),
            "the environment's words are learnt": Bug(shares, "live_mask", learn_all),
            "advantages are rewards": Bug(shares, "baseline", always((0.0, 1.0))),
        },
        elsewhere="lengths, ids and log-probabilities: tests/protocol, tests/coordinator/test_submissions.py; rewards "
        "come from the grader alone: tests/coordinator/test_grader.py",
    ),
    6: Invariant(
        "The books do not balance.",
        {
            "slots of late leases are forgotten": Bug(leases, "expire_leases", forget_leases),
            "moving a slot issues it again": Bug(apply, "_wait_again", issue_again),
            "rewards of pools are not counted": Bug(
                apply, "learn_reward", always(None), {"curriculum": Curriculum((1.0, 2.0))}
            ),
            "masked tokens are not counted": Bug(
                apply, "_count_trained", always(None), {"policy": "mask_tokens", "mode": "async"}
            ),
        },
    ),
    7: Invariant(
        "One slow, dead, lying or absent node stops the swarm.",
        {
            "useless trainers keep their seats": Bug(roster, "STRIKES_TO_FAIL", 10**9, {"curse": "unready"}),
            "a slot that nobody can fill is tried for ever": Bug(
                returns, "MAX_TRIES", 10**9, {"curse": "poison", "max_lag": 0}
            ),
            "equal rewards are filtered for ever": Bug(
                returns, "_may_filter", always(True), {"curse": "equal", "has_dynamic_sampling": True}
            ),
            "leases never end": Bug(leases, "expire_leases", always(None), {"curse": "idler", "max_lag": 0}),
        },
        elsewhere="real processes that die, stop and lie: tests/network, the demo with --chaos",
    ),
}
