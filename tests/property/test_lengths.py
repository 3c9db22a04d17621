"""What is remembered of tasks that come again: their lengths, in few bytes, and what follows from them."""

from statistics import median_low

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import pace
from coordinator.core.facts import BlockBegun, LeaseGranted
from coordinator.core.state import encode_state
from coordinator.core.turn import Turn
from protocol.ids import LeaseId
from protocol.run import EnvironmentSpec
from tests.coordinator.world import World, make_rules

MAX_BYTES = 64
"""A task may cost so much memory, in the state and in a snapshot of it."""

lengths = st.integers(1, 2**20)


def epochs(num_tasks: int) -> World:
    """A run with one trainer and one node, whose tasks repeat themselves."""
    spec = EnvironmentSpec("sums", num_tasks=num_tasks)
    world = World(make_rules(environment=spec, groups_per_batch=2, max_lag=0))
    world.start()
    world.is_checked = False
    return world


def work(world: World, drawn: list[int]) -> dict[int, list[int]]:
    """One version with completions of these lengths, in turn; what each task's were."""
    made: dict[int, list[int]] = {}
    head = world.core.state.head
    assert head is not None
    while world.core.state.round is None:
        grant = world.lease("r0", 4)
        for place, slot in enumerate(grant.slots):
            length = drawn[place % len(drawn)]
            world.submit(grant, slot, segments=((head.version, length),))
            made.setdefault(slot.task.index, []).append(length)
        for slot in grant.slots:
            world.score(slot)
    world.finish_round()
    world.see_all()
    return made


@given(num_tasks=st.integers(1, 6), drawn=st.lists(st.lists(lengths, min_size=1, max_size=4), min_size=1, max_size=8))
@settings(max_examples=30)
def test_the_median_of_the_last_epoch_is_remembered_in_four_bytes(num_tasks: int, drawn: list[list[int]]) -> None:
    world, expected = epochs(num_tasks), dict[int, int]()
    for some in drawn:
        for index, made in work(world, some).items():
            expected[index % num_tasks] = median_low(made)
    turn = Turn(world.rules, world.core.state, world.core.soft, world.now_ms)
    assert {index: pace.length_of(turn, index) for index in expected} == expected
    assert len(world.core.state.lengths) <= 4 * num_tasks
    world.crash()


def test_memory_of_a_task_is_bounded_in_state_and_snapshot() -> None:
    num_tasks = 40
    world = epochs(num_tasks)
    for _ in range(num_tasks // 2):
        work(world, [2**20])
    assert len(world.core.state.lengths) == len(world.core.state.longest) == 4 * num_tasks
    size = len(encode_state(world.core.state))
    world.core.state.lengths.clear()
    world.core.state.longest.clear()
    assert size - len(encode_state(world.core.state)) <= MAX_BYTES * num_tasks


@given(st.lists(lengths, min_size=4, max_size=4, unique=True))
@settings(max_examples=20)
def test_the_longest_of_a_block_are_opened_first(drawn: list[int]) -> None:
    world = epochs(4)
    first = work(world, [drawn[0], drawn[0], drawn[1], drawn[1]])
    second = work(world, [drawn[2], drawn[2], drawn[3], drawn[3]])
    known = {index: made[0] for index, made in (first | second).items()}
    blocks = [fact.indices for fact in world.facts if isinstance(fact, BlockBegun)]
    while len(blocks) < 4:
        work(world, [5])
        blocks = [fact.indices for fact in world.facts if isinstance(fact, BlockBegun)]
    for block in blocks[2:4]:
        assert [known[index % 4] for index in block] == sorted((known[index % 4] for index in block), reverse=True)
    opened = [g.task.index for f in world.facts if isinstance(f, LeaseGranted) for g in f.opened]
    assert len(opened) == len(set(opened)), "a task was opened twice"
    assert sorted(opened) == list(range(len(opened))), "a task was left out"


def test_tasks_without_end_cost_no_memory() -> None:
    world = epochs(0)
    for _ in range(3):
        work(world, [7])
    assert not world.core.state.lengths
    assert world.core.state.leases.get(LeaseId("x")) is None
