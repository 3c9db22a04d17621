"""How much an engine may take of a machine: the expected use stays under the high-water mark, and one sample fits."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from node.rollout.memory import BLOCK_TOKENS, HIGH_WATER, MIN_CACHE_BYTES, Memory, room_for
from protocol.errors import ModelRefusedError

GIB = 1 << 30


def taken(num_tokens: int) -> int:
    """Tokens' worth of blocks that a growing sample of this length holds, counted block by block."""
    num_blocks = 0
    for position in range(num_tokens + 1):  # and the token that is written next
        num_blocks += position % BLOCK_TOKENS == 0
    return num_blocks * BLOCK_TOKENS


@given(
    free_bytes=st.integers(0, 64 * GIB),
    copies=st.sampled_from([1.2, 2.0]),
    share=st.sampled_from([0.05, 0.25, 0.85]),
    cap=st.sampled_from([GIB, 1 << 60]),
    weight_bytes=st.integers(1 << 20, 20 * GIB),
    per_token=st.integers(512, 1 << 20),
    max_len=st.integers(1, 5000),
    expected=st.integers(1, 6000),
    wanted=st.integers(1, 256),
)
def test_expected_use_is_at_most_the_high_water_mark(
    free_bytes: int,
    copies: float,
    share: float,
    cap: int,
    weight_bytes: int,
    per_token: int,
    max_len: int,
    expected: int,
    wanted: int,
) -> None:
    memory = Memory(free_bytes, copies, share, cap)
    try:
        room = room_for(
            memory,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=per_token,
            max_len=max_len,
            expected_tokens=expected,
            max_num_seqs=wanted,
        )
    except ModelRefusedError:
        most = (free_bytes - weight_bytes * copies) * share
        assert min(most, cap) * HIGH_WATER < per_token * taken(min(max_len, 64) + 2 * BLOCK_TOKENS)
        return
    assert 1 <= room.max_num_seqs <= wanted
    assert room.max_len <= max_len
    in_use = room.max_num_seqs * taken(min(expected, room.max_len)) * per_token
    assert in_use <= HIGH_WATER * room.cache_bytes + 1
    assert taken(room.max_len) * per_token <= room.cache_bytes
    assert room.cache_bytes <= max(MIN_CACHE_BYTES, min((free_bytes - weight_bytes * copies) * share, cap) + 2)
    assume(room.max_num_seqs < wanted)
    one_more = (room.max_num_seqs + 1) * taken(min(expected, room.max_len)) * per_token
    assert one_more > HIGH_WATER * min((free_bytes - weight_bytes * copies) * share, cap) - per_token


def test_a_small_machine_runs_fewer_and_then_shorter_samples() -> None:
    def room(free_bytes: int) -> tuple[int, int]:
        memory = Memory(free_bytes, 2.0, 0.25, GIB)
        found = room_for(
            memory,
            weight_bytes=540 << 20,
            kv_bytes_per_token=46_080,
            max_len=4352,
            expected_tokens=768,
            max_num_seqs=64,
        )
        return found.max_num_seqs, found.max_len

    assert room(16 * GIB) == (26, 4352)
    assert room(3 * GIB) == (12, 4352)
    assert room(1536 << 20)[1] < 4352
    with pytest.raises(ModelRefusedError, match="too large for this machine"):
        room(1 * GIB)
