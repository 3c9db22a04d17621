"""What the engine is to do for a lease: prompts, seeds, and the tokens to go on from. Impure: the child and the
coordinator.

Invariant: an order is made only of a prompt whose digest is the lease's, of the seed of the version under which the
slot was opened, and of a prefix that the coordinator can still take; what fails in that is left out with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from node.compute.messages import MakePrompts, Prompts, SlotOrder
from node.context import Node
from node.orders import Lease, SlotWork
from protocol.child import ChildProcess
from protocol.errors import HexcombError
from protocol.ids import SlotKey, TaskKey, Version
from protocol.rollout import Piece, trouble_in
from protocol.run import SamplingContract
from protocol.seeds import slot_seed
from protocol.tasks import prompt_digest

PROMPTS_DEADLINE_S = 60.0

log = structlog.get_logger("leases")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A slot that this node cannot fill; `is_fault` where that may be this node's doing: not where it is only late, nor
    where the coordinator gave it pieces that lead nowhere."""

    slot: SlotKey
    why: str
    is_fault: bool


async def make_orders(node: Node, child: ChildProcess, lease: Lease) -> tuple[list[SlotOrder], list[LeftOut]]:
    """Each slot of the lease, as an order or left out. Raises the error that ended the child."""
    prompts = await _prompts(node, child, lease)
    orders: list[SlotOrder] = []
    left_out: list[LeftOut] = []
    for work in lease.slots:
        made = await _order(node, work, prompts.get(work.slot.task))
        if isinstance(made, LeftOut):
            log.warning("slot left out", slot=str(made.slot), why=made.why)
            left_out.append(made)
        else:
            orders.append(made)
    return orders, left_out


async def _order(node: Node, work: SlotWork, prompt_ids: tuple[int, ...] | None) -> SlotOrder | LeftOut:
    if prompt_ids is None:
        return LeftOut(work.slot, "its prompt does not have the lease's digest", is_fault=True)
    trouble = prefix_trouble(work.pieces, node.spec.sampling)
    if trouble:
        return LeftOut(work.slot, f"its pieces cannot be gone on from: {trouble}", is_fault=False)
    loaded = node.state.loaded
    if work.pieces and loaded is not None and loaded[0] < work.pieces[-1].version:
        return LeftOut(work.slot, f"its tokens are of version {work.pieces[-1].version} already", is_fault=False)
    secret = await _secret(node, work.slot.version)
    if secret is None:
        return LeftOut(work.slot, f"the seed of version {work.slot.version} is not known", is_fault=False)
    prefix_ids = tuple(token for piece in work.pieces for token in piece.token_ids)
    return SlotOrder(str(work.slot), prompt_ids, slot_seed(secret, work.slot), prefix_ids)


def prefix_trouble(pieces: Sequence[Piece], contract: SamplingContract) -> str:
    """Why no rollout that begins with these pieces could be accepted; "" where one could."""
    if trouble := trouble_in(pieces, contract):
        return trouble
    token_ids = [token for piece in pieces for token in piece.token_ids]
    if not all(0 <= token < contract.vocab_size for token in token_ids):
        return "a token id is outside the vocabulary"
    if pieces and pieces[-1].is_sampled and token_ids[-1] in contract.stop_ids:
        return "its last token is a stop id"
    return "it is as long as a completion may be" if len(token_ids) >= contract.max_new_tokens else ""


async def _prompts(node: Node, child: ChildProcess, lease: Lease) -> dict[TaskKey, tuple[int, ...]]:
    """Prompts whose digest holds: regenerated here, or else as the lease gives them."""
    works = {work.slot.task: work for work in lease.slots}
    made = await _regenerate(child, list(works)) if may_regenerate(node) else {}
    chosen = {task: _checked(work, made.get(task)) for task, work in works.items()}
    return {task: prompt_ids for task, prompt_ids in chosen.items() if prompt_ids is not None}


def may_regenerate(node: Node) -> bool:
    """Whether this node makes prompts itself: it has what they are made from, and its owner allows it."""
    return node.spec.environment.origin in node.settings.environments


async def _regenerate(child: ChildProcess, tasks: list[TaskKey]) -> dict[TaskKey, tuple[int, ...]]:
    request = MakePrompts(tuple((task.environment, task.seed, task.index) for task in tasks))
    try:
        reply = await child.request(request, Prompts, deadline_s=PROMPTS_DEADLINE_S)
    except HexcombError as error:
        if child.is_closed:
            raise
        log.info("prompts not regenerated", why=error.sentence())
        return {}
    return dict(zip(tasks, reply.prompt_ids, strict=True))


async def _secret(node: Node, version: Version) -> bytes | None:
    manifest = node.versions.manifest(version)
    if manifest is None:
        try:
            manifest = node.versions.learn((await node.control.get_manifest(version)).manifest)
        except HexcombError as error:
            log.warning("no seed for a slot", version=version, why=error.sentence())
            return None
    return manifest.seal.secret


def _checked(work: SlotWork, made: tuple[int, ...] | None) -> tuple[int, ...] | None:
    for prompt_ids in (made, work.prompt_ids):
        if prompt_ids and prompt_digest(prompt_ids) == work.prompt_digest:
            return prompt_ids
    return None
