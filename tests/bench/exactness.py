"""How exact the average is: any split of a batch against one machine's gradient, any cut of the vector against none.

`python -m tests.bench.training exactness`. The tiny model, and the trainer's own gradient and sum.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from node.base import TinyShape, build_tiny_model
from node.training.gradient import batch_gradient
from node.training.optimizer import Vector, bytes_of
from node.training.shards import PartIntake, reduce_parts
from node.training.wire import MESSAGE_BYTES
from protocol.ids import PeerId
from protocol.round import split_evenly
from tests.bench.table import Figure, at_least, at_most
from tests.training.test_gradient import NUM_TOKENS, draw_samples

NUM_SAMPLES, NUM_SPLITS, SEED = 64, 10, 0
MESSAGE_SIZES = (1000, 4100, 65_536, MESSAGE_BYTES)
SHARDS = (1, 2, 3, 4, 7, 64)
SENDER = PeerId("sender")

T = TypeVar("T")


def splits(batch: Sequence[T], chance: random.Random) -> Iterator[list[list[T]]]:
    """For 2, 3 and 4 members: one split with an empty share, and `NUM_SPLITS` at random places."""
    for num in (2, 3, 4):
        yield [list(batch), *([] for _ in range(num - 1))]
        for _ in range(NUM_SPLITS):
            shuffled = chance.sample(batch, len(batch))
            cuts = [0, *sorted(chance.randint(0, len(batch)) for _ in range(num - 1)), len(batch)]
            yield [shuffled[start:stop] for start, stop in pairwise(cuts)]


def average_in(parts: Sequence[Vector], num_shards: int, message_bytes: int, *, divisor: int) -> Vector:
    """The average of shards that arrive in messages of that size, put together again."""
    shards = split_evenly(len(parts[0]), (SENDER,) * num_shards)
    arrived = ([_arrived(part[s.start : s.stop], message_bytes) for part in parts] for s in shards)
    return np.concatenate([reduce_parts(of_shard, divisor=divisor).gradient_S for of_shard in arrived])


def _arrived(part_S: Vector, message_bytes: int) -> Vector:
    intake, data = PartIntake(len(part_S), "f32", sender=SENDER), bytes_of(part_S)
    for offset in range(0, len(data), message_bytes):
        intake.write(offset, bytes(data[offset : offset + message_bytes]))
    return intake.finish()


def distance(average_P: Vector, whole_P: Vector) -> float:
    """How far two vectors are from each other, in units of the second's length (both float64 inside)."""
    wide_P = whole_P.astype(np.float64)
    return float(np.linalg.norm(average_P - wide_P) / np.linalg.norm(wide_P))


def figures() -> list[Figure]:
    """Computes, for less than a minute."""
    torch.set_num_threads(1)
    model = build_tiny_model(TinyShape(), num_tokens=NUM_TOKENS, seed=3)
    batch, chance = draw_samples(model, NUM_SAMPLES), random.Random(SEED)
    whole = batch_gradient(model, batch)
    whole_P = whole.vector_P.numpy() / np.float32(whole.num_tokens)
    distances, parts = [], list[Vector]()
    for shares in splits(batch, chance):
        gradients = [batch_gradient(model, share) for share in shares]
        parts = [gradient.vector_P.numpy() for gradient in gradients]
        divisor = sum(gradient.num_tokens for gradient in gradients)
        distances.append(distance(reduce_parts(parts, divisor=divisor).gradient_S, whole_P))
    uncut = reduce_parts(parts, divisor=whole.num_tokens).gradient_S.tobytes()
    cuts = [(num, size) for num in SHARDS for size in MESSAGE_SIZES]
    num_equal = sum(average_in(parts, *cut, divisor=whole.num_tokens).tobytes() == uncut for cut in cuts)
    return [
        at_most(
            "average over any split to one machine's gradient, relative",
            max(distances),
            1e-6,
            anchor=f"largest of {len(distances)} splits among 2, 3 and 4, empty shares too; {len(whole_P):,} values",
        ),
        at_least(
            "shards and messages of any size that give the same bits",
            num_equal / len(cuts),
            1.0,
            anchor=f"{min(SHARDS)} to {max(SHARDS)} shards, messages of {min(MESSAGE_SIZES)} to {MESSAGE_BYTES} bytes",
        ),
    ]
