"""Writes a journal and says what is durable, until it is killed. Run by `test_journal.py` as a process of its own."""

import sys
from pathlib import Path

from coordinator.core.facts import RolloutAccepted
from coordinator.journal import Entry, Journal
from tests.coordinator.world import RUN_ID, World


def main() -> None:
    """Accepts rollouts for ever; prints each slot after its COMMIT."""
    world, journal = World(), Journal(Path(sys.argv[1]), run_id=RUN_ID)
    world.start()
    num_written = 0
    while True:
        grant = world.lease(num_slots=4)
        for slot in grant.slots:
            world.submit(grant, slot)
            facts, num_written = tuple(world.facts[num_written:]), len(world.facts)
            bodies = tuple((fact.slot, b"body") for fact in facts if isinstance(fact, RolloutAccepted))
            journal.append([Entry(world.now_ms, facts, bodies)], state=world.core.state)
            print(slot, flush=True)
            world.score(slot)
        if world.core.state.round is not None:
            world.finish_round()
            world.see_all()


if __name__ == "__main__":
    main()
