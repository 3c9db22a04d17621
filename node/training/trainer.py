"""A model with its optimizer's state under a version, and the next one staged beside it. Impure in its
model alone.

Invariants: what is in force changes by `commit` alone, and only to the staged version of that root; the
model's parameters are the flat weights, by name in sorted order, so that the flat vector is the manifest's
content; a state that does not have the digests of its manifest is never loaded.

Shape letters: P parameters.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import torch

from node.rollout.reference import score_probe
from node.torch_guard import block_broken_extras
from node.training import gradient as gradients
from node.training.evaluation import greedy_completions
from node.training.loss_metrics import MetricSums
from node.training.optimizer import WIRE_DTYPE, Moments, OptimizerState, Vector, bytes_of
from node.weights.blobs import BlobStore
from node.weights.content import open_tensors, store_chunks
from protocol.canary import probe_for
from protocol.errors import EngineError, ModelMissingError, RootMismatchError, RoundStaleError
from protocol.ids import Digest, RunId, Version
from protocol.lag import lag
from protocol.loss import LossSpec
from protocol.manifest import Body
from protocol.round import TrainSample
from protocol.run import SamplingContract

SLICE_TOKENS = 16_384
"""A share's gradient is computed in slices of about this many positions; between them the work can be
dropped.
"""
MAX_LOGITS = 1 << 26
"""A quarter of a gigabyte in float32."""
MIN_MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """A version as a trainer holds it."""

    body: Body
    state: OptimizerState


@dataclass(frozen=True, slots=True)
class ShareGradient:
    """The sum of the gradients over a share of the batch, and sums for its metrics."""

    vector_P: Vector
    num_tokens: int
    metrics: MetricSums


class Trainer:
    """Heavy methods block; the worker calls one at a time, in one thread."""

    def __init__(self, model: Any, in_force: TrainedVersion, *, device: str) -> None:
        self.model, self.device = model, device
        self.in_force = in_force
        self._moments_before: tuple[Version, Moments] | None = None
        self.staged: TrainedVersion | None = None
        self._micro_batch_tokens = micro_batch_tokens(vocab_size=int(model.config.vocab_size))
        self._bind(in_force.state.weights_P)

    @classmethod
    def load(cls, model_dir: Path, body: Body, *, weights: Path, optimizer_state: Path | None) -> "Trainer":
        """The trainer of a version. Raises `ModelMissingError`, `RootMismatchError` or `EngineError` on
        unfit files.
        """
        model, device = build_model(model_dir)
        names = [(name, tuple(p.shape), "F32") for name, p in gradients.trained_parameters(model)]
        if names != [(tensor.name, tensor.shape, tensor.dtype) for tensor in body.tensors]:
            raise EngineError(
                "this version cannot be trained",
                why="its tensors are not the model's parameters in float32, in the order of their names",
                remedy="Make version 0 by `hexcomb base create`.",
            )
        state = OptimizerState(read_weights(weights, body), *read_moments(optimizer_state, body))
        return cls(model, TrainedVersion(body, state), device=device)

    def gradient(
        self, samples: Sequence[TrainSample], *, dropped: threading.Event, loss: LossSpec | None = None
    ) -> ShareGradient:
        """The summed gradient over a share under the version in force; zeros for an empty share.

        Raises `RoundStaleError` soon after `dropped` is set.
        """
        vector_P = np.zeros(self.in_force.state.num_elements, np.float32)
        num_tokens, metrics = 0, MetricSums()
        for part in slices(samples, v_train=self.in_force.body.version):
            if dropped.is_set():
                raise RoundStaleError("a gradient was dropped", why="")
            result = gradients.batch_gradient(self.model, part, spec=loss, micro_batch_tokens=self._micro_batch_tokens)
            vector_P += result.vector_P.numpy()
            num_tokens += result.num_tokens
            metrics += result.metrics
        return ShareGradient(vector_P, num_tokens, metrics)

    def next_version(self, state: OptimizerState, blobs: BlobStore, *, run_id: RunId) -> TrainedVersion:
        """The version that the state makes, its chunks stored; put it into `staged` to make it ready for
        `commit`.
        """
        base = self.in_force.body
        body = replace(
            base,
            run_id=run_id,
            version=Version(base.version + 1),
            parent=base.root,
            chunks=store_chunks([bytes_of(state.weights_P)], blobs, chunk_bytes=base.chunk_bytes),
            optimizer=state.moments_digest,
        )
        return TrainedVersion(body, state)

    def commit(self, version: Version, root: Digest) -> None:
        """Puts the staged version in force; doing so twice is allowed. Raises `RootMismatchError` for any
        other.
        """
        if (self.in_force.body.version, self.in_force.body.root) == (version, root):
            return
        if self.staged is None or (self.staged.body.version, self.staged.body.root) != (version, root):
            raise RootMismatchError(
                f"version {version} cannot be put in force",
                why="this trainer does not hold the committed content of it",
                remedy="The trainer starts again from the committed version.",
            )
        self._moments_before = (self.in_force.body.version, self.in_force.state.moments)
        self.in_force, self.staged = self.staged, None
        self._bind(self.in_force.state.weights_P)

    def abort(self) -> None:
        """Drops what is staged."""
        self.staged = None

    def moments_after(self, version: Version) -> Moments | None:
        """The moments of the version in force, or of the one before it."""
        if version == self.in_force.body.version:
            return self.in_force.state.moments
        if self._moments_before is not None and self._moments_before[0] == version:
            return self._moments_before[1]
        return None

    def canary(self, version: TrainedVersion) -> tuple[float, ...]:
        """Log-probabilities of the probe under a version, by which engines find out whether they serve it."""
        self._bind(version.state.weights_P)
        try:
            return score_probe(self.model, probe_for(self.model.config.vocab_size))
        finally:
            self._bind(self.in_force.state.weights_P)

    def evaluate(self, prompts: Sequence[tuple[int, ...]], contract: SamplingContract) -> tuple[tuple[int, ...], ...]:
        """The most likely completion of each prompt under the version in force."""
        limit, stop_ids = contract.max_new_tokens, contract.stop_ids
        return tuple(greedy_completions(self.model, prompts, stop_ids=stop_ids, max_new_tokens=limit))

    def evaluate_other(
        self, prompts: Sequence[tuple[int, ...]], contract: SamplingContract, *, body: Body, weights: Path
    ) -> tuple[tuple[int, ...], ...]:
        """The same under another version, from its weight file. Raises `RootMismatchError` on a file that is not it."""
        self._bind(read_weights(weights, body))
        try:
            return self.evaluate(prompts, contract)
        finally:
            self._bind(self.in_force.state.weights_P)

    def _bind(self, weights_P: Vector) -> None:
        """Makes the model compute with these weights: as views of them on the CPU, as copies on a GPU."""
        flat_P = torch.from_numpy(weights_P)
        parameters = dict(gradients.trained_parameters(self.model))
        for span in gradients.flat_layout(self.model):
            view = flat_P[span.start : span.start + span.numel].view(span.shape)
            parameters[span.name].data = view.to(self.device)


def micro_batch_tokens(*, vocab_size: int) -> int:
    """Positions computed at once: their logits, of which the loss keeps several copies, are what fills the memory."""
    return max(MIN_MICRO_BATCH_TOKENS, min(SLICE_TOKENS, MAX_LOGITS // vocab_size))


def build_model(model_dir: Path) -> tuple[Any, str]:
    """The model of a folder's config.json in float32 with random weights, and the device that it is on."""
    block_broken_extras()
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():
        raise ModelMissingError(f"{model_dir} has no config.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.eval()  # no dropout: the policy that is trained is the one that is sampled
    return model.to(device), device


def read_weights(path: Path, body: Body) -> Vector:
    """The flat weights in a safetensors file. Raises `RootMismatchError` unless they are the body's
    content.
    """
    with open_tensors(path) as (tensors, data):
        specs = tuple(item.spec for item in tensors)
        weights_P = np.empty(sum(spec.num_elements for spec in specs), np.float32)
        into, position = weights_P.view(np.uint8).data, 0
        for item in tensors:
            into[position : position + item.spec.num_bytes] = data[item.start : item.start + item.spec.num_bytes]
            position += item.spec.num_bytes
    size = body.chunk_bytes
    digests = (blake3.blake3(into[start : start + size]).hexdigest() for start in range(0, len(into), size))
    if specs != body.tensors or tuple(digests) != body.chunks:
        raise RootMismatchError(f"the weights in {path} are not those of version {body.version}")
    return weights_P


def read_moments(path: Path | None, body: Body) -> tuple[Vector, Vector]:
    """First and second moments in a file; zeros for version 0. Raises `EngineError` unless they are the
    body's.
    """
    num_elements = sum(tensor.num_elements for tensor in body.tensors)
    if path is None and body.optimizer is None:
        return np.zeros(num_elements, np.float32), np.zeros(num_elements, np.float32)
    if path is None or body.optimizer is None:
        raise EngineError(f"version {body.version} cannot be trained without the optimizer's state after it")
    try:
        moments = np.fromfile(path, WIRE_DTYPE).astype(np.float32, copy=False)
    except OSError as error:
        raise EngineError(f"the optimizer's state {path} cannot be read", why=str(error.strerror)) from error
    if len(moments) != 2 * num_elements or blake3.blake3(bytes_of(moments)).hexdigest() != body.optimizer:
        raise EngineError(f"the optimizer's state in {path} is not the one after version {body.version}")
    return moments[:num_elements], moments[num_elements:]


def slices(samples: Sequence[TrainSample], *, v_train: Version) -> list[list[gradients.TrainSample]]:
    """The share in parts of like length, each of about `SLICE_TOKENS` positions."""
    parts: list[list[gradients.TrainSample]] = []
    for sample in sorted(samples, key=_length):
        if not parts or (len(parts[-1]) + 1) * _length(sample) > SLICE_TOKENS:
            parts.append([])
        parts[-1].append(
            gradients.TrainSample(
                name=sample.slot,
                prompt_ids=sample.prompt_ids,
                completion_ids=sample.completion_ids,
                behaviour_logprobs=sample.logprobs,
                mask=sample.mask,
                advantage=sample.advantage,
                lags=tuple(
                    lag(v_train=v_train, v_token=version) for version, length in sample.segments for _ in range(length)
                ),
            )
        )
    return parts


def _length(sample: TrainSample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def write_moments(path: Path, moments: Moments) -> None:
    """Puts the moments at `path` at once or not at all: first, then second, little-endian float32."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        for vector_P in moments:
            file.write(bytes_of(vector_P))
    temporary.replace(path)
