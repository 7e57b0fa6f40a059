"""What the scheduler asks of dispatch plans, and the answer of a cell that has none."""

from dataclasses import dataclass
from typing import Protocol

from router_service.request import Request


@dataclass(frozen=True)
class PlannedRun:
    """Fragments that cover the next `num_tokens` tokens of a request, held by every rank."""

    fragment_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Unplanned:
    """Why the next tokens of a request have no plan. `wait`: it is on its way and worth waiting for."""

    reason: str
    wait: bool
    max_num_tokens: int | None = None
    """Up to where the next plan may begin."""
    fits_later: bool = False
    """There is a plan for a step that has more room, and still time to wait for one."""


class Plans(Protocol):
    @property
    def num_fragments(self) -> int:
        """That are made, or to be."""
        ...

    @property
    def num_bytes(self) -> int:
        """That any rank holds of them, at most."""
        ...

    def want(self, request: Request) -> None:
        """The request has a home rank and tokens to replay there: have their fragments made."""
        ...

    def cover(self, request: Request, limit: int) -> PlannedRun | Unplanned:
        """For the next tokens of a request that replays, at most `limit`."""
        ...

    def release(self, request: Request) -> None:
        """It replays no more. Idempotent."""
        ...

    def pump(self) -> None:
        """Between steps: moves on what is under way. Never waits."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Until there is progress, or the timeout has passed."""
        ...

    def take_evicted(self) -> list[int]:
        """Fragment ids that ranks may drop, for the next descriptor, once."""
        ...

    def clear(self) -> None:
        """No request replays, and nothing that was planned is of use any more."""
        ...


class NoPlans:
    """Everything replays negotiated."""

    num_fragments = num_bytes = 0

    def want(self, request: Request) -> None:
        return

    def cover(self, request: Request, limit: int) -> PlannedRun | Unplanned:
        return Unplanned("planned_off", wait=False)

    def release(self, request: Request) -> None:
        return

    def pump(self) -> None:
        return

    def wait(self, timeout_seconds: float) -> None:
        return

    def take_evicted(self) -> list[int]:
        return []

    def clear(self) -> None:
        return
