"""Round plans: signed, of one run, and whatever else comes is a typed error; shards cover everything once."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RoundStaleError, UnauthenticatedError
from protocol.ids import PeerId, RoundId, RunId, Version
from protocol.keys import Identity
from protocol.manifest import digest_of
from protocol.round import KIND, Member, RoundPlan, Shard, SignedPlan, open_plan, sign_plan, split_evenly

COORDINATOR, STRANGER = Identity.from_seed(b"c" * 32), Identity.from_seed(b"x" * 32)
RUN_ID = RunId("ab" * 16)
PLAN = RoundPlan(
    run_id=RUN_ID,
    round_id=RoundId("3.0"),
    base_version=Version(3),
    base_root=digest_of(b"root"),
    members=(Member(PeerId("fox"), "host:1"), Member(PeerId("hen"), "[::1]:2")),
    shards=(Shard(PeerId("fox"), 0, 5), Shard(PeerId("hen"), 5, 9)),
    divisor=77,
    deadline_ms=1_700_000_000_000,
)


def opened(signed: SignedPlan) -> RoundPlan:
    return open_plan(signed, coordinator_key=COORDINATOR.public_bytes, run_id=RUN_ID)


def signed_as_it_is(payload: bytes) -> SignedPlan:
    return SignedPlan(payload, COORDINATOR.sign(kind=KIND, run_id=RUN_ID, payload=payload))


def test_a_plan_comes_back_as_it_was() -> None:
    assert opened(sign_plan(COORDINATOR, PLAN)) == PLAN


def test_a_plan_that_the_coordinator_did_not_sign_for_this_run_is_refused() -> None:
    signed = sign_plan(COORDINATOR, PLAN)
    other_kind = COORDINATOR.sign(kind="manifest", run_id=RUN_ID, payload=signed.payload)
    other_run = dataclasses.replace(PLAN, run_id=RunId("cd" * 16))
    for bad in (
        sign_plan(STRANGER, PLAN),
        sign_plan(COORDINATOR, other_run),
        signed_as_it_is(msgspec.msgpack.encode(other_run)),
        SignedPlan(signed.payload, bytes(64)),
        SignedPlan(signed.payload, b""),
        SignedPlan(signed.payload, other_kind),
        SignedPlan(signed.payload + b"\0", signed.signature),
        SignedPlan(b"", signed.signature),
    ):
        with pytest.raises(UnauthenticatedError):
            opened(bad)


def test_a_wire_that_is_not_known_is_refused_and_none_is_float32() -> None:
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(dataclasses.replace(PLAN, wire="bf16")))
    assert opened(signed_as_it_is(msgspec.msgpack.encode(content))).wire == "bf16"
    with pytest.raises(RoundStaleError, match="wire"):
        opened(signed_as_it_is(msgspec.msgpack.encode({**content, "wire": "f8"})))
    del content["wire"]
    assert opened(signed_as_it_is(msgspec.msgpack.encode(content))).wire == "f32"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_signed_garbage_is_a_typed_error(payload: bytes) -> None:
    with pytest.raises(RoundStaleError, match="cannot be read"):
        opened(signed_as_it_is(payload))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_plan_under_a_good_signature_is_a_plan_or_a_typed_error(data: st.DataObject) -> None:
    payload = bytearray(msgspec.msgpack.encode(PLAN))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=5))
    try:
        plan = opened(signed_as_it_is(bytes(payload)))
    except (RoundStaleError, UnauthenticatedError):
        return
    assert plan.run_id == RUN_ID


def test_deep_nesting_and_bad_text_are_typed_errors() -> None:
    for payload in (b"\x91" * 100_000, b"\x81\xa7members" + b"\x91" * 100_000, b"\x81\xa6run_id\xa2\xff\xfe"):
        with pytest.raises(RoundStaleError):
            opened(signed_as_it_is(payload))


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_shards_cover_every_element_once_and_evenly(num_elements: int, num_owners: int) -> None:
    owners = tuple(PeerId(f"p{index}") for index in range(num_owners))
    shards = split_evenly(num_elements, owners)
    assert tuple(shard.owner for shard in shards) == owners
    assert (shards[0].start, shards[-1].stop) == (0, num_elements)
    assert all(left.stop == right.start for left, right in itertools.pairwise(shards))
    sizes = {shard.stop - shard.start for shard in shards}
    assert max(sizes) - min(sizes) <= 1
