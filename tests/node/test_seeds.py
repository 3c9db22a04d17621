"""Slot seeds: fixed by secret and slot, spread over 64 bits."""

from dataclasses import replace

import pytest

from protocol.ids import SlotKey, TaskKey, Version
from protocol.seeds import slot_seed

SECRET = bytes(range(32))
SLOT = SlotKey(Version(3), TaskKey("chain_sum", 7, 11), 2)


def test_the_seed_is_fixed() -> None:
    assert slot_seed(SECRET, SLOT) == slot_seed(SECRET, SLOT) == 362969577943447646


def test_every_part_of_the_slot_and_the_secret_matters() -> None:
    others = [
        replace(SLOT, version=Version(4)),
        replace(SLOT, sample=3),
        replace(SLOT, task=TaskKey("chain_sum", 8, 11)),
        replace(SLOT, task=TaskKey("chain_sum", 7, 12)),
        replace(SLOT, task=TaskKey("chain", 7, 11)),
    ]
    seeds = {slot_seed(SECRET, slot) for slot in others} | {slot_seed(bytes(32), SLOT)}
    assert len(seeds) == 6
    assert slot_seed(SECRET, SLOT) not in seeds


def test_seeds_fill_the_signed_range() -> None:
    seeds = [slot_seed(SECRET, replace(SLOT, sample=sample)) for sample in range(200)]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 200
    assert 60 < sum(seed < 0 for seed in seeds) < 140


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        slot_seed(b"short", SLOT)
