"""Weights under the owner's limits: the rate on loopback, by the clock on the wall, up and down."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.bandwidth import Throttle
from node.weights.blobs import BlobStore
from node.weights.content import body_of
from node.weights.fetch import FetchReport, fetch_version
from node.weights.service import MESSAGE_BYTES, WeightService
from protocol.manifest import Body
from protocol.v1 import peer_pb2
from protocol.v1.peer_pb2_grpc import PeerServiceStub
from tests.weights.test_fetch import nothing, open_channel, serving

MBIT_PER_S = 24.0
NUM_BYTES = 6_000_000
EXPECTED_S = NUM_BYTES * 8 / (MBIT_PER_S * 1e6)
TOLERANCE = 0.15


@pytest.fixture
def source(tmp_path: Path) -> tuple[BlobStore, Body]:
    blobs = BlobStore(tmp_path / "source")
    tensors = {"w": np.random.default_rng(0).normal(size=NUM_BYTES // 4).astype(np.float32)}
    return blobs, body_of(tensors, blobs, chunk_bytes=1 << 18)


async def fetch(
    source: tuple[BlobStore, Body], target: Path, *, up: Throttle | None = None, down: Throttle | None = None
) -> tuple[FetchReport, float]:
    """One fetch from one holder, and what it took."""
    blobs, body = source
    async with serving(1, WeightService(blobs, nothing, throttle=up)) as holder:
        begun_s = time.monotonic()
        report = await fetch_version(
            body,
            holders=[holder],
            blobs=BlobStore(target),
            channel_factory=open_channel,
            deadline_s=60.0,
            throttle=down,
        )
        return report, time.monotonic() - begun_s


@pytest.mark.parametrize("side", ["up", "down"])
async def test_loopback_keeps_to_the_limit(source: tuple[BlobStore, Body], tmp_path: Path, side: str) -> None:
    limit: Any = {side: Throttle(MBIT_PER_S)}
    report, took_s = await fetch(source, tmp_path / "target", **limit)
    (holder,) = report.holders.values()
    assert holder.num_bytes >= NUM_BYTES, "copies of chunks that hang elsewhere count, too"
    assert took_s == pytest.approx(holder.num_bytes * 8 / (MBIT_PER_S * 1e6), rel=TOLERANCE)


async def test_without_a_limit_loopback_is_much_faster(source: tuple[BlobStore, Body], tmp_path: Path) -> None:
    """The negative control: a limit that is ignored would not take the time that the test above asks for."""
    _, took_s = await fetch(source, tmp_path / "target")
    assert took_s < EXPECTED_S * (1 - TOLERANCE)


async def test_two_callers_share_the_upload(source: tuple[BlobStore, Body], tmp_path: Path) -> None:
    blobs, body = source
    service = WeightService(blobs, nothing, throttle=Throttle(MBIT_PER_S))
    async with serving(1, service) as holder:
        begun_s = time.monotonic()
        wanted = [
            fetch_version(
                body,
                holders=[holder],
                blobs=BlobStore(tmp_path / f"target{index}"),
                channel_factory=open_channel,
                deadline_s=60.0,
            )
            for index in range(2)
        ]
        await asyncio.gather(*wanted)
        took_s = time.monotonic() - begun_s
    assert service.num_bytes_served >= 2 * NUM_BYTES
    assert took_s >= 2 * EXPECTED_S * (1 - TOLERANCE)


async def test_under_a_small_limit_messages_are_small_and_a_fetch_may_take_its_time(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "source")
    digest = blobs.put(bytes(2 * MESSAGE_BYTES))
    async with serving(1, WeightService(blobs, nothing, throttle=Throttle(2.0))) as holder, open_channel(holder) as at:
        call = PeerServiceStub(at).FetchChunk(peer_pb2.FetchChunkRequest(digest=digest), timeout=20)
        first: Any = await call.read()
        call.cancel()
    assert len(first.data) == 62_500, "what passes in a quarter of a second"


async def test_a_deadline_that_the_limit_makes_impossible_is_put_off(
    source: tuple[BlobStore, Body], tmp_path: Path
) -> None:
    blobs, body = source
    async with serving(1, WeightService(blobs, nothing)) as holder:
        await fetch_version(
            body,
            holders=[holder],
            blobs=BlobStore(tmp_path / "target"),
            channel_factory=open_channel,
            deadline_s=0.5,
            throttle=Throttle(MBIT_PER_S),
        )


async def test_moments_of_a_trainer_that_rests_are_served(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "source")
    (tmp_path / "v3.bin").write_bytes(bytes(range(256)) * 2000)
    service = WeightService(blobs, nothing, moments_of=lambda version: tmp_path / f"v{version}.bin")
    async with serving(1, service) as holder, open_channel(holder) as at:
        stub = PeerServiceStub(at)
        parts = [part.data async for part in stub.FetchOptimizer(peer_pb2.FetchOptimizerRequest(version=3), timeout=20)]
        assert b"".join(parts) == bytes(range(256)) * 2000
        with pytest.raises(Exception, match=r"VERSION_TOO_OLD|not here"):
            await stub.FetchOptimizer(peer_pb2.FetchOptimizerRequest(version=4), timeout=20).read()
