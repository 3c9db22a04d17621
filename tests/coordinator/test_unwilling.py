"""Nodes whose owners want no work for them: idle with the reason, once round or leases have ended, and back after."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import events as e
from coordinator.core.effects import AssignRole
from coordinator.core.roles import decide_roles
from coordinator.hearsay import presence_of
from protocol.ids import PeerId
from protocol.v1 import control_pb2
from tests.coordinator.test_roles import decide, node
from tests.coordinator.world import World

WHY = "paused: outside its hours (22:00-07:00)"


def test_an_unwilling_node_is_idle_with_its_reason() -> None:
    nodes = [replace(node("a", role="trainer"), unwilling=WHY), node("b", role="trainer"), node("c", role="rollout")]
    given = decide_roles(nodes, num_trainers=2, num_rollouts=None)
    assert {str(peer): (one.role, one.reason) for peer, one in given.items()} == {"a": ("idle", WHY)}
    idle = [replace(nodes[0], role="idle"), *nodes[1:]]
    assert decide(*idle, trainers=2) == {}, "it is told once"
    assert decide(replace(idle[0], unwilling=""), *nodes[1:], trainers=2) == {"a": "trainer"}


def test_a_newcomer_that_does_not_want_work_gets_none() -> None:
    assert decide(replace(node("z"), unwilling=WHY), node("a", role="trainer"), node("b", role="rollout")) == {
        "z": "idle"
    }


def test_the_seat_of_the_only_trainer_is_filled_while_it_rests() -> None:
    resting = replace(node("t", role="trainer"), unwilling=WHY)
    rollouts = [node("a", rate=1, role="rollout"), node("b", rate=2, role="rollout")]
    assert decide(resting, *rollouts, trainers=1) == {"t": "idle", "b": "trainer"}


def test_a_trainer_leaves_at_the_rounds_end() -> None:
    world = World()
    world.start(trainers=2, rollouts=1)
    world.fill_batch()
    world.see_all()
    round_ = world.core.state.round
    assert round_ is not None
    assert PeerId("t0") in round_.peer_ids
    world.see("t0", unwilling=WHY)
    world.tick()
    assert world.role("t0") == "trainer", "it has a part in the round that is open"
    assert world.core.state.round == round_
    world.finish_round()
    assert world.core.state.round is None
    world.see("t0", unwilling=WHY)
    world.tick()
    assert world.role("t0") == "idle"
    assert AssignRole(PeerId("t0"), "idle", WHY) in world.asked(AssignRole)
    world.fill_batch()
    world.see("t1")
    world.see("r0")
    sealed = world.core.state.round
    assert sealed is not None
    assert sealed.peer_ids == (PeerId("t1"),), "and nobody waits for it"
    world.see("t0")
    assert world.role("t0") == "trainer"


def test_a_trainer_that_left_without_a_word_would_be_waited_for() -> None:
    """The negative control of the test above: what the word saves is the patience of a round."""
    world = World()
    world.start(trainers=2, rollouts=1)
    world.fill_batch()
    world.finish_round()
    world.see("t0", version=-1, endpoint="")
    world.see("t1")
    world.see("r0")
    world.fill_batch()
    world.see("t1")
    assert world.core.state.round is None


def test_a_rollout_node_keeps_its_leases_until_they_end() -> None:
    world = World()
    world.start(trainers=1, rollouts=2)
    grant = world.lease("r0")
    world.see("r0", unwilling=WHY)
    world.tick()
    assert world.role("r0") == "rollout"
    assert grant.lease_id in world.core.state.leases
    world.do(e.LeaseReturned(PeerId("r0"), grant.lease_id, WHY))
    world.tick()
    assert world.role("r0") == "idle"
    world.see("r0")
    assert world.role("r0") == "rollout"


@given(st.lists(st.tuples(st.sampled_from(["t0", "t1", "r0", "r1"]), st.booleans()), max_size=12))
def test_whatever_owners_say_rounds_end_and_everybody_comes_back(said: list[tuple[str, bool]]) -> None:
    world = World()
    world.start(trainers=2, rollouts=2)
    world.fill_batch()
    world.see_all()
    round_ = world.core.state.round
    assert round_ is not None
    unwilling = dict[str, bool]()
    for name, is_unwilling in said:
        unwilling[name] = is_unwilling
        world.see(name, unwilling=WHY if is_unwilling else "")
        assert world.core.state.round == round_
    world.finish_round()
    world.tick()
    roles = {"t": "trainer", "r": "rollout"}
    for name in ("t0", "t1", "r0", "r1"):
        assert world.role(name) == ("idle" if unwilling.get(name) else roles[name[0]])
    world.see_all()
    assert [world.role(name) for name in ("t0", "t1", "r0", "r1")] == ["trainer", "trainer", "rollout", "rollout"]
    world.see_all()  # now those that train again listen
    world.make_version()
    assert world.core.state.head is not None
    assert world.core.state.head.version == 2


def test_the_reason_travels_in_hello_and_heartbeat_and_is_made_harmless() -> None:
    hello = presence_of(control_pb2.Hello(unwilling=WHY), None)
    assert hello.unwilling == WHY
    later = presence_of(control_pb2.Heartbeat(unwilling="\x1b[31m" + "x" * 500), hello)
    assert later.unwilling.isprintable()
    assert len(later.unwilling) <= 64
    assert presence_of(control_pb2.Heartbeat(), hello).unwilling == ""
