"""Rollouts: signatures bind every value, and gate 2's shape check lets through exactly what the contract allows."""

import dataclasses
import math
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import KeyRefusedError, RolloutMalformedError, UnauthenticatedError
from protocol.ids import PeerId, RunId, SlotKey, TaskKey, Version
from protocol.keys import Identity
from protocol.rollout import (
    FinishReason,
    Piece,
    Rollout,
    check_rollout,
    pack_ids,
    pack_logprobs,
    sign_piece,
    to_float32,
    unpack_ids,
    unpack_logprobs,
    verify_pieces,
)
from protocol.run import SamplingContract

FOX, HEN = Identity.from_seed(b"f" * 32), Identity.from_seed(b"h" * 32)
RUN_ID = RunId("ab" * 16)
SLOT = SlotKey(Version(2), TaskKey("sums", 7, 5), 1)
CONTRACT = SamplingContract(1.0, 6, (1, 2), 64)
STOP, LENGTH = "stop", "length"


def piece(start: int, ids: tuple[int, ...], *, version: int = 2, logprobs: tuple[float, ...] | None = None) -> Piece:
    return Piece(FOX.peer_id, Version(version), start, ids, (-0.1,) * len(ids) if logprobs is None else logprobs)


def rollout(*pieces: Piece, reason: Any = STOP) -> Rollout:
    return Rollout(SLOT, pieces, reason)


GOOD: dict[str, Rollout] = {
    "one token": rollout(piece(0, (1,))),
    "stopped": rollout(piece(0, (7, 8, 2))),
    "stopped at the cap": rollout(piece(0, (7,) * 5 + (1,))),
    "at the cap": rollout(piece(0, (0, 63, 7, 7, 7, 7)), reason=LENGTH),
    "two versions": rollout(piece(0, (7, 8)), piece(2, (9, 1), version=3)),
    "one version twice": rollout(piece(0, (7, 8)), piece(2, (9, 1))),
    "versions skipped": rollout(piece(0, (7,)), piece(1, (1,), version=99)),
    "certain tokens": rollout(piece(0, (7, 1), logprobs=(0.0, 9e-4))),
    "unlikely tokens": rollout(piece(0, (7, 1), logprobs=(-1e30, -88.0))),
    "two turns": rollout(piece(0, (7, 1)), piece(2, (8, 1, 9), logprobs=()), piece(5, (1,))),
    "a second turn to the cap": rollout(piece(0, (1,)), piece(1, (8,), logprobs=()), piece(2, (7,) * 4), reason=LENGTH),
}
BAD: dict[str, Rollout] = {
    "no pieces": rollout(),
    "an empty piece": rollout(piece(0, ())),
    "an empty piece behind": rollout(piece(0, (7, 1)), piece(2, ())),
    "a hole": rollout(piece(0, (7,)), piece(2, (1,))),
    "an overlap": rollout(piece(0, (7, 8)), piece(1, (1,))),
    "a late start": rollout(piece(1, (7, 1))),
    "a negative start": rollout(piece(-1, (7, 1))),
    "pieces in the wrong order": rollout(piece(1, (1,)), piece(0, (7,))),
    "versions backwards": rollout(piece(0, (7,), version=3), piece(1, (1,), version=2)),
    "log-probabilities missing": rollout(piece(0, (7, 1), logprobs=(-0.1,))),
    "log-probabilities too many": rollout(piece(0, (7, 1), logprobs=(-0.1,) * 3)),
    "over the cap": rollout(piece(0, (7,) * 6 + (1,))),
    "over the cap in pieces": rollout(piece(0, (7,) * 4), piece(4, (7, 7, 1))),
    "token -1": rollout(piece(0, (-1, 1))),
    "token V": rollout(piece(0, (64, 1))),
    "token 2^31-1": rollout(piece(0, (2**31 - 1, 1))),
    "token -2^31": rollout(piece(0, (-(2**31), 1))),
    "positive log-probability": rollout(piece(0, (7, 1), logprobs=(-0.1, 0.01))),
    "NaN": rollout(piece(0, (7, 1), logprobs=(math.nan, -0.1))),
    "-inf": rollout(piece(0, (7, 1), logprobs=(-math.inf, -0.1))),
    "+inf": rollout(piece(0, (7, 1), logprobs=(math.inf, -0.1))),
    "tokens after a stop id": rollout(piece(0, (7, 1, 8, 2))),
    "two stop ids": rollout(piece(0, (7, 1, 1))),
    "a stop id at the edge of a piece": rollout(piece(0, (7, 1)), piece(2, (8, 1))),
    "a reply at the front": rollout(piece(0, (8,), logprobs=()), piece(1, (7, 1))),
    "a reply in the middle of a turn": rollout(piece(0, (7,)), piece(1, (8,), logprobs=()), piece(2, (1,))),
    "a reply at the end": rollout(piece(0, (7, 1)), piece(2, (8, 1), logprobs=())),
    "two replies": rollout(piece(0, (7, 1)), piece(2, (8,), logprobs=()), piece(3, (8,), logprobs=()), piece(4, (1,))),
    "a reply outside the vocabulary": rollout(piece(0, (7, 1)), piece(2, (64,), logprobs=()), piece(3, (1,))),
    "a reply over the cap": rollout(piece(0, (7, 1)), piece(2, (8,) * 4, logprobs=()), piece(6, (1,))),
    "a reply of an older version": rollout(
        piece(0, (7, 1), version=3), piece(2, (8,), logprobs=(), version=2), piece(3, (1,), version=3)
    ),
    "two stop ids after a reply": rollout(piece(0, (7, 1)), piece(2, (8,), logprobs=()), piece(3, (1, 1))),
    "stop without a stop id": rollout(piece(0, (7, 8))),
    "stop at the cap without a stop id": rollout(piece(0, (7,) * 6)),
    "length with a stop id": rollout(piece(0, (7, 1)), reason=LENGTH),
    "length with a stop id at the cap": rollout(piece(0, (7,) * 5 + (1,)), reason=LENGTH),
    "length below the cap": rollout(piece(0, (7, 8)), reason=LENGTH),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_the_contract_allows_passes(name: str) -> None:
    check_rollout(GOOD[name], CONTRACT)


@pytest.mark.parametrize("name", BAD)
def test_what_it_does_not_allow_is_refused_with_reason_and_remedy(name: str) -> None:
    with pytest.raises(RolloutMalformedError) as caught:
        check_rollout(BAD[name], CONTRACT)
    assert caught.value.why
    assert "Drop it" in caught.value.remedy


ids = st.integers(-2, 66) | st.sampled_from([2**31 - 1, -(2**31)])
logprobs = st.floats(max_value=0.0078125, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.5])
pieces = st.builds(
    Piece,
    node=st.just(FOX.peer_id),
    version=st.integers(-1, 4).map(Version),
    start=st.integers(-1, 7),
    token_ids=st.lists(ids, max_size=7).map(tuple),
    logprobs=st.lists(logprobs, max_size=7).map(tuple),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(pieces, max_size=4), st.sampled_from([STOP, LENGTH]))
def test_the_check_raises_nothing_else_and_what_passes_is_sound(
    given_pieces: list[Piece], reason: FinishReason
) -> None:
    candidate = Rollout(SLOT, tuple(given_pieces), reason)
    try:
        check_rollout(candidate, CONTRACT)
    except RolloutMalformedError:
        return
    tokens, num_given = candidate.token_ids, sum(length for _, length in candidate.given)
    assert 1 <= len(tokens) == len(candidate.logprobs) + num_given <= CONTRACT.max_new_tokens
    assert all(0 <= token < CONTRACT.vocab_size for token in tokens)
    assert all(math.isfinite(value) and value <= 1e-3 for value in candidate.logprobs)
    for piece_, after in pairwise(candidate.pieces):
        ends_turn = piece_.is_sampled and piece_.token_ids[-1] in CONTRACT.stop_ids
        assert ends_turn == (not after.is_sampled)
    assert (tokens[-1] in CONTRACT.stop_ids) == (reason == STOP)
    assert reason == STOP or len(tokens) == CONTRACT.max_new_tokens


# Bytes


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50).map(tuple))
def test_token_ids_come_back(token_ids: tuple[int, ...]) -> None:
    assert unpack_ids(pack_ids(token_ids)) == token_ids


@given(st.lists(st.floats(allow_nan=False, width=32), max_size=50).map(tuple))
def test_log_probabilities_come_back(values: tuple[float, ...]) -> None:
    assert unpack_logprobs(pack_logprobs(values)) == values == to_float32(values)


@given(st.binary(max_size=50))
def test_any_bytes_are_numbers_or_the_typed_error(data: bytes) -> None:
    for unpack, pack in ((unpack_ids, pack_ids), (unpack_logprobs, pack_logprobs)):
        if len(data) % 4:
            with pytest.raises(RolloutMalformedError):
                unpack(data)
        else:
            values = unpack(data)
            assert len(values) * 4 == len(data)
            assert any(isinstance(v, float) and math.isnan(v) for v in values) or pack(values) == data  # type: ignore[arg-type]


# Signatures


def signed(base: Rollout = GOOD["two versions"], *, by: Identity = FOX) -> Rollout:
    return Rollout(
        base.slot,
        tuple(sign_piece(by, run_id=RUN_ID, slot=base.slot, piece=part) for part in base.pieces),
        base.finish_reason,
    )


def test_a_signed_rollout_verifies_and_its_numbers_are_rounded_first() -> None:
    verify_pieces(signed(), run_id=RUN_ID)
    exact = rollout(piece(0, (7, 1), logprobs=(-1 / 3, -0.1)))
    rounded = signed(exact)
    assert rounded.logprobs == struct.unpack("<2f", struct.pack("<2f", -1 / 3, -0.1))
    verify_pieces(rounded, run_id=RUN_ID)


def altered(good: Rollout, **changes: Any) -> Rollout:
    first = dataclasses.replace(good.pieces[0], **changes)
    return dataclasses.replace(good, pieces=(first, *good.pieces[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (7, 9)},
        {"logprobs": to_float32((-0.1, -0.2))},
        {"version": 1},
        {"start": 1},
        {"node": HEN.peer_id},
        {"signature": bytes(64)},
        {"signature": b""},
        {"signature": bytes(63)},
        {"signature": bytes(65)},
        {"token_ids": (7,), "logprobs": to_float32((-0.1,))},
        {"token_ids": (7, 8, struct.unpack("<i", struct.pack("<f", -0.1))[0]), "logprobs": to_float32((-0.1,))},
    ],
    ids=str,
)
def test_every_value_is_under_the_signature(changes: dict[str, Any]) -> None:
    with pytest.raises(UnauthenticatedError):
        verify_pieces(altered(signed(), **changes), run_id=RUN_ID)


def test_a_signature_is_for_one_slot_and_one_run() -> None:
    good = signed()
    for slot in (
        dataclasses.replace(SLOT, sample=2),
        dataclasses.replace(SLOT, version=Version(1)),
        dataclasses.replace(SLOT, task=TaskKey("sums", 7, 6)),
        dataclasses.replace(SLOT, task=TaskKey("sums", 8, 5)),
        dataclasses.replace(SLOT, task=TaskKey("sum", 7, 5)),
    ):
        with pytest.raises(UnauthenticatedError):
            verify_pieces(dataclasses.replace(good, slot=slot), run_id=RUN_ID)
    with pytest.raises(UnauthenticatedError):
        verify_pieces(good, run_id=RunId("cd" * 16))


def test_pieces_are_each_their_signers() -> None:
    mixed = Rollout(SLOT, (signed().pieces[0], signed(by=HEN).pieces[1]), STOP)
    with pytest.raises(UnauthenticatedError):  # Hen signed, and it names Fox
        verify_pieces(mixed, run_id=RUN_ID)
    own = dataclasses.replace(GOOD["two versions"].pieces[1], node=HEN.peer_id)
    own = sign_piece(HEN, run_id=RUN_ID, slot=SLOT, piece=own)
    verify_pieces(Rollout(SLOT, (signed().pieces[0], own), STOP), run_id=RUN_ID)


@given(st.text(max_size=80))
def test_a_name_that_is_no_peer_id_is_a_refused_key(name: str) -> None:
    with pytest.raises((KeyRefusedError, UnauthenticatedError)):
        verify_pieces(altered(signed(), node=PeerId(name)), run_id=RUN_ID)


def test_the_digest_is_of_the_content_whoever_signed() -> None:
    good = signed()
    assert good.digest == signed(by=HEN).digest == GOOD["two versions"].digest
    others = [altered(good, token_ids=(7, 9)), altered(good, version=1), altered(good, logprobs=(0.0, 0.0))]
    others += [dataclasses.replace(good, finish_reason=LENGTH), signed(GOOD["one version twice"])]
    others += [dataclasses.replace(good, slot=dataclasses.replace(SLOT, sample=2))]
    assert len({good.digest, *(other.digest for other in others)}) == 7
