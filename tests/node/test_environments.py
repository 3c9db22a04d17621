"""A node makes prompts only of environments that it has and its owner allows; the organizer's it never touches."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from node.compute.messages import MakePrompts
from node.home import Home
from node.rollout.worker import RolloutJob
from node.settings import NodeSettings, check_settings
from protocol.errors import UsageError
from protocol.run import EnvironmentSpec, PoolSpec
from tests.node.lease_bench import PROMPTS, Bench, Child, work
from tests.node.test_rollout_job import ORDER, Engine

THEIRS = EnvironmentSpec("mine", origin="organizer")


class CountingChild(Child):
    """Counts what it is asked to make."""

    def __init__(self) -> None:
        super().__init__(PROMPTS)
        self.num_asked = 0

    async def request(self, body: object, reply: object, *, deadline_s: float) -> object:
        self.num_asked += isinstance(body, MakePrompts)
        return await super().request(body, reply, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("environment", "settings", "num_asked"),
    [
        (EnvironmentSpec("chain_sum"), NodeSettings(), 1),
        (EnvironmentSpec("chain_sum"), NodeSettings(environments=[]), 0),
        (THEIRS, NodeSettings(), 0),
    ],
)
async def test_prompts_of_others_come_with_the_lease(
    home: Path, environment: EnvironmentSpec, settings: NodeSettings, num_asked: int
) -> None:
    child = CountingChild()
    bench = Bench(Home.create(home), work(7, given=PROMPTS[7]), work(8, given=PROMPTS[8]), child=child)
    bench.node.spec, bench.node.settings = replace(bench.node.spec, environment=environment), settings
    await bench.run()
    assert child.num_asked == num_asked
    assert [order.prompt_ids for order in child.generated[0].orders] == [PROMPTS[7], PROMPTS[8]]
    assert bench.lease.num_taken == 2


async def test_a_slot_without_a_prompt_is_left_out_where_none_may_be_made(home: Path) -> None:
    bench = Bench(Home.create(home), work(7), work(8, given=PROMPTS[8]), child=CountingChild())
    bench.node.spec = replace(bench.node.spec, environment=THEIRS)
    await bench.run()
    assert [rollout.slot.task.index for rollout in bench.coordinator.taken] == [8]


async def test_the_child_runs_nothing_of_the_organizers_even_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "was-here"
    (tmp_path / "organizers_module.py").write_text(f"open({str(mark)!r}, 'w')\ndef make(): ...\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)  # worse than it can be: the node could import it
    monkeypatch.setattr("node.rollout.worker.load_tokenizer", lambda _: None)
    specs = [
        EnvironmentSpec("mine", origin="organizer", pools=(PoolSpec(source, "x"),), folder=str(tmp_path))
        for source in ("organizers_module:make", "jsonl:tokenizer.json", "chain_sum")
    ]
    specs.append(EnvironmentSpec("chain_sum", prompt="chat", folder=str(tmp_path)))
    for spec in specs:
        job = RolloutJob(Engine(), msgspec.structs.replace(ORDER, environment=spec))
        with pytest.raises(UsageError, match="come with the lease"):
            await job.handle(MakePrompts((("mine", 0, 0),)), _ignore)
    assert not mark.exists()
    assert "organizers_module" not in sys.modules


async def _ignore(event: msgspec.Struct) -> None:
    pass


def test_an_owner_names_only_what_there_is() -> None:
    assert check_settings({"environments": []}, source="x").environments == ()
    with pytest.raises(UsageError, match="environments"):
        check_settings({"environments": ["organizer"]}, source="x")
