"""Which engine `auto` is: by rates that were measured back to back, remembered, and shown."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from node import engine_rates
from node.compute.messages import EngineRate, Started
from node.engine_rates import rates_key, recall, remember
from node.rollout import starting
from node.rollout.choice import FAILURE_HOLDS_S, SMALL_PARAMETERS, Machine, choose
from node.rollout.engine import Chunk, Sample, SampleRequest, Segment
from node.rollout.self_test import SelfTest
from node.rollout.starting import start_engine, tokens_per_s
from protocol.errors import EngineError, UsageError
from protocol.ids import Version
from tests.node.test_rollout_job import ORDER

NOW_S = 1e9
SMALL = Machine(has_vllm=True, on_gpu=False, num_parameters=SMALL_PARAMETERS - 1, is_first=True)
LARGE = replace(SMALL, num_parameters=SMALL_PARAMETERS)
BOTH = (EngineRate("transformers", 100.0), EngineRate("vllm", 150.0))
NO_VLLM = EngineRate("vllm", 0.0, why="it found no memory", at_s=NOW_S)


def chosen(machine: Machine, *rates: EngineRate, wish: str = "auto", now_s: float = NOW_S) -> tuple[str, bool]:
    choice = choose(wish, machine, rates, now_s=now_s)
    return choice.names[0], choice.is_measured


def test_the_faster_one_is_chosen_whatever_was_first() -> None:
    assert chosen(SMALL, *BOTH) == ("vllm", False)
    assert chosen(LARGE, EngineRate("transformers", 151.0), BOTH[1]) == ("transformers", False)
    assert choose("auto", LARGE, BOTH, now_s=NOW_S).why == "vllm 150 tokens/s; transformers 100 tokens/s"
    assert choose("auto", LARGE, BOTH, now_s=NOW_S).names == ("vllm", "transformers"), "the other stands by"


def test_a_small_model_starts_at_once_and_is_measured_the_next_time() -> None:
    assert chosen(SMALL) == ("transformers", False)
    assert chosen(replace(SMALL, is_first=False)) == ("transformers", True)
    assert chosen(LARGE) == ("transformers", True)


def test_one_rate_alone_decides_nothing() -> None:
    """It was taken under another load than the next one would be."""
    assert chosen(LARGE, BOTH[0]) == ("transformers", True)


def test_owners_gpus_crashes_and_what_is_not_installed_need_no_rates() -> None:
    assert chosen(LARGE, *BOTH, wish="transformers") == ("transformers", False)
    assert chosen(replace(LARGE, has_vllm=False), *BOTH) == ("transformers", False)
    assert choose("auto", replace(LARGE, has_vllm=False), (), now_s=NOW_S).why == "vllm is not installed"
    assert chosen(replace(LARGE, on_gpu=True)) == ("vllm", False)
    assert chosen(replace(LARGE, is_careful=True)) == ("vllm", False)
    assert chosen(replace(SMALL, is_careful=True, is_first=False)) == ("transformers", False)
    with pytest.raises(UsageError, match="no engine 'llama'"):
        choose("llama", LARGE, (), now_s=NOW_S)


def test_an_engine_that_did_not_start_is_tried_again_after_a_day() -> None:
    failed = (BOTH[0], NO_VLLM)
    assert chosen(LARGE, *failed, now_s=NOW_S + FAILURE_HOLDS_S - 1) == ("transformers", False)
    assert choose("auto", LARGE, failed, now_s=NOW_S).why == "transformers 100 tokens/s; no vllm: it found no memory"
    assert chosen(LARGE, *failed, now_s=NOW_S + FAILURE_HOLDS_S) == ("transformers", True)
    assert chosen(LARGE, *failed, now_s=NOW_S - 5) == ("transformers", True), "a clock that was set back"


@given(st.builds(Machine, st.booleans(), st.booleans(), st.integers(0, 10**9), st.booleans(), st.booleans()), st.data())
def test_vllm_is_chosen_only_where_it_is_installed_and_never_against_the_rates(
    machine: Machine, data: st.DataObject
) -> None:
    speed = st.floats(1, 1e6)
    rates = [EngineRate(name, data.draw(speed)) for name in ("transformers", "vllm") if data.draw(st.booleans())]
    choice = choose("auto", machine, rates, now_s=NOW_S)
    assert machine.has_vllm or choice.names == ("transformers",)
    if len(rates) == 2 and machine.has_vllm and not machine.on_gpu:
        assert not choice.is_measured
        assert choice.names[0] == max(rates, key=lambda rate: rate.tokens_per_s).engine


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    """Samples one token a seat every `step_s` of its clock."""

    version, vocab_size, dtype, max_num_seqs = Version(0), 64, "float32", 4

    def __init__(self, log: list[str], name: str, *, step_s: float = 0.1, clock: Clock | None = None) -> None:
        self.log, self.name, self.step_s, self.clock = log, name, step_s, clock or Clock()
        self.fails = False

    async def start(self, model_dir: Path, version: Version, weights: Path) -> None:
        self.log.append(f"start {self.name}")
        if self.fails:
            raise EngineError("it did not start")

    async def close(self) -> None:
        self.log.append(f"close {self.name}")

    async def generate(
        self, requests: Sequence[SampleRequest], *, chunk_tokens: int = 0, chunk_s: float = 1.0
    ) -> AsyncIterator[Chunk | Sample]:
        waiting = list(requests)
        while waiting:
            row, waiting = waiting[: self.max_num_seqs], waiting[self.max_num_seqs :]
            for length in range(1, row[0].max_new_tokens + 1):
                self.clock.now_s += self.step_s
                for request in row:
                    yield Chunk(request.key, length - 1, (1,), (0.0,), self.version)
            for request in row:
                size = request.max_new_tokens
                yield Sample(request.key, (1,) * size, (0.0,) * size, (Segment(self.version, size),), "length")


@pytest.mark.parametrize(("step_s", "max_new_tokens"), [(0.01, 6), (0.01, 1000), (0.5, 4), (3.0, 9)])
async def test_the_rate_is_that_of_full_seats(step_s: float, max_new_tokens: int) -> None:
    clock = Clock()
    engine = cast(Any, FakeEngine([], "x", step_s=step_s, clock=clock))
    contract = replace(ORDER.contract, max_new_tokens=max_new_tokens)
    rate = await tokens_per_s(engine, contract, clock=clock)
    assert rate == pytest.approx(4 / step_s, rel=0.35)
    assert clock.now_s < 40, "a slow engine is measured no longer than it must"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What happened, the speed of each engine, and which one fails."""
    made: dict[str, Any] = {"log": [], "rate": {"transformers": 1.0, "vllm": 2.0}, "fails": set()}

    async def judged(engine: Any, **_: Any) -> SelfTest:
        return SelfTest(0.25, None, None, 0.0)

    async def rate(engine: FakeEngine, contract: Any) -> float:
        made["log"].append(f"measure {engine.name}")
        return float(made["rate"][engine.name])

    monkeypatch.setattr(starting, "judge_engine", judged)
    monkeypatch.setattr(starting, "tokens_per_s", rate)
    return made


async def started(engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch, machine: Machine, **order: Any) -> Started:
    def build(name: str) -> Any:
        engine = FakeEngine(engines["log"], name)
        engine.fails = name in engines["fails"]
        return engine

    monkeypatch.setattr(starting, "_look", lambda _: machine)
    engine, answer = await start_engine(msgspec.structs.replace(ORDER, **{"engine": "auto", **order}), build)
    assert cast(Any, engine).name == answer.engine
    return answer


async def test_the_faster_engine_goes_on_without_a_second_start(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await started(engines, monkeypatch, LARGE)
    steps = "start transformers, measure transformers, close transformers, start vllm, measure vllm"
    assert ", ".join(engines["log"]) == steps
    assert (answer.engine, answer.k3, answer.num_seats) == ("vllm", 0.25, 4)
    assert answer.choice == "vllm 2 tokens/s; transformers 1 tokens/s"
    assert {rate.engine: rate.tokens_per_s for rate in answer.rates} == {"transformers": 1.0, "vllm": 2.0}
    engines["log"].clear()
    again = await started(engines, monkeypatch, LARGE, rates=answer.rates)
    assert (again.engine, engines["log"]) == ("vllm", ["start vllm"]), "what is remembered is not measured again"


async def test_the_slower_engine_is_closed_before_the_other_starts(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines["rate"]["transformers"] = 3.0
    assert (await started(engines, monkeypatch, LARGE)).engine == "transformers"
    assert engines["log"][-2:] == ["close vllm", "start transformers"]


async def test_where_vllm_does_not_start_transformers_serves_and_says_why(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines["fails"] = {"vllm"}
    answer = await started(engines, monkeypatch, LARGE)
    assert (answer.engine, answer.choice) == ("transformers", "transformers 1 tokens/s; no vllm: it did not start.")
    later = await started(engines, monkeypatch, LARGE, rates=BOTH)
    assert (later.engine, later.choice) == ("transformers", "no vllm: it did not start.")
    assert {rate.engine: rate.tokens_per_s for rate in later.rates} == {"transformers": 100.0, "vllm": 0.0}


async def test_where_no_engine_starts_there_is_an_error(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines["fails"] = {"vllm", "transformers"}
    for machine in (SMALL, LARGE):
        with pytest.raises(EngineError, match="did not start"):
            await started(engines, monkeypatch, machine)
    with pytest.raises(EngineError, match="did not start"):
        await started(engines, monkeypatch, LARGE, engine="vllm")


def test_what_a_machine_is_is_read_from_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    save_file({"a": np.zeros((5, 7), np.float32), "b": np.zeros(3, np.float32)}, weights)
    order = msgspec.structs.replace(ORDER, weights=str(weights), is_first=True, restraint=1)
    seen = starting._look(order)
    assert (seen.num_parameters, seen.is_first, seen.is_careful) == (38, True, True)


def test_rates_are_remembered_for_the_same_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    key = rates_key(tmp_path, num_seats=64, num_threads=1)
    assert recall(tmp_path, key) is None
    remember(tmp_path, key, ())
    assert recall(tmp_path, key) == (), "an engine has started here, unmeasured"
    remember(tmp_path, key, BOTH)
    assert recall(tmp_path, key) == BOTH
    others = [rates_key(tmp_path, num_seats=32, num_threads=1), rates_key(tmp_path, num_seats=64, num_threads=2)]
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    others.append(rates_key(tmp_path, num_seats=64, num_threads=1))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(engine_rates, "_release", lambda name: "9.9")
    others.append(rates_key(tmp_path, num_seats=64, num_threads=1))
    assert len({key, *others}) == 5
    assert [recall(tmp_path, other) for other in others] == [None] * 4
    (tmp_path / "engines.json").write_text('{"key": 3')
    assert recall(tmp_path, key) is None, "a damaged file"


def test_a_disk_that_does_not_take_the_rates_costs_the_rates_alone(tmp_path: Path) -> None:
    (tmp_path / engine_rates.FILE_NAME).mkdir()
    remember(tmp_path, "key", BOTH)
    assert recall(tmp_path, "key") is None
