"""While a cell serves: what ends is started again, or ends the cell."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.log import logger
from deploy.actor_calls import end_of
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
    """HTTP servers and, if the cell recovers, ranks are started again. Methods return why the cell cannot go on."""

    def __init__(self, cell: Cell, *, recovers: bool) -> None:
        self._cell = cell
        self._recovers = recovers
        self._recovery = RankRecovery(cell.plan.ep_size, cell.ranks, cell.link)

    def until(self, stop: threading.Event) -> str | None:
        servers = self._cell.http_servers
        while not stop.is_set():
            servers.start_due()
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
        self._recovery.tick()
        if self._recovery.is_under_way:
            seconds = RECOVERY_WATCH_SECONDS
        calls = [cell.engine_ref, *cell.ranks.calls.values(), *others]
        ended, _ = ray.wait(calls, timeout=seconds)
        for call in ended:
            failure = self._take(call) if call not in others else take_other(call)
            if failure is not None:
                return failure
        return None

    def _take(self, call: Any) -> str | None:
        lost = self._cell.ranks.take_ended(call)
        if lost is None:
            end = end_of(call)
            return end.reason if end.kind == "returned" else f"the engine ended: {end.reason}"
        if self._recovers:
            self._recovery.lost(*lost)
            return None
        return self._give_up(*lost)

    def _give_up(self, rank: int, reason: str) -> str:
        """Tells the engine, which ends every request with this error, and waits for it to have said so."""
        _LOG.error("rank lost rank=%d reason=%r", rank, reason)
        self._cell.link.rank_lost(rank, reason)
        ray.wait([self._cell.engine_ref], timeout=FAREWELL_SECONDS)
        return f"rank {rank} is lost: {reason}"
