"""Gate 3, rounds and versions: what is trained on, by whom, and what becomes of attempts that fail."""

from dataclasses import replace

import pytest

from coordinator.core import events as e
from coordinator.core import rounds
from coordinator.core.books import check
from coordinator.core.effects import AbortRound, AnnounceVersion, SendPlan
from coordinator.core.facts import RoundAborted, RoundSealed, VersionCommitted
from coordinator.core.state import encode_state
from protocol.errors import HexcombError, ManifestRefusedError, NotEnrolledError, RoundStaleError
from protocol.ids import PeerId, RoundId, Version
from protocol.round import Member, Shard
from tests.coordinator.world import BASE, World, make_body, make_rules


def started(*, trainers: int = 2, **changes: object) -> World:
    """A swarm with a sealed round 0.0."""
    world = World(make_rules(**changes))
    world.start(trainers=trainers)
    world.fill_batch()
    return world


def aborts(world: World) -> list[tuple[str, str, tuple[str, ...]]]:
    """(round, reason, suspects) of all aborts."""
    found = [fact for fact in world.facts if isinstance(fact, RoundAborted)]
    return [(fact.round_id, fact.reason, fact.suspects) for fact in found]


def members(world: World) -> tuple[str, ...]:
    """Of the open round."""
    return world.core.state.round.peer_ids if world.core.state.round else ()


def test_a_batch_is_cut_from_the_oldest_complete_groups() -> None:
    world = started()
    (sealed,) = [fact for fact in world.facts if isinstance(fact, RoundSealed)]
    assert (sealed.round_id, sealed.groups, sealed.num_tokens) == ("0.0", (0, 1), 16)
    assert sealed.members == (Member(PeerId("t0"), "t0:1"), Member(PeerId("t1"), "t1:1"))
    assert sealed.shards == (Shard(PeerId("t0"), 0, 4), Shard(PeerId("t1"), 4, 8))
    assert [len(keys) for _, keys in sealed.shares] == [2, 2]
    assert sealed.deadline_ms == world.now_ms + 30_000
    (plan,) = world.asked(SendPlan)
    assert isinstance(plan, SendPlan)
    assert (plan.round_id, plan.divisor, plan.remaining_s) == ("0.0", 16, 30.0)


def test_equal_bodies_make_a_version_and_train_its_slots_once() -> None:
    world = started()
    body = world.next_body()
    assert world.attest("t0").facts == ()
    decision = world.attest("t1")
    (committed,) = [fact for fact in decision.facts if isinstance(fact, VersionCommitted)]
    assert (committed.version, committed.root, committed.round_id) == (1, body.root, "0.0")
    assert committed.metrics["loss"] == 1.0
    assert committed.metrics["reward"] == 0.5
    assert decision.effects == (AnnounceVersion(Version(1), body),)
    assert world.core.books().trained == 4
    repeated = e.VersionAttested(PeerId("t1"), RoundId("0.0"), body, {})
    assert world.do(repeated).facts == (), "whoever missed the answer hears the same again"
    assert [node.num_trained for node in world.core.state.nodes.values()] == [0, 0, 4]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((-1.0, -2.0), (-1.0, -2.0), (-1.0, -2.0)),
        ((-1.0, -2.0), (-1.0001, -2.0), (-1.0, -2.0)),  # other machines, other last bits
        ((-1.0, -2.0), (), (-1.0, -2.0)),
        ((), (-1.0, -2.0), (-1.0, -2.0)),
        ((-1.0, -2.0), (-1.0, -2.1), ()),  # one of them is wrong, and nobody knows which
        ((-1.0, -2.0), (-1.0,), ()),
        ((), (), ()),
    ],
)
def test_a_version_carries_the_canary_that_its_trainers_agree_on(
    first: tuple[float, ...], second: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    world = started()
    body = world.next_body()
    for name, canary in (("t0", first), ("t1", second)):
        decision = world.do(e.VersionAttested(PeerId(name), RoundId("0.0"), body, {}, canary))
    (committed,) = [fact for fact in decision.facts if isinstance(fact, VersionCommitted)]
    assert committed.canary == expected


def test_wrong_bodies_are_refused() -> None:
    world = started()
    head = world.core.state.head
    assert head is not None
    before = encode_state(world.core.state)
    root = head.root
    good = make_body(1, parent=root)
    wrong = [
        make_body(2, parent=root),
        make_body(1, parent=good.root),
        make_body(0, parent=None),
    ]
    for body in wrong:
        with pytest.raises(ManifestRefusedError):
            world.do(e.VersionAttested(PeerId("t0"), world.round_id, body, {}))
    refused: list[tuple[str, str, type[HexcombError]]] = [
        ("r0", "0.0", NotEnrolledError),
        ("t0", "0.1", RoundStaleError),
    ]
    for name, round_id, error in refused:
        with pytest.raises(error):
            world.do(e.VersionAttested(PeerId(name), RoundId(round_id), good, {}))
    assert encode_state(world.core.state) == before


def test_unequal_bodies_make_no_version() -> None:
    world = started()
    world.attest("t0")
    world.attest("t1", salt="other")
    assert aborts(world) == [("0.0", "DIVERGED", ())]
    assert (world.core.state.num_diverged, world.round_id) == (1, "0.1")
    assert world.core.books().in_round == 4
    assert isinstance(world.asked(AbortRound)[0], AbortRound)
    world.finish_round()
    assert world.core.books().trained == 4


def test_a_minority_is_left_out() -> None:
    world = started(trainers=3)
    for name, salt in (("t0", ""), ("t1", "lie"), ("t2", "")):
        world.attest(name, salt=salt)
    assert aborts(world) == [("0.0", "DIVERGED", ("t1",))]
    assert members(world) == ("t0", "t2")


def test_a_pair_that_never_agrees_does_not_stop_the_run() -> None:
    world = started()
    for _ in range(2):
        world.attest("t0")
        world.attest("t1", salt="lie")
    assert [suspects for _, _, suspects in aborts(world)] == [(), ("t0",)]
    assert members(world) == ("t1",)
    world.attest("t1")
    assert world.core.state.head is not None
    assert world.core.state.head.version == 1
    world.see_all()
    world.fill_batch()
    assert members(world) == ("t0", "t1"), "suspicion ends with the version"


def test_failed_round_goes_on_without_the_suspects_with_the_same_slots() -> None:
    world = started(trainers=3)
    shared = {key for _, keys in world.core.state.round.shares for key in keys} if world.core.state.round else set()
    world.do(e.RoundFailed(PeerId("t0"), world.round_id, (PeerId("t2"), PeerId("x"), PeerId("t0")), "no part"))
    assert aborts(world) == [("0.0", "FAILED", ("t2",))]
    assert (world.round_id, members(world)) == ("0.1", ("t0", "t1"))
    assert world.core.state.round is not None
    assert {key for _, keys in world.core.state.round.shares for key in keys} == shared
    with pytest.raises(RoundStaleError):
        world.do(e.RoundFailed(PeerId("t0"), RoundId("0.0"), (), "late"))
    with pytest.raises(NotEnrolledError):
        world.do(e.RoundFailed(PeerId("t2"), world.round_id, (PeerId("t0"),), "revenge"))


def test_who_names_nobody_is_left_out_itself_unless_nobody_else_is_left() -> None:
    world = started()
    world.do(e.RoundFailed(PeerId("t0"), world.round_id, (), "out of memory"))
    assert members(world) == ("t1",)
    world.do(e.RoundFailed(PeerId("t1"), world.round_id, (), "out of memory"))
    assert members(world) == ("t0", "t1")


def test_repeated_failures_are_paced() -> None:
    world = started(trainers=1)
    for _ in range(rounds.NUM_QUICK_ATTEMPTS):
        world.do(e.RoundFailed(PeerId("t0"), world.round_id, (), "out of memory"))
    assert world.core.state.round is None
    world.tick(0.9)
    assert world.core.state.round is None
    world.tick(0.1)
    assert world.round_id == "0.4"


def test_strikes_in_a_row_leave_a_trainer_out_for_longer_each_time() -> None:
    world = started()
    out: list[int] = []
    for version in range(8):
        if "t1" in members(world):
            world.do(e.RoundFailed(PeerId("t0"), world.round_id, (PeerId("t1"),), "no part"))
            out.append(version)
        assert members(world) == ("t0",)
        world.finish_round()
        world.see_all()
        world.fill_batch()
    assert out == [0, 1, 3, 7]
    world.core.state.nodes[PeerId("t1")].left_out_until = 0
    world.do(e.RoundFailed(PeerId("t0"), world.round_id, (), "mine"))
    world.finish_round()
    assert world.core.state.nodes[PeerId("t1")].num_strikes == 0, "a version that it made clears it"


def swarm_of_three() -> World:
    """One trainer, two nodes that generate and could train."""
    world = World()
    world.do(e.BaseRegistered(BASE))
    for name, rate in (("a", 9.0), ("b", 5.0), ("c", 1.0)):
        world.join(name, rate=rate)
    world.see_all()
    world.fill_batch(name="c")
    return world


def test_a_trainer_whose_rounds_fail_gives_its_seat_up() -> None:
    world = swarm_of_three()
    for _ in range(3):
        assert members(world) == ("a",)
        world.do(e.RoundFailed(PeerId("a"), world.round_id, (), "out of memory"))
    world.see_all()
    assert (world.role("a"), world.role("b"), members(world)) == ("rollout", "trainer", ("b",))


def test_a_trainer_that_is_never_ready_gives_its_seat_up() -> None:
    world = World()
    world.do(e.BaseRegistered(BASE))
    for name, rate in (("a", 9.0), ("b", 5.0), ("c", 1.0)):
        world.join(name, rate=rate)
    world.see("c")
    world.fill_batch(name="c")
    for _ in range(62):
        world.tick(1.0)
        world.see_all(but=("a",))
        world.see("a", version=-1)
    assert (world.role("a"), world.role("b"), members(world)) == ("rollout", "trainer", ("b",))


def test_lost_member_ends_the_round() -> None:
    world = started()
    world.tick(2.0)
    world.see_all(but=("t1",))
    world.tick(1.5)
    assert aborts(world) == [("0.0", "MEMBER_LOST", ("t1",))]
    assert members(world) == ("t0",)


def test_member_whose_trainer_restarted_ends_the_round_and_is_taken_again() -> None:
    world = started()
    world.see("t1", endpoint="")
    assert aborts(world) == [], "a hello may not know the endpoint yet"
    world.see("t1", endpoint="t1:99")
    assert aborts(world) == [("0.0", "MEMBER_RESTARTED", ())]
    assert world.core.state.round is not None
    assert world.core.state.round.members[1].endpoint == "t1:99"


def test_silent_members_are_suspects_at_the_deadline() -> None:
    world = started()
    world.attest("t0")
    for _ in range(30):
        world.tick(1.0)
        world.see_all()
    assert aborts(world) == [("0.0", "DEADLINE", ("t1",))]
    assert members(world) == ("t0",)


def test_first_version_waits_for_the_pinned_number_of_trainers() -> None:
    world = World()
    world.start(trainers=2)
    world.see("t1", version=-1)
    world.fill_batch()
    for _ in range(100):
        world.tick(1.0)
        world.see_all(but=("t1",))
        world.see("t1", version=-1)
    assert world.core.state.round is None
    world.see("t1")
    assert members(world) == ("t0", "t1")


def test_later_versions_wait_for_a_slow_trainer_once() -> None:
    world = started()
    world.finish_round()
    world.see("r0")
    world.see("t0")
    world.fill_batch()
    assert members(world) == ()
    waited_s = 0
    while world.core.state.round is None:
        world.tick(1.0)
        world.see("r0")
        world.see("t0")
        world.see("t1", version=0)
        waited_s += 1
    assert (waited_s, members(world)) == (5, ("t0",))
    world.finish_round()
    world.see("r0")
    world.see("t0")
    world.fill_batch()
    assert members(world) == ("t0",), "it made the swarm wait in vain and is not waited for again"
    world.finish_round()
    world.see("t1")
    world.see_all()
    world.fill_batch()
    assert members(world) == ("t0", "t1"), "until it has the head"


def test_trainer_with_other_weights_takes_no_part() -> None:
    world = started(trainers=1)
    world.finish_round()
    world.see("r0")
    world.fill_batch()
    assert members(world) == ()
    presence = world.core.soft.live[PeerId("t0")].presence
    other = replace(presence, version=Version(1), root=make_body(9, parent=None).root)
    world.do(e.NodeSeen(PeerId("t0"), other))
    assert members(world) == ()


def test_a_slot_trained_twice_would_be_seen() -> None:
    """Negative control of the books: a slot that is in two shares."""
    world = started()
    round_ = world.core.state.round
    assert round_ is not None
    (first, keys), (second, _) = round_.shares
    round_.shares = ((first, keys), (second, keys))
    with pytest.raises(AssertionError, match="each once"):
        check(world.core.state)


def test_other_weights_in_a_round_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "is_ready", lambda *_: True)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_trainer_with_other_weights_takes_no_part()


def test_metrics_that_overflow_together_end_nothing() -> None:
    world = World()
    world.start(trainers=2)
    world.fill_batch()
    assert world.core.state.round is not None
    body, round_id = world.next_body(), world.round_id
    for peer_id in world.core.state.round.peer_ids:
        world.do(e.VersionAttested(peer_id, round_id, body, {"huge": 1.7e308}))
    head = world.core.state.head
    assert head is not None
    assert head.metrics["huge"] == pytest.approx(1.7e308)
