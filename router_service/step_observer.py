"""Who watches the loop: told of steps, tokens and ended requests. Metrics are one observer, benches another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.types import FinishReason
from cluster.worker_messages import StepResult
from router_service.request import Request
from router_service.scheduler import Schedule


@dataclass(frozen=True)
class StepTimeline:
    """Seconds of one step in the engine's thread, one part after the other.

    schedule: late routes taken in, chunks chosen, new sequences announced
    build:    routes to replay and the descriptor packed
    execute:  encoded, sent, run by all ranks, all results decoded
    update:   tokens accepted, blocks published
    """

    schedule: float
    build: float
    execute: float
    update: float

    @property
    def total(self) -> float:
        return self.schedule + self.build + self.execute + self.update

    def transfer(self, results: Sequence[StepResult]) -> float:
        """The part of `execute` outside the slowest rank's forward: encoding, sockets, wake-ups, skew, decoding."""
        return max(0.0, self.execute - max(result.timings.forward for result in results))

    def control(self, results: Sequence[StepResult]) -> float:
        """All that is not the slowest rank's forward."""
        return self.schedule + self.build + self.transfer(results) + self.update


class StepObserver(Protocol):
    def committed(
        self, schedule: Schedule, results: Sequence[StepResult], timeline: StepTimeline
    ) -> None: ...

    def token(self, request: Request, now: float) -> None: ...

    def preempted(self, request: Request) -> None: ...

    def admitted(self, request: Request) -> None:
        """It has blocks at its rank. Told each time."""
        ...

    def conflicted(self, request: Request, num_blocks: int) -> None:
        """So many blocks stay private because other experts are recorded for their tokens."""
        ...

    def planned_fragment(self, *, hit: bool) -> None:
        """A run of tokens to replay had a plan fragment already, or one is to be made."""
        ...

    def finished(self, request: Request, reason: FinishReason, now: float) -> None: ...
