"""What was received of one slot under way: its pieces as they came, and how far they go. Pure.

Invariants: pieces follow each other without a hole, from position 0, with versions that do not go backwards; each is
of the node that held the slot when it came, or the environment's, which only `adopt` and `reload` add. Signatures are
not checked when a piece comes (the caller is known by its connection), but before it is handed on to another node
(`checked_prefix`), and at acceptance.

The way of a piece into `Received` is hot: what is kept is the message's own bytes, and no token becomes an object.
"""

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from coordinator.core.state import Prefix
from protocol.errors import RolloutMalformedError
from protocol.ids import Digest, LeaseId, PeerId, SlotKey, Version
from protocol.keys import SIGNATURE_BYTES
from protocol.manifest import digest_of
from protocol.rollout import trouble_in, verify_pieces
from protocol.run import RunSpec
from protocol.v1 import common_pb2, control_pb2
from protocol.wire import rollout_of, slot_message

MAX_LOGPROB = 1e-3
MAX_PIECES = 1024
"""Of one slot. They all travel again with each node that goes on from them, so no more are taken; an honest node's are
a second or `piece_tokens` long each, and a slot that lasts longer than so many runs on without being moved further."""
MAX_OVERHEAD_BYTES = 256
"""Of a message, and of each piece in it, beside the tokens; more can only be fields that this program does not know."""

_PLAIN_TOPS = bytes([*range(0x3A), *range(0x80, 0xFF)])
"""First bytes (sign and most of the exponent) of float32 numbers that are finite and below 2**-11: of nearly all
log-probabilities, which need no second look then."""

_pack_counts = struct.Struct("<HqiI").pack


@dataclass(slots=True)
class Received:
    """One slot under one lease. `frames` are serialized `SlotProgress` messages, `edge` is the digest after the last
    piece in ASCII, `segments` are (version, number of tokens), `given` says where the environment's tokens are. A slot
    is `headless` where the pieces that it goes on from are not here: what follows them is of no use to anybody, and is
    not taken."""

    key: SlotKey
    lease_id: LeaseId
    edge: bytes
    headless: bool = False
    num_tokens: int = 0
    num_bytes: int = 0
    num_pieces: int = 0
    segments: list[tuple[Version, int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    is_news: bool = False
    _signer: str = ""
    _head: bytes = b""
    _last_id: bytes = b""

    @classmethod
    def of(cls, key: SlotKey, lease_id: LeaseId, *, headless: bool = False) -> "Received":
        """Nothing yet."""
        return cls(key, lease_id, digest_of(str(key).encode()).encode(), headless)

    def take(self, message: control_pb2.SlotProgress, peer_id: PeerId, *, spec: RunSpec, head: Version) -> bool:
        """Adds the pieces that follow what is here, and passes over those that are here already; True where the next
        one does not begin at `num_tokens`, so that it must be cut anew from there. What comes after `MAX_PIECES` is
        passed over too. Raises `RolloutMalformedError` on a bad piece; then nothing is added."""
        pieces = message.pieces
        if self.headless or not pieces:
            return False
        position, edge, signed_head = self.num_tokens, self.edge, self._head_of(peer_id)
        last_id, stop_ids, room = self._last_id, spec.sampling.stop_ids, MAX_PIECES - self.num_pieces
        newest: int = self.segments[-1][0] if self.segments else self.key.version
        added, taken = list[tuple[Version, int]](), list[common_pb2.Piece]()
        has_hole = False
        for piece in pieces:
            if len(taken) >= room:
                break
            ids, logprobs, start, version = piece.token_ids, piece.logprobs, piece.start, piece.version
            if start != position:
                if start + len(ids) // 4 <= position:
                    continue
                has_hole = True
                break
            if _ends_turn(last_id, stop_ids):
                raise _malformed(self.key, "a piece follows a stop id")
            num_tokens = _checked(self.key, piece, ids, logprobs, spec)
            if piece.node != peer_id or not newest <= version <= head:
                raise _malformed(self.key, "a piece is another node's, or of a version that it cannot have")
            edge = _edge_after(edge, signed_head, version, start, ids, logprobs)
            position, newest, last_id = position + num_tokens, version, ids[-4:]
            added.append((Version(version), num_tokens))
            taken.append(piece)
        if position > spec.sampling.max_new_tokens:
            raise _malformed(self.key, f"it has more than {spec.sampling.max_new_tokens} tokens")
        if taken:
            if len(taken) < len(pieces):
                message = control_pb2.SlotProgress(lease_id=message.lease_id, slot=message.slot, pieces=taken)
            self._keep(message.SerializeToString(), added, position, edge)
            self._last_id = last_id
        return has_hole

    def reload(self, message: control_pb2.SlotProgress, frame: bytes) -> None:
        """Adds what was taken before, by this or an earlier process; `frame` is the same message."""
        edge, added, position, last_id = self.edge, list[tuple[Version, int]](), self.num_tokens, self._last_id
        for piece in message.pieces:
            head = self._head_of(piece.node)
            edge = _edge_after(edge, head, piece.version, piece.start, piece.token_ids, piece.logprobs)
            added.append((Version(piece.version), len(piece.token_ids) // 4))
            if not piece.logprobs:
                self.given.append((piece.start, added[-1][1]))
            position += added[-1][1]
            last_id = piece.token_ids[-4:] if piece.logprobs else b""
        self._keep(frame, added, position, edge)
        self._last_id = last_id

    def adopt(self, pieces: Iterable[common_pb2.Piece]) -> bytes:
        """Adds pieces that came under an earlier lease; the frame that they make."""
        message = control_pb2.SlotProgress(lease_id=self.lease_id, slot=slot_message(self.key), pieces=pieces)
        frame = message.SerializeToString()
        self.reload(message, frame)
        return frame

    def is_over(self, spec: RunSpec) -> bool:
        """Whether nothing is left to sample after it: its node hands it in next, and nobody can go on from there."""
        contract = spec.sampling
        return self.num_tokens >= contract.max_new_tokens or _ends_turn(self._last_id, contract.stop_ids)

    def pieces(self) -> list[common_pb2.Piece]:
        """All of them."""
        return pieces_in(self.frames)

    def _keep(self, frame: bytes, added: list[tuple[Version, int]], num_tokens: int, edge: bytes) -> None:
        if len(frame) > MAX_OVERHEAD_BYTES * (1 + len(added)) + 8 * (num_tokens - self.num_tokens):
            raise _malformed(self.key, "its message is longer than its tokens can make it")
        segments = self.segments
        for version, length in added:
            if segments and segments[-1][0] == version:
                segments[-1] = (version, segments[-1][1] + length)
            else:
                segments.append((version, length))
        self.frames.append(frame)
        self.num_bytes += len(frame)
        self.num_pieces += len(added)
        self.num_tokens, self.edge = num_tokens, edge

    def _head_of(self, node: str) -> bytes:
        """The front of what a node signs for this slot."""
        if node != self._signer:
            self._signer, self._head = node, f"{self.key}|{node}".encode()
        return self._head


def pieces_in(frames: Iterable[bytes]) -> list[common_pb2.Piece]:
    """The pieces of serialized `SlotProgress` messages, in order."""
    return [piece for frame in frames for piece in control_pb2.SlotProgress.FromString(frame).pieces]


def prefix_in(frames: Iterable[bytes], slot: SlotKey, prefix: Prefix) -> list[common_pb2.Piece]:
    """The first pieces, up to the prefix's edge; none if no piece ends there."""
    edge, wanted, pieces = digest_of(str(slot).encode()).encode(), prefix.edge.encode(), list[common_pb2.Piece]()
    for piece in pieces_in(frames):
        head = f"{slot}|{piece.node}".encode()
        edge = _edge_after(edge, head, piece.version, piece.start, piece.token_ids, piece.logprobs)
        pieces.append(piece)
        if edge == wanted:
            return pieces
    return []


def checked_prefix(frames: Iterable[bytes], slot: SlotKey, prefix: Prefix, *, spec: RunSpec) -> list[common_pb2.Piece]:
    """The pieces of a prefix, each signed by the node that it names. Takes 0.2 ms a piece: call it in a thread.

    Raises `RolloutMalformedError` where they are not all here, leave nothing to sample, or are more than `MAX_PIECES`,
    `UnauthenticatedError` or `KeyRefusedError` where a signature does not hold.
    """
    pieces = prefix_in(frames, slot, prefix)
    if not pieces:
        raise _stuck(slot, "what was received of it is no longer here")
    if len(pieces) > MAX_PIECES:
        raise _stuck(slot, f"what was received of it has more than {MAX_PIECES} pieces")
    rollout = rollout_of(control_pb2.Rollout(slot=slot_message(slot), pieces=pieces, finish_reason="length"))
    if trouble := trouble_in(rollout.pieces, spec.sampling):
        raise _stuck(slot, f"of what was received of it, {trouble}")
    if rollout.pieces[-1].is_sampled and rollout.token_ids[-1] in spec.sampling.stop_ids:
        raise _stuck(slot, "what was received of it ends with a stop id")
    if len(rollout.token_ids) >= spec.sampling.max_new_tokens:
        raise _stuck(slot, "what was received of it is as long as a completion may be")
    verify_pieces(rollout, run_id=spec.run_id)
    return pieces


def _ends_turn(last_id: bytes, stop_ids: Sequence[int]) -> bool:
    return bool(last_id) and int.from_bytes(last_id, "little") in stop_ids


def _checked(key: SlotKey, piece: common_pb2.Piece, ids: bytes, logprobs: bytes, spec: RunSpec) -> int:
    """The number of tokens of a piece whose shape and range hold."""
    num_tokens = len(ids) // 4
    if not 0 < num_tokens <= spec.piece_tokens or len(ids) % 4 or len(ids) != len(logprobs):
        raise _malformed(key, f"a piece has no tokens, more than {spec.piece_tokens}, or lacks log-probabilities")
    token_ids = _unpacker(num_tokens, "I")(ids)
    if max(token_ids) >= spec.sampling.vocab_size:  # as unsigned, below 0 is very large
        raise _malformed(key, f"a token id is outside the vocabulary of {spec.sampling.vocab_size}")
    for stop_id in spec.sampling.stop_ids:
        if stop_id in token_ids and token_ids.index(stop_id) < num_tokens - 1:
            raise _malformed(key, "tokens follow a stop id")
    if logprobs[3::4].translate(None, _PLAIN_TOPS) and not _are_logprobs(_unpacker(num_tokens, "f")(logprobs)):
        raise _malformed(key, "a log-probability is positive or not finite")
    if len(piece.signature) != SIGNATURE_BYTES:
        raise _malformed(key, f"a signature has not {SIGNATURE_BYTES} bytes")
    return num_tokens


def _are_logprobs(values: Sequence[float]) -> bool:
    return math.isfinite(sum(values)) and max(values) <= MAX_LOGPROB  # NaN and infinity show in the sum


def _edge_after(edge: bytes, head: bytes, version: int, start: int, ids: bytes, logprobs: bytes) -> bytes:
    """The same as `protocol.rollout.edges_of` for one piece, without its tokens: from the bytes of the wire."""
    counts = _pack_counts(len(head), version, start, len(ids) // 4)
    return blake3(b"".join((edge, counts, head, ids, logprobs))).hexdigest().encode()


@functools.cache
def _unpacker(num_values: int, kind: str) -> Callable[[bytes], tuple[Any, ...]]:
    return struct.Struct(f"<{num_values}{kind}").unpack


def _malformed(key: SlotKey, why: str) -> RolloutMalformedError:
    return RolloutMalformedError(f"pieces of slot {key} were refused", why=why)


def _stuck(slot: SlotKey, why: str) -> RolloutMalformedError:
    return RolloutMalformedError(f"slot {slot} cannot go on", why=why)


def edge_digest(received: Received) -> Digest:
    """The digest after the last piece."""
    return Digest(received.edge.decode())
