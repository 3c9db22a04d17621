"""One slot's pieces: digests from the bytes of the wire, and prefixes that hold or go to nobody."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import received as received_module
from coordinator.core.state import Prefix
from coordinator.received import Received, checked_prefix
from protocol.errors import HexcombError, RolloutMalformedError, UnauthenticatedError
from protocol.ids import Version
from protocol.rollout import Piece, edges_of, to_float32
from protocol.wire import piece_message
from tests.coordinator.desk import FOX, SLOT, SPEC, THREE, A, piece, prefix_of, progress_of


@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=6),
    versions=st.lists(st.integers(1, 2**40), min_size=6, max_size=6),
    seed=st.integers(0, 2**31 - 1),
)
def test_edges_from_the_bytes_of_the_wire_are_those_of_the_pieces(
    lengths: list[int], versions: list[int], seed: int
) -> None:
    pieces, start = list[Piece](), 0
    for length, version in zip(lengths, sorted(versions), strict=False):
        ids = tuple(2 + (seed + start + n) % 998 for n in range(length))  # 1 is the stop id
        logprobs = to_float32(tuple(-1.0 / (1 + n + seed) for n in range(length)))
        pieces.append(Piece(FOX.peer_id, Version(version), start, ids, logprobs, b"s" * 64))
        start += length
    spec = replace(SPEC, sampling=replace(SPEC.sampling, max_new_tokens=10_000))
    at_once, one_by_one = Received.of(SLOT, A), Received.of(SLOT, A)
    at_once.take(progress_of(*pieces), FOX.peer_id, spec=spec, head=Version(2**41))
    for each in pieces:
        one_by_one.take(progress_of(each), FOX.peer_id, spec=spec, head=Version(2**41))
    assert at_once.edge.decode() == one_by_one.edge.decode() == edges_of(SLOT, pieces)[-1]
    assert at_once.segments == one_by_one.segments
    assert sum(length for _, length in at_once.segments) == at_once.num_tokens == start
    assert [version for version, _ in at_once.segments] == sorted({each.version for each in pieces})


def long_pieces(num_tokens: int, length: int) -> tuple[Piece, ...]:
    return tuple(piece(start, *[5] * length) for start in range(0, num_tokens, length))


def test_a_prefix_that_does_not_hold_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = (piece(0, 5, 1), piece(2, 7))
    ended, whole, tiny = (piece(0, 5, 1),), long_pieces(100, 4), long_pieces(50, 1)
    monkeypatch.setattr(received_module, "MAX_PIECES", 49)
    forged = replace(THREE[1], signature=bytes(64))
    cases: dict[str, tuple[tuple[Piece, ...], Prefix, type[HexcombError], str]] = {
        "nothing is here": ((), prefix_of(*THREE), RolloutMalformedError, "no longer here"),
        "its end is missing": (THREE[:2], prefix_of(*THREE), RolloutMalformedError, "no longer here"),
        "another prefix": (THREE, prefix_of(piece(0, 5)), RolloutMalformedError, "no longer here"),
        "forged": ((THREE[0], forged), prefix_of(THREE[0], forged), UnauthenticatedError, "not one of"),
        "after a stop id": (stopped, prefix_of(*stopped), RolloutMalformedError, "tokens follow a stop id"),
        "at its stop id": (ended, prefix_of(*ended), RolloutMalformedError, "ends with a stop id"),
        "nothing is left to sample": (whole, prefix_of(*whole), RolloutMalformedError, "as long as"),
        "too many pieces": (tiny, prefix_of(*tiny), RolloutMalformedError, "more than 49 pieces"),
    }
    for name, (pieces, prefix, kind, match) in cases.items():
        frames = [progress_of(each).SerializeToString() for each in pieces]
        with pytest.raises(HexcombError, match=match) as caught:
            checked_prefix(frames, SLOT, prefix, spec=SPEC)
        assert type(caught.value) is kind, name
    frames = [progress_of(*THREE).SerializeToString()]
    assert checked_prefix(frames, SLOT, prefix_of(*THREE[:2]), spec=SPEC) == [piece_message(each) for each in THREE[:2]]
    almost = long_pieces(98, 2)
    frames = [progress_of(*almost).SerializeToString()]
    assert len(checked_prefix(frames, SLOT, prefix_of(*almost), spec=SPEC)) == 49
