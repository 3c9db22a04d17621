"""Where a growing sample is cut into chunks, the same for every engine. Pure.

A sample's versions are its spans: (version, index of its first token), in order. Invariant: chunks follow each other
without a hole, and no chunk holds tokens of two versions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from node.rollout.engine import Segment
from protocol.ids import Version

Span = tuple[Version, int]


@dataclass(slots=True)
class Cutter:
    """Cuts one sample, and remembers how many of its tokens have left; `since_s` is when it first saw one that had not.
    With `max_tokens` = 0 nothing ever leaves.
    """

    max_tokens: int
    interval_s: float
    num_cut: int = 0
    since_s: float | None = None

    def is_due(self, num_tokens: int, spans: Sequence[Span], *, now_s: float) -> bool:
        """Whether `cut` would cut a sample of so many tokens: a look that costs next to nothing."""
        num_new = num_tokens - self.num_cut
        if num_new < 1 or not self.max_tokens:
            return False
        if self.since_s is None:
            self.since_s = now_s
        is_old = now_s - self.since_s >= self.interval_s
        return num_new >= self.max_tokens or is_old or self.num_cut < spans[-1][1]

    def cut(self, num_tokens: int, spans: Sequence[Span], *, now_s: float) -> Iterator[tuple[int, int, Version]]:
        """The chunks that are due of a sample of so many tokens, as (start, stop, version)."""
        for version, _, end in _bounded(spans, num_tokens):
            while self.num_cut < end and self.is_due(num_tokens, spans, now_s=now_s):
                start, self.num_cut = self.num_cut, min(self.num_cut + self.max_tokens, end)
                self.since_s = None
                yield start, self.num_cut, version


def segments_of(spans: Sequence[Span], num_tokens: int) -> tuple[Segment, ...]:
    """The spans of a sample of so many tokens by their lengths."""
    return tuple(Segment(version, end - start) for version, start, end in _bounded(spans, num_tokens))


def _bounded(spans: Sequence[Span], num_tokens: int) -> Iterator[tuple[Version, int, int]]:
    for position, (version, start) in enumerate(spans, 1):
        yield version, start, spans[position][1] if position < len(spans) else num_tokens
