"""The running samples of the transformers engine: one batch of key-value caches, grown and shrunk between
steps.

Rows are padded on the left, so that all end in the same column: a new row joins by prefilling alone and
padding the shorter cache, a finished one leaves by selection. Invariant: every cached key and value was
computed from the weights in use; after `recompute` nothing of the old weights is left. Synchronous, used by
one thread; impure (torch).

Shapes: B rows, U distinct contexts, T columns, V vocabulary, H key-value heads, D head size.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DynamicCache

from node.rollout.chunks import Cutter, Span, segments_of
from node.rollout.engine import Chunk, FinishReason, Sample, SampleRequest
from node.rollout.noise import perturb
from protocol.errors import EngineError
from protocol.ids import Version

MAX_PREFILL_TOKENS = 4096  # columns times contexts of one prefill pass; bounds its memory


@dataclass(slots=True, eq=False)
class Row:
    """One sample on its way. `deliver` is called from the decoder's thread, with chunks as `cutter` cuts them and then
    once with how it ended.
    """

    request: SampleRequest
    deliver: Callable[[Chunk | Sample | EngineError], None]
    cutter: Cutter
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.token_ids)

    def push(self, token: int, logprob: float, version: Version) -> FinishReason | None:
        """Appends a token; the reason to finish, if it is the last."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.token_ids)))
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def advance(self, now_s: float) -> None:
        """Delivers the chunks that are due."""
        if not self.cutter.is_due(len(self.token_ids), self.spans, now_s=now_s):
            return
        key, first = self.request.key, self.request.first_position
        for start, stop, version in self.cutter.cut(len(self.token_ids), self.spans, now_s=now_s):
            ids, logprobs = tuple(self.token_ids[start:stop]), tuple(self.logprobs[start:stop])
            self.deliver(Chunk(key, first + start, ids, logprobs, version))

    def finish(self, reason: FinishReason) -> None:
        segments = segments_of(self.spans, len(self.token_ids))
        self.deliver(Sample(self.request.key, tuple(self.token_ids), tuple(self.logprobs), segments, reason))


@dataclass(slots=True)
class _Batch:
    """Rows in step: `mask_BT` is 1 where a column holds a token of the row; layers hold keys and values (B,
    H, T, D).
    """

    rows: list[Row]
    mask_BT: torch.Tensor
    cache: DynamicCache

    def take(self, index: Sequence[int], rows: list[Row]) -> None:
        """Becomes `rows`, of which row i has the cache that row `index[i]` had; drops columns without any
        token.
        """
        index_B = torch.tensor(index, device=self.mask_BT.device)
        mask_BT = self.mask_BT[index_B]
        first = int(mask_BT.argmax(dim=1).min())
        self.rows = rows
        self.mask_BT = mask_BT[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index_B, :, first:]
            layer.values = layer.values[index_B, :, first:]

    def join(self, other: "_Batch") -> None:
        """Takes the rows of `other` in, below its own."""
        num_columns = max(self.mask_BT.shape[1], other.mask_BT.shape[1])
        self.rows += other.rows
        self.mask_BT = _stacked(self.mask_BT, other.mask_BT, num_columns=num_columns)
        for layer, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = _stacked(layer.keys, theirs.keys, num_columns=num_columns)
            layer.values = _stacked(layer.values, theirs.values, num_columns=num_columns)


def _stacked(first: torch.Tensor, second: torch.Tensor, *, num_columns: int) -> torch.Tensor:
    """Both, padded on the left of the column axis (1 of a mask, 2 of keys) and put below each other."""
    axis = 1 if first.dim() == 2 else 2
    tail = (0, 0) * (first.dim() - axis - 1)
    padded = [F.pad(part, (*tail, num_columns - part.shape[axis], 0)) for part in (first, second)]
    return torch.cat(padded)


class Decoder:
    """Samples from `model`, at most `max_num_seqs` rows at once; the others wait in order."""

    def __init__(self, model: Any, version: Version, *, max_num_seqs: int) -> None:
        self.version = version
        self._model = model
        self._device = next(model.parameters()).device
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Row] = []
        self._batch: _Batch | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._batch is not None

    @property
    def rows(self) -> list[Row]:
        """Every unfinished row."""
        return (self._batch.rows if self._batch else []) + self._waiting

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting += rows

    def remove(self, rows: Sequence[Row]) -> None:
        """Forgets rows without delivering them; those that have finished are ignored."""
        gone = {id(row) for row in rows}
        self._waiting = [row for row in self._waiting if id(row) not in gone]
        if self._batch:
            self._keep([i for i, row in enumerate(self._batch.rows) if id(row) not in gone])

    def stop(self, keys: Collection[str]) -> None:
        """Ends rows as `abort`."""
        stopped = [row for row in self.rows if row.request.key in keys]
        for row in stopped:
            row.finish("abort")
        self.remove(stopped)

    def recompute(self, version: Version) -> None:
        """Throws the caches away and goes on under `version`: the model's weights have just been replaced."""
        self.version = version
        self._waiting, self._batch = self.rows, None

    def step(self) -> None:
        """One more token for every running row, and the first one for those that fit in beside them."""
        with torch.inference_mode():
            running = self._batch
            if running:
                self._decode(running)
            num_free = self._max_num_seqs - (len(self._batch.rows) if self._batch else 0)
            joining, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
            if joining:
                self._prefill(joining)

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each completion token, at temperature 1."""
        if not completion_ids:
            return ()
        with torch.inference_mode():
            ids_1T = torch.tensor([[*prompt_ids, *completion_ids]], device=self._device)
            output = self._model(input_ids=ids_1T, use_cache=False, logits_to_keep=len(completion_ids) + 1)
            logprobs_TV = output.logits[0, :-1].float().log_softmax(-1)
            chosen_T1 = ids_1T[0, -len(completion_ids) :, None]
            return tuple(logprobs_TV.gather(1, chosen_T1)[:, 0].tolist())

    def _decode(self, batch: _Batch) -> None:
        ids_B1 = torch.tensor([[row.token_ids[-1]] for row in batch.rows], device=self._device)
        batch.mask_BT = F.pad(batch.mask_BT, (0, 1), value=1)
        logits_BV = self._forward(ids_B1, batch.mask_BT, batch.cache)
        self._keep(self._sample(logits_BV, batch.rows))

    def _prefill(self, rows: Sequence[Row]) -> None:
        """Computes each distinct context once, and gives every row of it a copy."""
        sharers: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            sharers.setdefault(row.context(), []).append(row)
        for contexts in _chunks(sorted(sharers, key=len)):
            num_columns = len(contexts[-1])
            pads = [num_columns - len(ids) for ids in contexts]
            ids_UT = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, contexts, strict=True)])
            mask_UT = torch.arange(num_columns) >= torch.tensor(pads)[:, None]
            mask_UT, ids_UT = mask_UT.long().to(self._device), ids_UT.to(self._device)
            cache = DynamicCache()
            logits_UV = self._forward(ids_UT, mask_UT, cache)
            which = [u for u, ids in enumerate(contexts) for _ in sharers[ids]]
            joining = [row for ids in contexts for row in sharers[ids]]
            left = self._sample(logits_UV[which], joining)
            if left:
                self._join([joining[i] for i in left], [which[i] for i in left], mask_UT, cache)

    def _join(self, rows: list[Row], which: list[int], mask_UT: torch.Tensor, cache: DynamicCache) -> None:
        """Adds `rows` to the batch; row i goes on from context `which[i]` of a prefill."""
        part = _Batch([], mask_UT, cache)
        part.take(which, rows)
        if self._batch:
            self._batch.join(part)
        else:
            self._batch = part

    def _forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits (B, V), float32, after the last column; extends `cache` by the columns of `ids_BT`."""
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        output = self._model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1].float()
        return logits_BV

    def _sample(self, logits_BV: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """Gives each row its next token and finishes those that end; the indices of the others."""
        perturbed_BV = perturb(
            logits_BV,
            temperatures=[row.request.temperature for row in rows],
            seeds=[row.request.seed for row in rows],
            positions=[row.request.first_position + len(row.token_ids) for row in rows],
        )
        token_B = perturbed_BV.argmax(-1)
        logprob_B = logits_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]
        left, now_s = [], time.monotonic()
        for i, (row, token, logprob) in enumerate(zip(rows, token_B.tolist(), logprob_B.tolist(), strict=True)):
            reason = row.push(token, logprob, self.version)
            if reason:
                row.finish(reason)
            else:
                row.advance(now_s)
                left.append(i)
        return left

    def _keep(self, index: Sequence[int]) -> None:
        if not self._batch or len(index) == len(self._batch.rows):
            return
        if index:
            self._batch.take(index, [self._batch.rows[i] for i in index])
        else:
            self._batch = None


def _chunks(contexts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Contexts, shortest first, in groups whose padded size is at most `MAX_PREFILL_TOKENS`, or of one."""
    group: list[tuple[int, ...]] = []
    for ids in contexts:
        if group and (len(group) + 1) * len(ids) > MAX_PREFILL_TOKENS:
            yield group
            group = []
        group.append(ids)
    if group:
        yield group


def copy_weights(model: Any, weights: Path) -> None:
    """Writes the file over the parameters in place; a tied head follows its embeddings. Reads all before it
    writes.
    """
    tensors = load_file(weights)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
