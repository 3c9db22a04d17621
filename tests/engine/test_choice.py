"""`auto` with the real engines: both are measured, the faster one serves, and the next start asks neither again."""

from typing import Any

import msgspec
import pytest

from node.compute.messages import Generate, SlotFilled, SlotOrder, StartRollout
from node.rollout.worker import RolloutJob
from protocol.run import EnvironmentSpec, SamplingContract

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while vllm is imported


def order_for(model: Any, **changes: Any) -> StartRollout:
    return StartRollout(
        engine="auto",
        model_dir=str(model.folder),
        version=0,
        weights=str(model.files["A"]),
        environment=EnvironmentSpec("chain_sum"),
        contract=SamplingContract(temperature=1.0, max_new_tokens=32, stop_ids=(1,), vocab_size=128),
        **changes,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_both_are_measured_and_the_faster_one_serves(tied_model: Any) -> None:
    job, started = await RolloutJob.start(order_for(tied_model))
    try:
        rates = {rate.engine: rate.tokens_per_s for rate in started.rates}
        assert rates.keys() == {"transformers", "vllm"}, started.choice
        assert all(rate > 0 for rate in rates.values()), started.choice
        assert rates[started.engine] == max(rates.values())
        events: list[msgspec.Struct] = []

        async def emit(event: msgspec.Struct) -> None:
            events.append(event)

        await job.handle(Generate("ff", (SlotOrder("s", (5, 9), seed=3),)), emit)
        assert [type(event) for event in events] == [SlotFilled]
    finally:
        await job.close()


async def test_a_first_start_of_a_small_model_waits_for_no_measurement(tied_model: Any) -> None:
    job, started = await RolloutJob.start(order_for(tied_model, is_first=True))
    await job.close()
    assert (started.engine, started.rates) == ("transformers", ())
    assert "measured at the next start" in started.choice
