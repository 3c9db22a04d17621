"""Where samples are cut: by number, by age, and at every change of version."""

from hypothesis import given
from hypothesis import strategies as st

from node.rollout.chunks import Cutter, Span, segments_of
from node.rollout.engine import Segment
from protocol.ids import Version

ONE = [(Version(0), 0)]
TWO = [(Version(0), 0), (Version(3), 5)]


def cuts(cutter: Cutter, num_tokens: int, spans: list[Span], now_s: float = 0.0) -> list[tuple[int, int, Version]]:
    return list(cutter.cut(num_tokens, spans, now_s=now_s))


def test_full_chunks_leave_and_the_rest_waits_for_its_time() -> None:
    cutter = Cutter(4, 1.0)
    assert cuts(cutter, 3, ONE) == []
    assert cuts(cutter, 9, ONE, 0.5) == [(0, 4, 0), (4, 8, 0)]
    assert cuts(cutter, 9, ONE, 1.4) == []  # the ninth is younger than a second
    assert cuts(cutter, 10, ONE, 1.5) == [(8, 10, 0)]
    assert cuts(cutter, 10, ONE, 9.0) == []


def test_a_change_of_version_ends_a_chunk() -> None:
    cutter = Cutter(4, 1.0)
    assert cuts(cutter, 6, TWO) == [(0, 4, 0), (4, 5, 0)]
    assert cuts(cutter, 9, TWO) == [(5, 9, 3)]


def test_without_chunks_nothing_leaves() -> None:
    assert cuts(Cutter(0, 1.0), 100, TWO, 1e9) == []


def test_segments_are_the_lengths_of_spans() -> None:
    assert segments_of(TWO, 9) == (Segment(Version(0), 5), Segment(Version(3), 4))
    assert segments_of([], 0) == ()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    looks=st.lists(st.tuples(st.integers(0, 45), st.floats(0, 5)), max_size=20),
    max_tokens=st.integers(1, 6),
)
def test_chunks_have_no_hole_and_one_version(
    lengths: list[int], looks: list[tuple[int, float]], max_tokens: int
) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    total, now_s, cutter = sum(lengths), 0.0, Cutter(max_tokens, 1.0)
    found: list[tuple[int, int, Version]] = []
    for num_tokens, wait_s in sorted((min(num, total), wait) for num, wait in looks):
        now_s += wait_s
        spans = [(Version(i), start) for i, start in enumerate(starts) if start < num_tokens]
        found += cuts(cutter, num_tokens, spans, now_s)
        assert num_tokens - cutter.num_cut < max_tokens
        assert not spans or cutter.num_cut >= spans[-1][1]
    position = 0
    for start, stop, version in found:
        assert start == position
        assert 1 <= stop - start <= max_tokens
        assert starts[version] <= start
        assert stop <= starts[version] + lengths[version]
        position = stop
