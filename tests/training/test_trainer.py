"""Whole rounds between trainers on loopback with real TLS: one set of bits, the one-machine result, commit, abort."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from node.compute.messages import AbortRound, Commit, Done, Evaluate, Evaluated, FetchOptimizerState, RoundDone
from node.rollout.reference import Reference
from node.training.gradient import batch_gradient, trained_parameters
from node.training.optimizer_fetch import fetch_optimizer_state
from node.training.trainer import (
    MAX_LOGITS,
    MIN_MICRO_BATCH_TOKENS,
    SLICE_TOKENS,
    Trainer,
    build_model,
    micro_batch_tokens,
    slices,
)
from node.weights.blobs import BlobStore
from node.weights.content import assemble
from protocol.canary import max_difference, probe_for
from protocol.errors import ChunkCorruptError, EngineError, RootMismatchError, VersionTooOldError
from protocol.ids import Digest, Version
from protocol.loss import LossSpec
from protocol.manifest import Body, digest_of
from protocol.round import TrainSample
from protocol.run import SamplingContract
from tests.training.trainers import (
    SPEC,
    make_samples,
    num_live,
    plan_for,
    run_all,
    seat,
    trainers,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def one_machine(model_dir: Path, batches: list[list[TrainSample]]) -> np.ndarray:
    """The weights after one torch.optim.AdamW step per batch, on one machine."""
    trainer_model, _ = build_model(model_dir)
    from safetensors.torch import load_file

    weights = load_file(model_dir / "model.safetensors")
    parameters = trained_parameters(trainer_model)
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(weights[name])
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in parameters],
        lr=SPEC.lr,
        betas=(SPEC.beta1, SPEC.beta2),
        eps=SPEC.eps,
        weight_decay=SPEC.weight_decay,
    )
    for step, batch in enumerate(batches, 1):
        flat = batch_gradient(
            trainer_model, list(itertools.chain(*slices(batch, v_train=Version(0))))
        ).vector_P / num_live(batch)
        start = 0
        for _, parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        torch.nn.utils.clip_grad_norm_([p for _, p in parameters], SPEC.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = SPEC.lr * min(1.0, step / SPEC.warmup_versions)
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, p in parameters]).numpy()


def bytes_in(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.parametrize("sizes", [(6, 6), (9, 3), (5, 7, 0)], ids=["two", "uneven", "three-one-empty"])
async def test_trainers_agree_in_every_bit_and_equal_one_machine(
    tmp_path: Path, model_dir: Path, sizes: tuple[int, ...]
) -> None:
    batches = [make_samples(sum(sizes), seed=seed) for seed in (1, 2)]
    ends = list(itertools.accumulate(sizes))
    async with trainers(len(sizes), tmp_path, model_dir) as seats:
        for batch in batches:
            shares = [batch[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
            results = await run_all(seats, plan, shares)
            bodies = {done.body for done in results if isinstance(done, RoundDone)}
            assert len(bodies) == 1, results
            body = Body.from_bytes(bodies.pop())
            assert body.parent == seats[0].body.root
            for item in seats:  # the moments lie on the disk before anybody hears of the version
                assert digest_of(bytes_in(f"{item.message.blob_dir}.moments")) == body.optimizer
            for item in seats:
                assert await item.job.handle(Commit(body.version, body.root)) == Done()
        states = [item.state for item in seats]
        assert seats[0].body.version == 2
        for state in states[1:]:
            for name in ("weights_P", "first_P", "second_P"):
                assert getattr(state, name).tobytes() == getattr(states[0], name).tobytes()
        expected = one_machine(model_dir, batches)
        np.testing.assert_allclose(states[0].weights_P, expected, rtol=0, atol=1e-6)
        assert not np.signbit(states[0].weights_P[states[0].weights_P == 0]).any()
        assert np.abs(expected - one_machine(model_dir, [])).max() > 1e-4


@pytest.mark.parametrize(
    "loss", [LossSpec(), LossSpec("loglinear"), LossSpec(aggregation="seq_mean_token_mean")], ids=repr
)
async def test_any_loss_on_two_trainers_has_the_gradient_of_one_machine(
    tmp_path: Path, model_dir: Path, loss: LossSpec
) -> None:
    """With unequal shares. One of the losses needs each token's age, one counts sequences."""
    batch = [replace(sample, segments=((Version(-2), len(sample.mask)),)) for sample in make_samples(9)]
    divisor = loss.divisor(num_tokens=num_live(batch), num_sequences=9)
    async with trainers(2, tmp_path, model_dir, loss=loss) as seats:
        model = seats[0].job._trainer.model
        samples = list(itertools.chain(*slices(batch, v_train=Version(0))))
        whole, default = (batch_gradient(model, samples, spec=spec).vector_P for spec in (loss, LossSpec()))
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=divisor)
        results = await run_all(seats, plan, [batch[:2], batch[2:]])
        bodies = {done.body for done in results if isinstance(done, RoundDone)}
        assert len(bodies) == 1, results
        body = Body.from_bytes(bodies.pop())
        await seats[0].job.handle(Commit(body.version, body.root))
        first = torch.from_numpy(seats[0].state.first_P)
    average = whole.double() / divisor
    clip = min(1.0, SPEC.max_grad_norm / float(average.norm()))
    expected = (1.0 - SPEC.beta1) * clip * average
    assert (first - expected).norm() <= 1e-6 * expected.norm()
    is_default = loss == LossSpec()
    assert torch.equal(whole, default) == is_default


def check_canary(canary: tuple[float, ...], model_dir: Path, weights: Path) -> None:
    """It is what the new weights say of the probe, and not what the base says."""
    new, base = Reference.load(model_dir, weights), Reference.load(model_dir, model_dir / "model.safetensors")
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    assert max_difference(canary, new.score(probe_for(vocab_size))) < 1e-5
    assert max_difference(canary, base.score(probe_for(vocab_size))) > 1e-5


async def test_committed_chunks_make_a_file_from_which_another_trainer_starts(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(2, tmp_path, model_dir) as seats:
        plan = plan_for(seats[0].body, [item.member for item in seats], num_tokens=num_live(batch))
        results = await run_all(seats, plan, [batch, []])
        assert isinstance(results[0], RoundDone), results
        body = Body.from_bytes(results[0].body)
        await seats[0].job.handle(Commit(body.version, body.root))
        weights, moments = tmp_path / "v1.safetensors", tmp_path / "moments"
        assemble(body, BlobStore(tmp_path / "blobs1"), weights)
        check_canary(results[0].canary, model_dir, weights)
        request = FetchOptimizerState(
            endpoint=seats[0].member.endpoint,
            peer_id=seats[0].member.peer_id,
            version=1,
            digest=body.optimizer or "",
            num_elements=seats[0].state.num_elements,
            path=str(moments),
            ca_certificate=seats[1].message.ca_certificate,
            leaf_certificate=seats[1].message.leaf_certificate,
            leaf_key=seats[1].message.leaf_key,
        )
        await fetch_optimizer_state(request)
        late = await seat(7, tmp_path, model_dir, body=body, state=str(moments), weights=str(weights))
        try:
            for name in ("weights_P", "first_P", "second_P"):
                assert getattr(late.state, name).tobytes() == getattr(seats[0].state, name).tobytes()
        finally:
            await late.job.close()

        import msgspec

        with pytest.raises(ChunkCorruptError):
            await fetch_optimizer_state(msgspec.structs.replace(request, digest="0" * 64))
        with pytest.raises(ChunkCorruptError):
            await fetch_optimizer_state(msgspec.structs.replace(request, num_elements=10))
        with pytest.raises(VersionTooOldError):
            await fetch_optimizer_state(msgspec.structs.replace(request, version=9))
        with pytest.raises(EngineError, match="without the optimizer's state"):
            Trainer.load(model_dir, body, weights=weights, optimizer_state=None)
        moments.write_bytes(moments.read_bytes()[:-4] + b"\0\0\0\1")
        with pytest.raises(EngineError, match="is not the one after version 1"):
            Trainer.load(model_dir, body, weights=weights, optimizer_state=moments)
        with pytest.raises(RootMismatchError):
            Trainer.load(model_dir, body, weights=model_dir / "model.safetensors", optimizer_state=moments)


async def test_only_the_staged_root_is_committed_and_abort_drops_it(tmp_path: Path, model_dir: Path) -> None:
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only]:
        before = (only.body, only.state, only.state.weights_P.copy())
        plan = plan_for(only.body, [only.member], num_tokens=num_live(batch))
        done = await only.run(plan, batch)
        body = Body.from_bytes(done.body)
        assert done.metrics["num_tokens"] == num_live(batch)
        with pytest.raises(RootMismatchError):
            await only.job.handle(Commit(body.version, Digest("0" * 64)))
        with pytest.raises(RootMismatchError):
            await only.job.handle(Commit(body.version + 1, body.root))
        assert (only.body, only.state) == before[:2]

        await only.job.handle(AbortRound("0.99"))
        assert only.job._trainer.staged is not None
        await only.job.handle(AbortRound(plan.round_id))
        with pytest.raises(RootMismatchError):
            await only.job.handle(Commit(body.version, body.root))
        assert only.state is before[1]
        assert only.state.weights_P.tobytes() == before[2].tobytes()

        again = await only.run(plan_for(only.body, [only.member], num_tokens=num_live(batch), attempt=1), batch)
        assert again.body == done.body
        await only.job.handle(Commit(body.version, body.root))
        await only.job.handle(Commit(body.version, body.root))
        assert only.body == body
        assert only.state.weights_P.tobytes() != before[2].tobytes()


async def test_evaluation_of_a_version_that_is_no_longer_in_force(tmp_path: Path, model_dir: Path) -> None:
    contract = SamplingContract(temperature=1.0, max_new_tokens=4, stop_ids=(), vocab_size=64)
    prompts = ((1, 2, 3), (4, 5))
    batch = make_samples(4)
    async with trainers(1, tmp_path, model_dir) as [only]:
        base, base_weights = only.body, str(tmp_path / "weights0.safetensors")
        before = await only.job.handle(Evaluate(prompts, contract))
        done = await only.run(plan_for(base, [only.member], num_tokens=num_live(batch)), batch)
        body = Body.from_bytes(done.body)
        await only.job.handle(Commit(body.version, body.root))
        in_force = only.state.weights_P.tobytes()
        after = await only.job.handle(Evaluate(prompts, contract))
        assert await only.job.handle(Evaluate(prompts, contract, base.to_bytes(), base_weights)) == before
        assert await only.job.handle(Evaluate(prompts, contract)) == after
        with pytest.raises(RootMismatchError):
            await only.job.handle(Evaluate(prompts, contract, body.to_bytes(), base_weights))
        assert only.state.weights_P.tobytes() == in_force


async def test_evaluation_is_greedy_and_names_the_version_in_force(tmp_path: Path, model_dir: Path) -> None:
    contract = SamplingContract(temperature=1.0, max_new_tokens=4, stop_ids=(), vocab_size=64)
    async with trainers(1, tmp_path, model_dir) as [only]:
        prompts = ((1, 2, 3), (4, 5), (1, 2, 3))
        result = await only.job.handle(Evaluate(prompts, contract))
        assert isinstance(result, Evaluated)
        assert result.version == 0
        assert [len(completion) for completion in result.completions] == [4, 4, 4]
        assert result.completions[0] == result.completions[2]


def test_a_large_vocabulary_makes_micro_batches_small() -> None:
    assert micro_batch_tokens(vocab_size=32) == SLICE_TOKENS
    assert micro_batch_tokens(vocab_size=49_152) * 49_152 <= MAX_LOGITS
    assert micro_batch_tokens(vocab_size=10**9) == MIN_MICRO_BATCH_TOKENS
