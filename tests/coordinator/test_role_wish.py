"""Roles that owners refuse are given to nobody, and a refusal never leaves the swarm standing still."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import events as e
from coordinator.core import roles, roster
from coordinator.core.roles import Candidate, decide_roles
from coordinator.hearsay import presence_of
from protocol.ids import PeerId
from protocol.run import Role
from protocol.v1 import control_pb2
from tests.coordinator.test_roles import decide, names, node
from tests.coordinator.world import BASE, World, make_rules

TRAINER, ROLLOUT = ("trainer",), ("rollout",)
Wish = tuple[Role, ...]
WISHES: dict[str, Wish] = {"any": e.ANY_ROLE, "trainer": ("trainer",), "rollout": ("rollout",), "none": ()}


def wishing(name: str, wish: str, *, rate: float = 1.0, role: Role | None = None, **how: bool) -> Candidate:
    return replace(node(name, rate=rate, role=role, **how), wish=WISHES[wish])


def test_two_nodes_each_for_one_role_get_it() -> None:
    """The faster one generates, since its owner wants that. Negative control: unheard, each gets what it refuses."""
    slow, fast = wishing("a", "trainer", rate=1), wishing("b", "rollout", rate=9)
    assert decide(slow, fast) == {"a": "trainer", "b": "rollout"}
    unheard = [replace(one, wish=e.ANY_ROLE) for one in (slow, fast)]
    assert decide(*unheard) == {"a": "rollout", "b": "trainer"}


def test_a_role_is_taken_away_when_the_wish_changes() -> None:
    assert decide(wishing("a", "rollout", role="trainer"), node("b", role="rollout")) == {
        "a": "rollout",
        "b": "trainer",
    }
    both = [wishing("a", "rollout", role="trainer"), wishing("b", "trainer", role="rollout")]
    assert decide(*both) == {"a": "rollout", "b": "trainer"}
    nobody = wishing("a", "none", role="trainer")
    assert decide(nobody, node("b", role="rollout"), node("c", role="rollout")) == {"a": "idle", "b": "trainer"}


def test_the_seat_that_a_wish_leaves_is_filled() -> None:
    rollouts = [node(f"r{i}", rate=i, role="rollout") for i in range(3)]
    nodes = [wishing("a", "rollout", role="trainer"), node("b", role="trainer"), *rollouts]
    assert decide(*nodes, trainers=2) == {"a": "rollout", "r2": "trainer"}


def test_invite_and_wish_that_exclude_each_other_leave_a_node_idle_and_say_so() -> None:
    stuck = replace(wishing("a", "rollout"), allowed="trainer")
    given = decide_roles([stuck, node("b"), node("c")], num_trainers=1, num_rollouts=None)
    assert given[PeerId("a")].role == "idle"
    assert given[PeerId("a")].reason == "invite and owner allow no role in common: trainer; rollout"


def test_a_trainer_makes_room_for_one_that_can_only_train() -> None:
    """Else nobody would generate for ever."""
    assert decide(node("a", rate=9, role="trainer"), wishing("b", "trainer")) == {"a": "rollout", "b": "trainer"}
    assert decide(wishing("a", "trainer", role="trainer"), wishing("b", "trainer")) == {"b": "idle"}


@st.composite
def swarms(draw: st.DrawFn) -> list[Candidate]:
    role: st.SearchStrategy[Role | None] = st.sampled_from(["trainer", "rollout", "idle", None])
    invite: st.SearchStrategy[e.InviteRole] = st.sampled_from(["auto", "auto", "trainer", "rollout"])
    return [
        replace(
            wishing(
                name,
                draw(st.sampled_from(["any", "trainer", "rollout", "none"])),
                rate=draw(st.integers(0, 2)),
                role=draw(role),
                reachable=draw(st.booleans()),
            ),
            allowed=draw(invite),
        )
        for name in draw(names)
    ]


def roles_after(nodes: list[Candidate]) -> dict[str, Role | None]:
    """Roles once nothing changes any more."""
    for _ in range(4):
        changes = decide(*nodes)
        nodes = [replace(n, role=changes.get(str(n.peer_id), n.role)) for n in nodes]
        if not changes:
            return {str(n.peer_id): n.role for n in nodes}
    raise AssertionError("roles never settle")


def check_wishes(nodes: list[Candidate]) -> None:
    changes = decide(*nodes)
    for n in nodes:
        role = changes.get(str(n.peer_id), n.role)
        assert role == "idle" or role in n.wish, f"{n.peer_id} has a role that its owner refuses"
        assert role == n.role or role == "idle" or role in n.may


@given(swarms())
def test_no_node_is_given_a_role_that_its_owner_refuses(nodes: list[Candidate]) -> None:
    check_wishes(nodes)


@given(swarms())
def test_whoever_can_work_together_does(nodes: list[Candidate]) -> None:
    """Where one node can train and another one generate, one does train and another one generate, or a role that was
    kept (by a node that might not be given it now) stands for it."""
    able = any(a.can_train and b.can_generate for a in nodes for b in nodes if a is not b)
    if able:
        assert {"trainer", "rollout"} <= set(roles_after(nodes).values())


def test_a_decision_that_does_not_ask_the_owner_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the seeded bug heeds the invite alone."""
    monkeypatch.setattr(Candidate, "may", property(lambda self: e.ANY_ROLE))
    with pytest.raises(AssertionError, match="its owner refuses"):
        check_wishes([wishing("a", "rollout"), wishing("b", "rollout")])


def restart(world: World, name: str, wish: Wish) -> None:
    """The node's daemon starts anew with another wish."""
    world.do(e.SessionEnded(PeerId(name)))
    presence = replace(world.core.soft.live[PeerId(name)].presence, allowed_roles=wish)
    world.do(e.NodeSeen(PeerId(name), presence))


def test_a_changed_wish_is_honoured_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_rules(expected_nodes=2))
    world.join("a", rate=9)
    world.join("b", rate=1)
    assert (world.role("a"), world.role("b")) == ("trainer", "rollout")
    restart(world, "a", ("rollout",))
    assert (world.role("a"), world.role("b")) == ("rollout", "trainer")
    restart(world, "a", ("trainer",))
    assert world.role("a") == "trainer"
    assert world.role("b") == "rollout"
    monkeypatch.setattr(roster, "_wishes", lambda presence: presence.unwilling)
    restart(world, "a", ("rollout",))
    assert world.role("a") == "trainer", "negative control: a roster that does not look at the wish"


def test_a_trainer_that_may_no_longer_train_ends_its_round() -> None:
    world = World()
    world.start(trainers=2, rollouts=1)
    world.fill_batch()
    world.see_all()
    assert world.core.state.round is not None
    restart(world, "t0", ("rollout",))
    assert world.role("t0") == "idle", "its invite allows only training"
    world.tick(1.0)
    world.see_all(but=("t0",))
    sealed = world.core.state.round
    assert sealed is not None
    assert sealed.peer_ids == (PeerId("t1"),)


def test_after_the_coordinators_restart_a_role_is_kept_until_the_wish_is_heard() -> None:
    world = World(make_rules(expected_nodes=2))
    world.join("a", rate=9)
    world.join("b", rate=1)
    world.crash()
    world.see("b")
    assert world.role("a") == "trainer"
    world.do(e.NodeSeen(PeerId("a"), e.Presence(-1, "", (), "", "", "joining", 0.0, "", "", "", ("rollout",))))  # type: ignore[arg-type]
    assert world.role("a") == "idle", "its rates are not known again yet"
    world.do(e.CapabilityLearned(PeerId("a"), e.Capability(9.0, 9.0, 1, "cpu")))
    assert world.role("a") == "rollout"


@pytest.mark.parametrize(
    ("said", "heard"),
    [((), e.ANY_ROLE), (("trainer",), TRAINER), (("rollout", "x" * 99), ROLLOUT), (("trainer", "rollout"), e.ANY_ROLE)],
)
def test_the_wish_travels_in_the_hello_and_stays_for_the_session(said: Wish, heard: Wish) -> None:
    hello = presence_of(control_pb2.Hello(allowed_roles=said), None)
    assert hello.allowed_roles == heard
    assert presence_of(control_pb2.Heartbeat(), hello).allowed_roles == heard


def test_a_node_for_roles_of_another_program_alone_gets_none_of_ours() -> None:
    assert presence_of(control_pb2.Hello(allowed_roles=["auditor"]), None).allowed_roles == ()
    given = decide_roles([wishing("a", "none")], num_trainers=None, num_rollouts=None)
    assert given[PeerId("a")] == roles.Given("idle", "invite and owner allow no role in common: auto; none known here")


def test_a_swarm_that_owners_leave_without_a_role_says_so() -> None:
    world = World(make_rules(expected_nodes=2))
    world.do(e.BaseRegistered(BASE))
    world.join("a")
    world.join("b")
    for name in ("a", "b"):
        restart(world, name, ("rollout",))
    assert world.core.waiting_for(world.now_ms) == (
        "WAITING_FOR_TRAINERS",
        "No trainer is alive; of 2 nodes that are here 0 may be one now.",
    )
    for name in ("a", "b"):
        restart(world, name, ("trainer",))
    code, sentence = world.core.waiting_for(world.now_ms)
    assert code == "WAITING_FOR_ROLLOUT_NODES"
    assert sentence.startswith("No rollout node is alive; of 2 nodes that are here 0 may be one now; 0 of 2 groups")
