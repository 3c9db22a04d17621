"""The core as a whole: invites, base, restart, refusals that change nothing, what it says it waits for."""

import pytest

from coordinator.core import events as e
from coordinator.core import leases
from coordinator.core.effects import AbortRound, AnnounceVersion, RequestEvaluation, ScoreRollout, SendPlan
from coordinator.core.facts import VersionCommitted, decode_fact, encode_fact
from coordinator.core.replies import Enrolment
from coordinator.core.state import decode_state, encode_state
from coordinator.core.turn import Turn
from protocol.errors import (
    HexcombError,
    InviteExpiredError,
    InviteUnknownError,
    InviteUsedUpError,
    ManifestRefusedError,
    NoWorkError,
    UsageError,
)
from protocol.ids import Digest, InviteId, LeaseId, PeerId, RoundId, SlotKey, TaskKey, Version
from tests.coordinator.world import BASE, World, make_body, make_rules

INVITE = InviteId("aa")


def invited(num_uses: int = 1) -> World:
    world = World()
    world.do(e.InviteCreated(INVITE, "00", num_uses, world.now_ms + 1000, "auto"))
    return world


def test_invite_enrols_once_for_each_key() -> None:
    world = invited(num_uses=1)
    first = world.do(e.InviteRedeemed(INVITE, PeerId("a")))
    again = world.do(e.InviteRedeemed(INVITE, PeerId("a")))
    assert first.reply == Enrolment(PeerId("a"), "auto", is_new=True)
    assert again.reply == Enrolment(PeerId("a"), "auto", is_new=False)
    assert again.facts == ()
    assert world.core.state.invites[INVITE].num_used == 1


def test_two_keys_on_the_last_use_one_wins() -> None:
    world = invited(num_uses=1)
    world.do(e.InviteRedeemed(INVITE, PeerId("a")))
    with pytest.raises(InviteUsedUpError):
        world.do(e.InviteRedeemed(INVITE, PeerId("b")))
    assert list(world.core.state.nodes) == ["a"]


def test_invite_unknown_and_expired() -> None:
    world = invited(num_uses=2)
    with pytest.raises(InviteUnknownError):
        world.do(e.InviteRedeemed(InviteId("bb"), PeerId("a")))
    world.do(e.InviteRedeemed(INVITE, PeerId("a")))
    world.now_ms += 1000
    with pytest.raises(InviteExpiredError):
        world.do(e.InviteRedeemed(INVITE, PeerId("b")))
    assert world.do(e.InviteRedeemed(INVITE, PeerId("a"))).facts == (), "an enrolled key needs no valid invite"


def test_useless_or_taken_invites_are_not_made() -> None:
    world = invited()
    with pytest.raises(UsageError):
        world.do(e.InviteCreated(INVITE, "11", 1, world.now_ms + 1, "auto"))
    with pytest.raises(UsageError):
        world.do(e.InviteCreated(InviteId("cc"), "00", 0, world.now_ms + 1, "auto"))
    with pytest.raises(UsageError):
        world.do(e.InviteCreated(InviteId("cc"), "00", 1, world.now_ms, "auto"))
    assert world.do(e.InviteCreated(INVITE, "00", 1, world.now_ms + 5, "auto")).facts == ()


def test_base_is_registered_once() -> None:
    world = World()
    decision = world.do(e.BaseRegistered(BASE))
    assert decision.effects == (AnnounceVersion(Version(0), BASE),)
    assert world.do(e.BaseRegistered(BASE)).facts == ()
    (committed,) = World().do(e.BaseRegistered(BASE, (-1.0,) * 28)).facts
    assert isinstance(committed, VersionCommitted)
    assert committed.canary == (-1.0,) * 28
    other = make_body(0, parent=None, salt="other")
    with pytest.raises(ManifestRefusedError):
        world.do(e.BaseRegistered(other))
    with pytest.raises(ManifestRefusedError):
        World().do(e.BaseRegistered(make_body(1, parent=BASE.root)))


def test_a_run_goes_on_version_by_version() -> None:
    world = World()
    world.start()
    for _ in range(6):
        world.make_version()
    state = world.core.state
    assert state.head is not None
    assert state.head.version == 6
    books = world.core.books()
    assert (books.trained, books.issued) == (24, 24)
    assert state.lag_histogram == {0: 96}
    assert len(state.retired) <= (2 + 3) * 2, "finished groups are forgotten"
    assert not state.groups
    world.crash()


def test_refusal_changes_nothing() -> None:
    world = World()
    world.start()
    before = encode_state(world.core.state)
    refused: list[e.Event] = [
        e.NodeSeen(PeerId("stranger"), world.core.soft.live[PeerId("t0")].presence),
        e.WorkRequested(PeerId("stranger"), Version(0), BASE.root, 1, LeaseId("x")),
        e.WorkRequested(PeerId("t0"), Version(0), BASE.root, 1, LeaseId("x")),
        e.WorkRequested(PeerId("r0"), Version(1), BASE.root, 1, LeaseId("x")),
        e.WorkRequested(PeerId("r0"), Version(0), Digest("other"), 1, LeaseId("x")),
        e.WorkRequested(PeerId("r0"), Version(0), BASE.root, 0, LeaseId("x")),
        e.LeaseReturned(PeerId("r0"), LeaseId("x")),
        e.RoundFailed(PeerId("t0"), RoundId("0.0"), (), "?"),
    ]
    for event in refused:
        with pytest.raises(HexcombError):
            world.do(event)
    assert encode_state(world.core.state) == before
    assert PeerId("stranger") not in world.core.soft.live


def test_snapshot_and_facts_survive_their_encoding() -> None:
    world = World()
    world.start()
    world.make_version()
    world.fill_batch()
    state = world.core.state
    assert encode_state(decode_state(encode_state(state))) == encode_state(state)
    assert [decode_fact(encode_fact(fact)) for fact in world.facts] == world.facts


def test_replay_from_a_snapshot_equals_replay_from_the_start() -> None:
    world = World()
    world.start()
    world.make_version()
    snapshot, seen = encode_state(world.core.state), len(world.facts)
    world.make_version()
    world.fill_batch()
    resumed = World(world.rules)
    resumed.core.state = decode_state(snapshot)
    resumed.core.replay(world.facts[seen:])
    assert encode_state(resumed.core.state) == encode_state(world.core.state)


def test_restart_aborts_the_round_and_asks_for_missing_scores() -> None:
    world = World()
    world.start()
    world.fill_batch()
    open_round, reserved = world.round_id, world.core.books().in_round
    grant = world.lease()
    world.submit(grant, grant.slots[0])
    world.effects.clear()
    world.crash()
    assert world.core.state.epoch == 1
    assert [effect.round_id for effect in world.effects if isinstance(effect, AbortRound)] == [open_round]
    assert world.asked(ScoreRollout) == [ScoreRollout(grant.slots[0])]
    assert world.core.books().in_round == reserved == 4
    assert not world.core.soft.live
    world.see("t0")
    plans = [effect for effect in world.effects if isinstance(effect, SendPlan)]
    assert [plan.round_id for plan in plans] == ["0.1"]
    world.finish_round()
    assert world.core.books().trained == 4


def test_capacity_is_remembered_over_a_restart() -> None:
    """Negative control: forgetting what was trained opens more groups than the bound allows."""
    world = World()
    world.start()
    for _ in range(5):
        world.make_version()
    world.crash()
    turn = Turn(world.rules, world.core.state, world.core.soft, world.now_ms)
    assert leases.spare_groups(turn, version=Version(5)) == (2 + 1) * 2
    world.see("r0")
    world.lease("r0", 1000)
    assert leases.spare_groups(turn, version=Version(5)) == 0
    world.core.state.num_groups_trained = 0
    assert leases.spare_groups(turn, version=Version(5)) == 5 * 2


def test_stopped_run_gives_no_work_and_starts_no_round() -> None:
    world = World(make_rules(stop_version=1))
    world.start()
    world.make_version()
    with pytest.raises(NoWorkError):
        world.lease()
    assert world.core.waiting_for(world.now_ms)[0] == "FINISHED"


def test_evaluation_is_asked_for_and_asked_again() -> None:
    world = World(make_rules(evaluate_every=2))
    world.start(trainers=2)
    assert world.asked(RequestEvaluation) == [RequestEvaluation(PeerId("t0"), Version(0))]
    for _ in range(31):
        world.tick(1.0)
        world.see_all()
    assert world.asked(RequestEvaluation)[1:] == [RequestEvaluation(PeerId("t1"), Version(0))]
    world.do(e.EvaluationScored(Version(0), 8, 0.5))
    assert world.do(e.EvaluationScored(Version(0), 8, 0.9)).facts == ()
    assert world.do(e.EvaluationScored(Version(9), 8, 0.9)).facts == ()
    world.make_version()
    world.make_version()
    assert world.asked(RequestEvaluation)[2:] == [RequestEvaluation(PeerId("t0"), Version(2))]
    assert [record.accuracy for record in world.core.state.versions] == [0.5, None, None]


def test_says_what_it_waits_for() -> None:
    world = World()
    said = [world.core.waiting_for(world.now_ms)[0]]
    world.do(e.BaseRegistered(BASE))
    said.append(world.core.waiting_for(world.now_ms)[0])
    world.join("t0", allowed="trainer")
    world.join("r0", allowed="rollout")
    world.see_all()
    said.append(world.core.waiting_for(world.now_ms)[0])
    world.fill_batch()
    said.append(world.core.waiting_for(world.now_ms)[0])
    world.finish_round()
    world.see("r0")
    world.fill_batch()
    said.append(world.core.waiting_for(world.now_ms)[0])
    world.tick(2.0)
    world.see("t0")
    world.tick(2.0)
    said.append(world.core.waiting_for(world.now_ms)[0])
    assert said[:5] == ["WAITING_FOR_BASE", "WAITING_FOR_NODES", "GENERATING", "TRAINING", "WAITING_FOR_TRAINERS"]
    assert said[5] == "TRAINING"


def test_unknown_slot_is_scored_without_effect() -> None:
    world = World()
    world.start()
    slot = SlotKey(Version(0), TaskKey("sums", 7, 99), 0)
    assert world.score(slot).facts == ()


def test_unreadable_fact_is_a_journal_error() -> None:
    with pytest.raises(HexcombError, match="cannot be read"):
        decode_fact(b"\x92\xa4Nope\x80")
    with pytest.raises(HexcombError, match="cannot be read"):
        decode_fact(b"\xc1")
    with pytest.raises(HexcombError, match="snapshot"):
        decode_state(b"\xc1")
