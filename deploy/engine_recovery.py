"""An engine that is lost gets another in its place: at the same ports, so that its peers come back by themselves.

    its process ends, or hangs and is killed ─► a new one ─► it serves its channels ─► the ranks are brought together
                                                    ▲                │
                                                    └── it ends ◄────┘

Nothing here waits: `tick` looks at what has come of what was asked for.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from cluster.log import logger
from deploy.pulse import HANG_SECONDS, Pulse, killed_after
from router_service.engine_life import EngineLife

RETRY_SECONDS = 0.5
"""Between a start that failed and the next one."""
STEADY_SECONDS = 20.0
"""One that lived longer was not lost for the reason of the one before."""
MAX_IN_A_ROW = 6
"""More than answers are asked for again: one of them that ends every engine is given up before the cell is."""

_LOG = logger("recovery")
Call = Any
"""What a call to another process will give."""


class EngineProcess(Protocol):
    """The engine's process, in Ray."""

    @property
    def ports(self) -> tuple[int, int, int]:
        """Of the last one that has started."""
        ...

    def can_start(self) -> bool:
        """Whether `start` can be carried out now: not while Ray's head is away."""
        ...

    def start(self, life: EngineLife, fingerprint: str) -> Call:
        """A new one, when there is none. What comes of it is taken by `run`. fingerprint: of the weights that the
        ranks serve"""
        ...

    def run(self, started: Any) -> None:
        """It serves until it ends, which is then told to `EngineRecovery.lost`."""
        ...

    def kill(self) -> None:
        """Also one that is stopped. Idempotent."""
        ...

    def pulse(self) -> Call: ...

    def result(self, call: Call) -> tuple[bool, Any]:
        """As `rank_recovery.RankProcesses.result`."""
        ...


class EngineRecovery:
    """Methods return why the cell cannot go on, or None."""

    def __init__(
        self,
        process: EngineProcess,
        *,
        fingerprint: Callable[[], str],
        on_back: Callable[[], None],
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """fingerprint: of the weights that are served; on_back: the engine can be told something again.
        limit_seconds: from the loss on. clock: this host's monotonic one."""
        self._process = process
        self._fingerprint = fingerprint
        self._on_back = on_back
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._number = 0
        self._lost_seconds: float | None = None
        self._lost_reason = ""
        self._reason = ""
        """Of the last thing that failed: the loss, or a start since."""
        self._start: Call | None = None
        self._start_at = 0.0
        self._back_seconds = clock()
        self._num_in_a_row = 0
        self._pulse = Pulse(process.pulse, process.result, clock=clock)

    @property
    def is_under_way(self) -> bool:
        return self._lost_seconds is not None

    def lost(self, reason: str) -> str | None:
        """Its process has ended, or cannot go on."""
        return self._lost(reason, self._clock())

    def _lost(self, reason: str, end_seconds: float) -> str | None:
        """end_seconds: until when it may have done something."""
        _LOG.error("engine lost reason=%r", reason)
        self._process.kill()
        now = self._clock()
        is_same_reason = end_seconds - self._back_seconds < STEADY_SECONDS
        self._num_in_a_row = self._num_in_a_row + 1 if is_same_reason else 1
        self._reason = self._lost_reason = reason
        if self._num_in_a_row > MAX_IN_A_ROW:
            return (
                f"the engine ended {self._num_in_a_row} times, each within {STEADY_SECONDS:g} s of the time before: "
                f"{reason}"
            )
        self._lost_seconds, self._start, self._start_at = now, None, now
        self._number += 1
        return None

    def tick(self) -> str | None:
        if self._lost_seconds is None:
            if self._pulse.hangs():
                return self._lost(killed_after(HANG_SECONDS), self._pulse.asked_seconds)
            return None
        if self._clock() > self._lost_seconds + self._limit_seconds:
            return (
                f"the engine was lost and is not back within {self._limit_seconds:g} s (--recovery-limit): "
                f"{self._reason}"
            )
        if self._start is not None:
            self._look_at_start(self._start)
        elif self._clock() >= self._start_at and self._process.can_start():
            life = EngineLife(
                self._number, self._process.ports, self._lost_seconds, self._lost_reason
            )
            self._start = self._process.start(life, self._fingerprint())
        return None

    def _look_at_start(self, start: Call) -> None:
        done, result = self._process.result(start)
        if done:
            self._process.run(result)
            self._lost_seconds, self._start = None, None
            self._back_seconds = self._clock()
            self._pulse.begin()
            _LOG.warning("engine started again life=%d", self._number)
            self._on_back()
        elif result is not None:
            _LOG.warning("engine does not start reason=%r", result)
            self._process.kill()
            self._reason, self._start = str(result), None
            self._start_at = self._clock() + RETRY_SECONDS
