"""A filled slot as it travels: pieces of tokens and log-probabilities, each signed by the node that sampled it. Pure.

Versions and nodes change only at the edge of a piece. A piece that nobody sampled is the environment's reply to the
turn before it: it has no log-probabilities, the coordinator signed it, and its version is that of the piece before.
What is signed is a fixed-width encoding of the values (`Piece.message`), so one meaning has one signature.
`check_rollout` is gate 2's shape and range check; it knows nothing of leases and versions, which are the coordinator
core's to judge, nor of who may sign what.
"""

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from protocol.errors import RolloutMalformedError
from protocol.ids import Digest, PeerId, RunId, SlotKey, Version
from protocol.keys import Identity, public_key_of, verify
from protocol.manifest import digest_of
from protocol.run import SamplingContract

FinishReason = Literal["stop", "length"]
Spans = tuple[tuple[int, int], ...]
"""Where the environment's tokens stand in a completion: (position of the first, how many)."""

KIND = "rollout-piece"
REMEDY = "Drop it: the slot goes to another node. Use the release of hexcomb that the coordinator runs."


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one slot, from one node and one version. `start` is the position of the first in the
    completion; `logprobs` are natural logs at temperature 1, rounded to float32 before signing; the environment's
    pieces have none."""

    node: PeerId
    version: Version
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    signature: bytes = b""
    _packed: tuple[bytes, bytes] | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def of_data(
        cls, node: PeerId, version: Version, start: int, data: tuple[bytes, bytes], signature: bytes
    ) -> "Piece":
        """The same from token ids and log-probabilities as they travel, which are kept beside the numbers: to check,
        sign and send a piece they are needed again and again. Raises `RolloutMalformedError`."""
        piece = cls(node, version, start, unpack_ids(data[0]), unpack_logprobs(data[1]), signature)
        object.__setattr__(piece, "_packed", data)
        return piece

    @property
    def data(self) -> tuple[bytes, bytes]:
        """Token ids (little-endian int32) and log-probabilities (float32) as they travel."""
        return self._packed or (pack_ids(self.token_ids), pack_logprobs(self.logprobs))

    @property
    def is_sampled(self) -> bool:
        """Whether a model sampled the tokens; else they are the environment's, and nothing is learnt from them."""
        return bool(self.logprobs)

    def message(self, slot: SlotKey) -> bytes:
        """The bytes under the signature."""
        head = f"{slot}|{self.node}".encode()
        counts = struct.pack("<HqiI", len(head), self.version, self.start, len(self.token_ids))
        return b"".join((counts, head, *self.data))


@dataclass(frozen=True, slots=True)
class Rollout:
    """All pieces of a slot, in order, and why sampling ended."""

    slot: SlotKey
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The completion."""
        if len(self.pieces) == 1:
            return self.pieces[0].token_ids
        return tuple(chain.from_iterable(piece.token_ids for piece in self.pieces))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probability of each sampled token of the completion."""
        if len(self.pieces) == 1:
            return self.pieces[0].logprobs
        return tuple(chain.from_iterable(piece.logprobs for piece in self.pieces))

    @property
    def given(self) -> Spans:
        """Where the environment's tokens are."""
        return tuple((piece.start, len(piece.token_ids)) for piece in self.pieces if not piece.is_sampled)

    @property
    def digest(self) -> Digest:
        """The same for the same tokens from the same versions in the same slot, whoever signed."""
        parts = [str(self.slot), self.finish_reason, *(f"{p.version}:{p.start}" for p in self.pieces)]
        data = [piece.data for piece in self.pieces]
        ids, logprobs = (ids for ids, _ in data), (logprobs for _, logprobs in data)
        return digest_of(b"".join(("|".join(parts).encode(), *ids, *logprobs)))


def pack_ids(token_ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def pack_logprobs(logprobs: tuple[float, ...]) -> bytes:
    """Log-probabilities as little-endian float32."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`. Raises `RolloutMalformedError`."""
    if len(data) % 4:
        raise RolloutMalformedError("token ids were refused", why="their bytes are not whole int32 values")
    return struct.unpack(f"<{len(data) // 4}i", data)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`. Raises `RolloutMalformedError`."""
    if len(data) % 4:
        raise RolloutMalformedError("log-probabilities were refused", why="their bytes are not whole float32 values")
    return struct.unpack(f"<{len(data) // 4}f", data)


def to_float32(values: tuple[float, ...]) -> tuple[float, ...]:
    """The values that survive the trip over the wire."""
    return tuple(array("f", values))


def sign_piece(identity: Identity, *, run_id: RunId, slot: SlotKey, piece: Piece) -> Piece:
    """The same piece, signed by the node that sampled it."""
    signature, data = identity.sign(kind=KIND, run_id=run_id, payload=piece.message(slot)), piece.data
    return Piece.of_data(piece.node, piece.version, piece.start, data, signature)


def verify_pieces(rollout: Rollout, *, run_id: RunId) -> None:
    """Raises `UnauthenticatedError` unless each piece is signed by the node that it names, `KeyRefusedError` where that
    name is no peer id; whether the signers have a place in the run is the caller's to check."""
    for piece in rollout.pieces:
        verify_piece(piece, slot=rollout.slot, run_id=run_id)


def verify_piece(piece: Piece, *, slot: SlotKey, run_id: RunId) -> None:
    """The same for one piece."""
    key = public_key_of(piece.node)
    verify(key, kind=KIND, run_id=run_id, payload=piece.message(slot), signature=piece.signature)


def edges_of(slot: SlotKey, pieces: Sequence[Piece], *, after: Digest | None = None) -> list[Digest]:
    """A digest for the edge after each piece, which binds all pieces up to there; `after` is the edge before the first
    of them (None = they begin the completion)."""
    edge, edges = after or digest_of(str(slot).encode()), list[Digest]()
    for piece in pieces:
        edge = digest_of(edge.encode() + piece.message(slot))
        edges.append(edge)
    return edges


def check_rollout(rollout: Rollout, contract: SamplingContract) -> None:
    """Raises `RolloutMalformedError` unless the rollout has the shape and range that the contract asks for."""

    def refuse(why: str) -> None:
        raise RolloutMalformedError(f"the rollout for slot {rollout.slot} was refused", why=why, remedy=REMEDY)

    if trouble := trouble_in(rollout.pieces, contract):
        refuse(trouble)
    token_ids, logprobs = rollout.token_ids, rollout.logprobs
    position = len(token_ids)
    if not 1 <= position <= contract.max_new_tokens:
        refuse(f"its length {position} is not between 1 and {contract.max_new_tokens}")
    if not rollout.pieces[-1].is_sampled:
        refuse("nobody sampled its last piece")
    if min(token_ids) < 0 or max(token_ids) >= contract.vocab_size:
        refuse(f"a token id is outside the vocabulary of {contract.vocab_size}")
    if not math.isfinite(sum(logprobs)) or max(logprobs) > 1e-3:  # a sum of float32 values does not overflow
        refuse("a log-probability is positive or not finite")
    expected = "stop" if token_ids[-1] in contract.stop_ids else "length"
    if rollout.finish_reason != expected or (expected == "length" and position != contract.max_new_tokens):
        refuse(f"its finish reason {rollout.finish_reason} does not fit its last token and length")


def trouble_in(pieces: Sequence[Piece], contract: SamplingContract) -> str:
    """Why no rollout can begin with these pieces, whoever signed them and whatever their range; "" where one can."""
    position, version, is_over, stop_ids = 0, pieces[0].version if pieces else 0, False, frozenset(contract.stop_ids)
    for piece in pieces:
        token_ids = piece.token_ids
        if piece.start != position or not token_ids or (piece.is_sampled and len(piece.logprobs) != len(token_ids)):
            return "its pieces leave a hole, overlap, are empty or lack log-probabilities"
        if piece.version < version:
            return "its versions go backwards"
        if not piece.is_sampled and not is_over:
            return "a piece without log-probabilities does not follow the end of a turn"
        if piece.is_sampled and (is_over or not stop_ids.isdisjoint(token_ids[:-1])):
            return "tokens follow a stop id"
        is_over = piece.is_sampled and token_ids[-1] in stop_ids
        position, version = position + len(token_ids), piece.version
    return ""
