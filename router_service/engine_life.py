"""Which of a cell's engines a process is: its first one, or one that was started in place of another that is lost."""

import time
from dataclasses import dataclass

from cluster.types import StepId

STEPS_OF_A_LIFE = 1 << 40
"""More than one engine makes: what ranks still send for a step of an engine before is told by its id."""


@dataclass(frozen=True)
class EngineLife:
    """lost_seconds: of this host's monotonic clock, when the one before was found to be lost."""

    number: int = 0
    """Of engines before."""
    ports: tuple[int, int, int] = (0, 0, 0)
    """Of clients, workers and routes: those of the engine before, whose peers come back to them. 0: any free one."""
    lost_seconds: float | None = None
    lost_reason: str = ""
    """Why the one before was lost."""

    @property
    def first_step(self) -> StepId:
        return StepId(self.number * STEPS_OF_A_LIFE)

    def after_this(self, ports: tuple[int, int, int]) -> "EngineLife":
        """ports: that this one has taken."""
        return EngineLife(self.number + 1, ports, time.monotonic())
