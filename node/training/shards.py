"""What the owner of a shard does with the parts that members send: check, add, divide, measure. Pure
(numpy).

Invariants: a part enters only whole, in order, finite and of the declared length; parts are added in
float64 in the plan's member order, divided by the plan's divisor there, and rounded once to what the wire
carries, so that the average hangs neither on the order of arrival nor on how the batch was split (to about
1e-7 in float32);
nothing a sender says about its own weight is read.

Shape letters: S elements of one shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from node.training.optimizer import BLOCK_ELEMENTS, OptimizerState, Vector, digest_of_vectors
from node.training.wire import ITEM_BYTES, round_in_place, unpack
from protocol.errors import EngineError, PartConflictError, PartRefusedError, RootMismatchError, RoundStaleError
from protocol.ids import Digest, PeerId, RoundId, Version
from protocol.round import RoundPlan
from protocol.run import Wire

NORM_TOLERANCE = 1e-6
WEIGHT_TOLERANCE, RATE_TOLERANCE, MOMENT_TOLERANCE = 1e-6, 1e-2, 1e-4


@dataclass(frozen=True, slots=True)
class Average:
    """A shard of the averaged gradient, and the sum of the squares of its elements in float64."""

    gradient_S: Vector
    squared_norm: float


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard's new weights and moments, and the digest of the three."""

    state: OptimizerState
    digest: Digest


class PartIntake:
    """One member's part of one shard as it arrives: `num_elements` values as `wire` says, without holes."""

    def __init__(self, num_elements: int, wire: Wire, *, sender: PeerId) -> None:
        self.sender = sender
        self._wire, self._item_bytes = wire, ITEM_BYTES[wire]
        self._part_S = np.empty(num_elements, np.float32)
        self._num_bytes = num_elements * self._item_bytes
        self._position = 0
        self._is_open = True

    def write(self, offset: int, data: bytes) -> None:
        """Takes the next bytes.

        Raises `PartRefusedError` on a hole, too many bytes, or a value that is not finite.
        """
        self._check_open()
        if offset != self._position or len(data) % self._item_bytes:
            self._refuse(f"bytes {offset} to {offset + len(data)} do not follow byte {self._position}")
        if offset + len(data) > self._num_bytes:
            self._refuse(f"it is longer than the {self._num_bytes} bytes of the shard as {self._wire}")
        values = unpack(data, self._wire)
        if not np.isfinite(values).all():
            self._refuse("a value in it is not finite")
        start = offset // self._item_bytes
        self._part_S[start : start + len(values)] = values
        self._position += len(data)

    def finish(self) -> Vector:
        """The whole part, once. Raises `PartRefusedError` if it is shorter than the shard."""
        self._check_open()
        if self._position != self._num_bytes:
            self._refuse(f"it ended after {self._position} of {self._num_bytes} bytes as {self._wire}")
        self._is_open = False
        return self._drain()

    def supersede(self) -> None:
        """Gives way to a second attempt of the sender. Raises `PartConflictError` if the part was whole."""
        self._check_open()
        self._is_open = False
        self._drain()

    def _drain(self) -> Vector:
        part_S, self._part_S = self._part_S, np.empty(0, np.float32)
        return part_S

    def _check_open(self) -> None:
        if not self._is_open:
            raise PartConflictError(f"the part of {self.sender} is here already, or comes by another call")

    def _refuse(self, why: str) -> NoReturn:
        raise PartRefusedError(f"the part of {self.sender} was refused", why=why)


def reduce_parts(parts: Sequence[Vector], *, divisor: int, wire: Wire = "f32") -> Average:
    """The sum of the members' parts over `divisor`, rounded to what the wire carries. Raises `EngineError` if it
    is not finite then.
    """
    average_S = np.empty(len(parts[0]), np.float32)
    totals = np.empty(min(BLOCK_ELEMENTS, len(average_S)), np.float64)
    with np.errstate(over="ignore"):
        for start in range(0, len(average_S), BLOCK_ELEMENTS):
            where = slice(start, start + BLOCK_ELEMENTS)
            block_S = average_S[where]
            total_S = totals[: len(block_S)]
            total_S[:] = parts[0][where]
            for part in parts[1:]:
                total_S += part[where]
            total_S /= divisor
            block_S[:] = total_S
            round_in_place(block_S, wire)
    squared_norm = _squared_norm(average_S)
    if not math.isfinite(squared_norm):
        raise EngineError("the averaged gradient is not finite", why=f"its sum is out of the range of {wire}")
    return Average(average_S, squared_norm)


def check_average(average: Average) -> None:
    """Raises `PartRefusedError` unless what an owner sent is finite and has the norm that it says."""
    expected = _squared_norm(average.gradient_S)
    if not math.isfinite(expected) or not math.isfinite(average.squared_norm):
        raise PartRefusedError("an average was refused", why="it is not finite")
    if abs(average.squared_norm - expected) > NORM_TOLERANCE * expected + 1e-30:
        raise PartRefusedError("an average was refused", why="its norm is not the one that its owner says")


def shard_state(state: OptimizerState, where: slice) -> ShardState:
    """The part of a state that lies in a shard, named."""
    part = OptimizerState(state.weights_P[where], state.first_P[where], state.second_P[where])
    return ShardState(part, digest_of_vectors(part.weights_P, part.first_P, part.second_P))


def check_state(theirs: ShardState, mine: OptimizerState, *, rate: float) -> None:
    """Raises `PartRefusedError` unless the owner's state is its digest's, and mine but for rounding.

    The owner's bytes win; this guards against an owner that would put other weights in their place. `rate`
    is the learning rate, against which differences of weights are measured.
    """
    state = theirs.state
    if digest_of_vectors(state.weights_P, state.first_P, state.second_P) != theirs.digest:
        raise PartRefusedError("a shard's state was refused", why="its bytes do not have the digest announced")
    limits = (
        (state.weights_P, mine.weights_P, WEIGHT_TOLERANCE, rate * RATE_TOLERANCE),
        (state.first_P, mine.first_P, MOMENT_TOLERANCE, _scale(mine.first_P) * MOMENT_TOLERANCE),
        (state.second_P, mine.second_P, MOMENT_TOLERANCE, _scale(mine.second_P) * MOMENT_TOLERANCE),
    )
    if not all(np.allclose(a, b, rtol=relative, atol=absolute) for a, b, relative, absolute in limits):
        raise PartRefusedError("a shard's state was refused", why="it is not what the averages lead to")


def check_plan(plan: RoundPlan, *, me: PeerId, version: Version, root: Digest, num_elements: int) -> tuple[int, int]:
    """The round's place in the order of rounds, once the plan fits this trainer and is sound in itself.

    Raises `RootMismatchError` if it builds on other weights than those in force, `RoundStaleError` otherwise.
    """
    if (plan.base_version, plan.base_root) != (version, root):
        raise RootMismatchError(
            f"round {plan.round_id} builds on version {plan.base_version}",
            why=f"version {version} or another content of it is in force here",
        )
    members = [member.peer_id for member in plan.members]
    bounds = [(shard.start, shard.stop) for shard in plan.shards]
    ends = [0, *(stop for _, stop in bounds)]
    is_whole = all(start == end <= stop for (start, stop), end in zip(bounds, ends, strict=False))
    problems = {
        "this trainer is no member of it": me not in members,
        "it names a member twice": len(set(members)) != len(members),
        "its shards do not cover the parameters": not is_whole or ends[-1] != num_elements,
        "a shard's owner is no member": any(shard.owner not in members for shard in plan.shards),
        "its divisor is not positive": plan.divisor < 1,
    }
    for why, is_wrong in problems.items():
        if is_wrong:
            raise RoundStaleError(f"round {plan.round_id} was refused", why=why)
    return round_order(plan.round_id)


def round_order(round_id: RoundId) -> tuple[int, int]:
    """Base version and attempt. Raises `RoundStaleError` on a name that is not of a round."""
    base, _, attempt = round_id.partition(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (base, attempt)):
        raise RoundStaleError(f"{round_id[:40]!a} is not the name of a round")
    return int(base), int(attempt)


def _squared_norm(values_S: Vector) -> float:
    """In float64, where no sum of squares of float32 values overflows: it is finite where all of them are."""
    squared_norm, wide = 0.0, np.empty(min(BLOCK_ELEMENTS, len(values_S)), np.float64)
    for start in range(0, len(values_S), BLOCK_ELEMENTS):
        block_S = values_S[start : start + BLOCK_ELEMENTS]
        wide_S = wide[: len(block_S)]
        wide_S[:] = block_S
        squared_norm += float(np.dot(wide_S, wide_S))
    return squared_norm


def _scale(values: Vector) -> float:
    return float(np.abs(values).max(initial=0.0))
