"""The process of the reward functions without its sandbox: what the sandbox is measured against."""

from typing import Any

from coordinator import reward_worker
from coordinator.sandbox import Protection, Sandbox


class NoSandbox(Sandbox):
    """Takes nothing away."""

    def leave_world(self) -> None:
        return

    def close(self, readable: Any, **limits: int) -> tuple[Protection, ...]:
        return self._protections()


if __name__ == "__main__":
    reward_worker.Sandbox = NoSandbox  # type: ignore[misc]
    reward_worker.main()
