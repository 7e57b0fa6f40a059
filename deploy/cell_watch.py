"""While a cell serves: what ends is started again, or ends the cell."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.log import logger
from deploy.actor_calls import End, end_of
from deploy.engine_recovery import EngineRecovery
from deploy.launch import Cell
from deploy.rank_recovery import RankRecovery

WATCH_SECONDS = 1.0
DRAIN_WATCH_SECONDS = 0.2
RECOVERY_WATCH_SECONDS = 0.05
"""While ranks come back, somebody waits for each turn."""
FAREWELL_SECONDS = 8.0
"""A failed engine stays a moment, so that clients read their error."""

_LOG = logger("serve")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class CellWatch:
    """HTTP servers and, if the cell recovers, engine and ranks are started again. Methods return why the cell cannot go
    on."""

    def __init__(self, cell: Cell, recovery_limit_seconds: float) -> None:
        self._cell = cell
        self._recovers = recovery_limit_seconds > 0
        self._ranks = RankRecovery(cell.plan.ep_size, cell.ranks, cell.link)
        self._engine = EngineRecovery(
            cell.engine,
            fingerprint=lambda: cell.link.weights.fingerprint,
            on_back=self._engine_back,
            limit_seconds=recovery_limit_seconds,
        )

    def until(self, stop: threading.Event) -> str | None:
        servers = self._cell.http_servers
        while not stop.is_set():
            if (failure := self._cell.head.look()) is not None:
                return failure
            servers.start_due()
            servers.end_hanging()
            if (overdue := servers.end_overdue()) is not None:
                return overdue
            failure = self._turn(servers.calls, WATCH_SECONDS, servers.take)
            if failure is not None:
                return failure
        return None

    def drain(self, seconds: float, at_once: threading.Event) -> str | None:
        """Until the answers that have begun are given, `seconds` have passed, or `at_once`."""
        if at_once.is_set() or not seconds:
            say("stopping")
            return None
        say(f"stopping: answers may end within {seconds:g} s, another signal ends them now")
        deadline = time.monotonic() + seconds
        draining = self._cell.http_servers.drain(seconds)
        while draining and not at_once.is_set() and time.monotonic() < deadline:
            failure = self._turn(draining, DRAIN_WATCH_SECONDS, draining.remove)
            if failure is not None:
                return failure
        return None

    def _turn(
        self, others: list[Any], seconds: float, take_other: Callable[[Any], str | None]
    ) -> str | None:
        """Waits a little, and takes what has ended: engine and ranks itself, other calls by `take_other`."""
        cell = self._cell
        if (failure := self._engine.tick()) is not None:
            return failure
        if not self._engine.is_under_way:
            self._ranks.tick()  # its engine is told of all that it does
        if self._ranks.is_under_way or self._engine.is_under_way:
            seconds = RECOVERY_WATCH_SECONDS
        calls = [*cell.engine.calls, *cell.ranks.calls.values(), *others]
        ended, _ = ray.wait(calls, timeout=seconds)
        for call in ended:
            failure = self._take(call) if call not in others else take_other(call)
            if failure is not None:
                return failure
        return None

    def _take(self, call: Any) -> str | None:
        if call in self._cell.engine.calls:
            return self._take_engine(end_of(call))
        lost = self._cell.ranks.take_ended(call)
        if lost is None:
            return None  # of one that was lost before it ended
        if self._recovers:
            self._ranks.lost(*lost)
            return None
        return self._give_up(*lost)

    def _take_engine(self, end: End) -> str | None:
        if end.kind == "returned":
            return end.reason
        if not self._recovers:
            return f"the engine ended: {end.reason}"
        return self._engine.lost(end.reason)

    def _engine_back(self) -> None:
        self._cell.link.watch()
        self._ranks.engine_back()

    def _give_up(self, rank: int, reason: str) -> str:
        """Tells the engine, which ends every request with this error, and waits for it to have said so."""
        _LOG.error("rank lost rank=%d reason=%r", rank, reason)
        self._cell.link.rank_lost(rank, reason)
        ray.wait(self._cell.engine.calls, timeout=FAREWELL_SECONDS)
        return f"rank {rank} is lost: {reason}"
