"""The summed gradient of a share of a batch: any split gives the whole, and padding changes nothing."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from node.base import TinyShape, build_tiny_model
from node.training.gradient import (
    TrainSample,
    batch_gradient,
    completion_logprobs,
    flat_layout,
    trained_parameters,
)
from protocol.errors import RolloutMalformedError

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return build_tiny_model(TinyShape(hidden=32, layers=2, heads=1, feed_forward=64), num_tokens=NUM_TOKENS, seed=3)


def draw_samples(model: nn.Module, num: int, *, seed: int = 0) -> list[TrainSample]:
    """Samples of several lengths whose behaviour policy is the model's own with some noise."""
    rng = random.Random(seed)
    samples = []
    for i in range(num):
        prompt = tuple(rng.randrange(3, NUM_TOKENS) for _ in range(rng.randint(1, 6)))
        completion = tuple(rng.randrange(3, NUM_TOKENS) for _ in range(rng.randint(1, 5)))
        blank = TrainSample(f"s{i}", prompt, completion, (0.0,) * len(completion), (True,) * len(completion), 1.0)
        logprobs = completion_logprobs(model, [blank])[0][0].tolist()
        samples.append(
            TrainSample(
                blank.name,
                prompt,
                completion,
                tuple(value + rng.gauss(0.0, 0.5) for value in logprobs),
                tuple(rng.random() < 0.9 for _ in completion),
                rng.choice([0.75, -0.25, 0.5]),
            )
        )
    return samples


@pytest.mark.parametrize("cuts", [(0, 20), (7, 20), (3, 11), (20, 20), (1, 2)])
def test_any_split_gives_the_gradient_of_the_whole(model: nn.Module, cuts: tuple[int, int]) -> None:
    samples = draw_samples(model, 20)
    whole = batch_gradient(model, samples)
    shares = [samples[: cuts[0]], samples[cuts[0] : cuts[1]], samples[cuts[1] :]]
    parts = [batch_gradient(model, share) for share in shares]
    together = torch.stack([part.vector_P for part in parts]).sum(dim=0)
    assert (together - whole.vector_P).norm() <= 1e-6 * whole.vector_P.norm()
    assert sum(part.num_tokens for part in parts) == whole.num_tokens == sum(sum(s.mask) for s in samples)
    assert sum(part.num_samples for part in parts) == whole.num_samples == 20
    metrics = parts[0].metrics + parts[1].metrics + parts[2].metrics
    assert metrics.means() == pytest.approx(whole.metrics.means(), rel=1e-4, abs=1e-6)


def test_micro_batches_change_nothing(model: nn.Module) -> None:
    samples = draw_samples(model, 20)
    whole = batch_gradient(model, samples, micro_batch_tokens=10_000)
    for limit in (1, 16, 37):
        cut = batch_gradient(model, samples, micro_batch_tokens=limit)
        assert (cut.vector_P - whole.vector_P).norm() <= 1e-6 * whole.vector_P.norm()


def test_an_empty_share_gives_zeros_of_the_right_size(model: nn.Module) -> None:
    empty = batch_gradient(model, [])
    assert empty.num_tokens == 0
    assert empty.vector_P.shape == (sum(p.numel() for p in model.parameters()),)
    assert not empty.vector_P.any()


def test_layout_is_sorted_gapless_and_names_tied_weights_once(model: nn.Module) -> None:
    layout = flat_layout(model)
    assert [span.name for span in layout] == sorted(span.name for span in layout)
    assert [span.start for span in layout] == [sum(s.numel for s in layout[:i]) for i in range(len(layout))]
    assert all(math.prod(span.shape) == span.numel for span in layout)
    assert [span.name for span in layout if "embed" in span.name or "lm_head" in span.name] == [
        "model.embed_tokens.weight"
    ]


def test_vector_is_what_plain_differentiation_gives(model: nn.Module) -> None:
    samples = draw_samples(model, 9)
    expected = torch.zeros(sum(p.numel() for p in model.parameters()))
    for sample in samples:
        logprob_T = completion_logprobs(model, [sample])[0][0]
        weight_T = torch.exp(logprob_T.detach() - torch.tensor(sample.behaviour_logprobs))
        live_T = torch.tensor(sample.mask) & (weight_T <= 5.0)
        loss = -(sample.advantage * weight_T * logprob_T)[live_T].sum()
        pairs = trained_parameters(model)
        gradients = torch.autograd.grad(loss, [p for _, p in pairs], allow_unused=True)
        expected += torch.cat([g.flatten() for g in gradients if g is not None])
    vector = batch_gradient(model, samples).vector_P
    assert (vector - expected).norm() <= 1e-5 * expected.norm()
    for span in flat_layout(model):
        assert vector[span.start : span.start + span.numel].norm() > 0, span.name


def test_padding_id_changes_nothing(model: nn.Module) -> None:
    samples = draw_samples(model, 12)
    one, other = batch_gradient(model, samples, pad_id=0), batch_gradient(model, samples, pad_id=17)
    assert torch.equal(one.vector_P, other.vector_P)
    assert one.metrics == other.metrics


def test_logprobs_are_the_models_own(model: nn.Module) -> None:
    samples = draw_samples(model, 6)
    together, entropy = (tensor.detach() for tensor in completion_logprobs(model, samples))
    for row, sample in enumerate(samples):
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        logprob_TV = torch.log_softmax(model(input_ids=ids).logits[0].float(), dim=-1).detach()
        for at, token in enumerate(sample.completion_ids):
            expected = logprob_TV[len(sample.prompt_ids) - 1 + at]
            assert float(together[row, at]) == pytest.approx(float(expected[token]), abs=1e-5)
            assert float(entropy[row, at]) == pytest.approx(float(-(expected.exp() * expected).sum()), abs=1e-4)


def test_a_refused_rollout_leaves_no_gradient_behind(model: nn.Module) -> None:
    good, bad = draw_samples(model, 2)
    spoilt = TrainSample("spoilt", bad.prompt_ids, (4,), (math.nan,), (True,), 1.0)
    with pytest.raises(RolloutMalformedError, match="spoilt"):
        batch_gradient(model, [good, spoilt], micro_batch_tokens=1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sample_of_unequal_lengths_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="one length"):
        TrainSample("s", (1,), (2, 3), (-0.5,), (True, True), 1.0)


def test_the_environments_tokens_are_read_and_not_learnt(model: nn.Module) -> None:
    """Two turns with a reply between them: the gradient is that of the sampled tokens, each after all that was said."""
    said, reply, answer = (5, 6, 7), (8, 9), (10, 11)
    ids, sampled = said + reply + answer, (True,) * 3 + (False,) * 2 + (True,) * 2
    own = completion_logprobs(model, [TrainSample("own", (4, 3), ids, (0.0,) * 7, (True,) * 7, 1.0)])[0][0].tolist()
    heard = tuple(value if alive else 0.0 for value, alive in zip(own, sampled, strict=True))

    def gradient(mask: tuple[bool, ...], logprobs: tuple[float, ...] = heard, ids: tuple[int, ...] = ids) -> Any:
        return batch_gradient(model, [TrainSample("s", (4, 3), ids, logprobs, mask, 0.5)])

    whole = gradient(sampled)
    assert whole.num_tokens == 5
    assert whole.metrics.k3 == pytest.approx(0.0, abs=1e-6), "the reply's log-probabilities are no mismatch"
    parts = [gradient(tuple(place == only for place in range(7))) for only in (0, 1, 2, 5, 6)]
    summed = torch.stack([part.vector_P for part in parts]).sum(dim=0)
    assert (whole.vector_P - summed).norm() <= 1e-6 * whole.vector_P.norm()
    learnt = gradient((True,) * 7, tuple(own))
    assert (learnt.vector_P - whole.vector_P).norm() > 1e-2 * whole.vector_P.norm()
    assert learnt.num_tokens == 7
    unheard = gradient((True,) * 5, heard[:3] + heard[5:], said + answer)
    assert (unheard.vector_P - whole.vector_P).norm() > 1e-2 * whole.vector_P.norm(), "the reply is in the context"
