"""Who trains and who generates: from rates, with hysteresis, and without ever stopping the swarm."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import events as e
from coordinator.core.effects import AssignRole
from coordinator.core.roles import Candidate, decide_roles, wanted_trainers
from protocol.ids import PeerId
from protocol.run import Role
from tests.coordinator.world import World, make_rules


def node(
    name: str,
    *,
    rate: float = 1.0,
    role: Role | None = None,
    allowed: e.InviteRole = "auto",
    reachable: bool = True,
) -> Candidate:
    capability = e.Capability(rate, rate, 1, "cpu", reachable=reachable)
    return Candidate(PeerId(name), allowed, capability, role)


def decide(
    *nodes: Candidate, trainers: int | None = None, rollouts: int | None = None, vacant: int = 0
) -> dict[str, Role]:
    changes = decide_roles(nodes, num_trainers=trainers, num_rollouts=rollouts, num_vacant_seats=vacant)
    return {str(peer): given.role for peer, given in changes.items()}


def test_fastest_reachable_nodes_train() -> None:
    nodes = [node("a", rate=1), node("b", rate=9, reachable=False), node("c", rate=5), node("d", rate=5)]
    assert decide(*nodes) == {"a": "rollout", "b": "rollout", "c": "trainer", "d": "rollout"}


def test_number_of_trainers() -> None:
    counts = [wanted_trainers(n, num_trainers=None, num_rollouts=None) for n in range(13)]
    assert counts == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert wanted_trainers(4, num_trainers=9, num_rollouts=None) == 3, "one node at least generates"
    assert wanted_trainers(4, num_trainers=None, num_rollouts=1) == 3
    assert wanted_trainers(1, num_trainers=2, num_rollouts=None) == 1


def test_pinned_counts_leave_the_rest_idle() -> None:
    nodes = [node(name) for name in "abcd"]
    assert decide(*nodes, trainers=1, rollouts=2) == {"a": "trainer", "b": "rollout", "c": "rollout", "d": "idle"}


def test_invites_limit_roles() -> None:
    nodes = [node("a", rate=9, allowed="rollout"), node("b", rate=1, allowed="trainer"), node("c", rate=5)]
    assert decide(*nodes) == {"a": "rollout", "b": "trainer", "c": "rollout"}
    unreachable = [node("a", allowed="trainer", reachable=False), node("b"), node("c")]
    assert decide(*unreachable) == {"a": "idle", "b": "trainer", "c": "rollout"}
    assert decide(node("a", rate=0.0), node("b", rate=0.0)) == {"a": "rollout", "b": "rollout"}


def test_newcomers_do_not_move_the_living() -> None:
    living = [node("a", rate=1, role="trainer"), node("b", rate=2, role="rollout")]
    assert decide(*living, node("z", rate=100)) == {"z": "rollout"}
    assert decide(*living) == {}


def test_idle_node_takes_a_seat_that_opens() -> None:
    nodes = [node("a", role="rollout"), node("b", role="idle")]
    assert decide(*nodes, vacant=1) == {"b": "trainer"}


def test_lost_trainer_is_replaced_by_the_best_rollout_node_if_another_remains() -> None:
    two = [node("a", rate=1, role="rollout"), node("b", rate=2, role="rollout")]
    assert decide(*two, vacant=1) == {"b": "trainer"}
    assert decide(two[0], vacant=1) == {}
    slow = [node("a", rate=1, role="rollout", allowed="rollout"), node("b", role="rollout", reachable=False)]
    assert decide(*slow, vacant=1) == {}


def test_failing_trainer_changes_places_with_the_best_rollout_node() -> None:
    def failing(allowed: e.InviteRole = "auto") -> Candidate:
        return replace(node("t", rate=9, role="trainer", allowed=allowed), is_failing=True)

    a, b = node("a", rate=1, role="rollout"), node("b", rate=2, role="rollout")
    assert decide(failing(), a, b) == {"b": "trainer", "t": "rollout"}
    assert decide(failing(), a) == {"a": "trainer", "t": "rollout"}
    assert decide(failing("trainer"), a, b) == {"b": "trainer", "t": "idle"}
    assert decide(failing("trainer"), a) == {}, "somebody must generate"
    assert decide(failing(), node("a", role="rollout", allowed="rollout")) == {}


def test_one_of_two_of_several_trainers_lost() -> None:
    nodes = [node("t", role="trainer"), *(node(f"r{i}", rate=i, role="rollout") for i in range(6))]
    assert decide(*nodes, vacant=1) == {"r5": "trainer"}
    assert decide(*nodes, vacant=0) == {}, "growth alone moves nobody"


def test_slowest_trainer_generates_when_nobody_else_is_left() -> None:
    nodes = [node("a", rate=1, role="trainer"), node("b", rate=2, role="trainer")]
    assert decide(*nodes) == {"a": "rollout"}
    bound = [node("a", rate=1, role="trainer", allowed="trainer"), node("b", rate=2, role="trainer")]
    assert decide(*bound) == {"b": "rollout"}
    assert decide(node("a", role="trainer")) == {}


def test_a_node_alone_trains_if_it_can() -> None:
    assert decide(node("a")) == {"a": "trainer"}
    assert decide(node("a", reachable=False)) == {"a": "rollout"}


def test_a_node_of_unknown_rate_keeps_its_role_and_gets_no_other() -> None:
    unknown = Candidate(PeerId("a"), "auto", None, "rollout")
    assert decide(unknown, node("b", role="rollout", allowed="rollout"), vacant=1) == {}


names = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)


@given(st.data(), names, st.integers(0, 3))
def test_any_swarm(data: st.DataObject, peers: list[str], vacant: int) -> None:
    roles: st.SearchStrategy[Role | None] = st.sampled_from(["trainer", "rollout", "idle", None])
    invites: st.SearchStrategy[e.InviteRole] = st.sampled_from(["auto", "auto", "trainer", "rollout"])
    nodes = [
        node(
            peer,
            rate=data.draw(st.integers(0, 3)),
            role=data.draw(roles),
            allowed=data.draw(invites),
            reachable=data.draw(st.booleans()),
        )
        for peer in peers
    ]
    changes = decide(*nodes, vacant=vacant)
    assert changes == decide(*reversed(nodes), vacant=vacant), "the order of the nodes does not matter"
    by_name = {str(n.peer_id): n for n in nodes}
    after = {name: changes.get(name, n.role) for name, n in by_name.items()}
    assert None not in after.values(), "everybody has a role"
    for name, role in changes.items():
        assert role != "trainer" or by_name[name].can_train
        assert role != "rollout" or by_name[name].can_generate
    moved = [name for name in changes if by_name[name].role in ("trainer", "rollout")]
    assert len(moved) <= max(1, vacant)
    again = [Candidate(n.peer_id, n.allowed, n.capability, after[name]) for name, n in by_name.items()]
    left = max(0, vacant - list(changes.values()).count("trainer"))
    assert not [r for r in decide(*again, vacant=left).values() if r == "idle"]


def test_first_roles_wait_for_the_expected_nodes_or_for_quiet() -> None:
    world = World(make_rules(expected_nodes=3, settle_s=2.0, heartbeat_s=10.0))
    world.join("a", rate=1)
    world.tick(60.0)
    world.see("a")
    assert world.role("a") is None, "a node alone is no swarm"
    world.join("b", rate=9)
    world.tick(1.0)
    assert world.role("b") is None
    world.join("c", rate=5)
    assert (world.role("a"), world.role("b"), world.role("c")) == ("rollout", "trainer", "rollout")

    quiet = World(make_rules(expected_nodes=9, settle_s=2.0, heartbeat_s=10.0))
    quiet.join("a")
    quiet.join("b")
    quiet.tick(1.9)
    assert quiet.role("a") is None
    quiet.tick(0.1)
    assert (quiet.role("a"), quiet.role("b")) == ("trainer", "rollout")


def test_lost_trainer_is_replaced_and_its_return_moves_nobody() -> None:
    world = World()
    for name, rate in (("a", 9.0), ("b", 5.0), ("c", 1.0)):
        world.join(name, rate=rate)
    world.tick(0.5)
    world.rules = world.core.rules
    assert world.role("a") == "trainer"
    world.tick(2.0)
    world.see("b")
    world.see("c")
    world.tick(1.0)
    assert (world.role("a"), world.role("b"), world.role("c")) == (None, "trainer", "rollout")
    world.see("a")
    assert (world.role("a"), world.role("b"), world.role("c")) == ("rollout", "trainer", "rollout")
    assert AssignRole(PeerId("b"), "trainer", "takes the seat of a lost trainer") in world.effects


def test_roles_survive_a_restart_until_their_nodes_had_time_to_return() -> None:
    world = World()
    world.start(trainers=1, rollouts=2)
    world.crash()
    for _ in range(9):
        world.tick(2.0)
        world.see("t0")
        world.see("r0")
        assert world.role("r1") == "rollout"
    world.tick(0.5)
    assert (world.role("t0"), world.role("r0"), world.role("r1")) == ("trainer", "rollout", None)


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    """Negative control: the same time with timers loses every silent node."""
    world = World()
    world.start()
    world.tick()
    world.stall(60.0)
    assert world.role("t0") == "trainer"
    assert world.role("r0") == "rollout"
    world.tick(60.0)
    assert world.role("t0") is None


def test_streams_that_broke_during_a_standstill_have_time_to_come_back() -> None:
    """They end only after it, all at once; two heartbeats would dissolve the swarm."""
    world = World()
    world.start()
    world.tick()
    world.stall(60.0)
    for name in ("t0", "r0"):
        world.do(e.SessionEnded(PeerId(name)))
    world.tick(10.0)
    assert (world.role("t0"), world.role("r0")) == ("trainer", "rollout")
    world.tick(30.0)
    assert (world.role("t0"), world.role("r0")) == (None, None)
