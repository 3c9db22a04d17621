"""The names by which things are known. Pure.

An id never crosses a function boundary as a bare `str` or `int`; each is a NewType, so that mypy catches a
version passed where a task index is meant.
"""

from dataclasses import dataclass
from typing import NewType

RunId = NewType("RunId", str)
"""One training job: 32 lowercase hex digits, drawn when the organizer creates the run."""

PeerId = NewType("PeerId", str)
"""A node: the libp2p id (base58, `12D3Koo…`) of its Ed25519 key."""

Version = NewType("Version", int)
"""A non-negative integer that names one exact set of weights; 0 is the base model."""

LeaseId = NewType("LeaseId", str)
"""Permission to fill some slots until a deadline: 16 lowercase hex digits."""

RoundId = NewType("RoundId", str)
"""One attempt at the work that turns a version into the next: `<base version>.<attempt>`."""

InviteId = NewType("InviteId", str)
"""The public half of an invite: 16 lowercase hex digits."""

Digest = NewType("Digest", str)
"""A BLAKE3 digest, 64 lowercase hex digits; also the name of a chunk."""


@dataclass(frozen=True, slots=True, order=True)
class TaskKey:
    """A task: whoever has the environment regenerates the same prompt from it."""

    environment: str
    seed: int
    index: int

    def __str__(self) -> str:
        return f"{self.environment}:{self.seed}:{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class SlotKey:
    """One sample of one task, opened under one version; keeps its name when it moves to another node."""

    version: Version
    task: TaskKey
    sample: int

    def __str__(self) -> str:
        return f"v{self.version}/{self.task}/{self.sample}"
