"""What a rollout engine is: the one interface that vLLM and plain transformers both answer to.

The engine knows nothing of tokenizers, tasks or the network: token ids go in, token ids come out, and every
token carries the version of the weights that sampled it. Invariant: after `load(v)` returns, every further
token, of running samples too, is sampled from exactly the weights of v. Pure: types alone.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from protocol.canary import Probe
from protocol.ids import Version

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample. `key` is the caller's own name for it; `seed` fixes its noise (64 bits,
    signed).

    `first_position` is the place in the completion of the first token to sample: the number of completion
    tokens that already stand at the end of `prompt_ids`, where a slot goes on that began elsewhere.
    Temperature 0 is greedy.
    """

    key: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of a sample that is under way, all sampled from `version`. `start` is the position of the
    first in the completion, counted as `SampleRequest.first_position` is.
    """

    key: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_tokens` consecutive tokens sampled from one version."""

    version: Version
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished completion: `token_ids` and `logprobs` (natural log, at temperature 1) have one length, and
    so many tokens are covered by `segments` in order. A stop id, where one ended the sample, is its last
    token. It is whole: what left before in chunks is in it again.
    """

    key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """Continuous sampling with in-place weight updates. All methods raise `EngineError` when the engine is
    lost.
    """

    @property
    def version(self) -> Version:
        """The version whose weights are loaded now."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Samples that run at a time; once started, no more than the memory allows."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the model's output head."""
        ...

    @property
    def dtype(self) -> str:
        """What it computes in, by torch's name."""
        ...

    async def start(self, model_dir: Path, version: Version, weights: Path) -> None:
        """Loads configuration from `model_dir` (a Hugging Face folder) and weights from the safetensors file
        `weights`.
        """
        ...

    def check(self, request: SampleRequest) -> None:
        """Raises `EngineError` for a request that the model cannot take."""
        ...

    def generate(
        self, requests: Sequence[SampleRequest], *, chunk_tokens: int = 0, chunk_s: float = 1.0
    ) -> AsyncIterator[Chunk | Sample]:
        """Samples all requests, joining those already running, and yields each as it finishes.

        With `chunk_tokens` it yields chunks of those under way too, each of at most so many tokens: when there are so
        many new ones, when `chunk_s` has passed since the last, and at a change of version. What is sampled after the
        last chunk comes with the `Sample` alone.
        """
        ...

    async def stop(self, keys: Collection[str]) -> None:
        """Ends the running samples of these keys at once: each comes as a `Sample` with the reason `abort`, with or
        without what was sampled. Keys that are not running are ignored.
        """
        ...

    async def load(self, version: Version, weights: Path, *, probe: Probe | None = None) -> tuple[float, ...]:
        """Swaps in the safetensors file `weights` between two tokens: pause, load, clear the cache, resume. Returns the
        probe's log-probabilities under them, scored ahead of every sample that waits for its next token.

        Names, shapes and dtypes must equal those of the start; otherwise `WeightsUnfitError`, and the old weights
        stay. When loading fails later they are restored, and it raises `EngineError`.
        """
        ...

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each completion token under the loaded weights, temperature 1."""
        ...

    async def close(self) -> None:
        """Ends every process and thread of the engine; running samples finish as `abort`."""
        ...
