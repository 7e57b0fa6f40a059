"""What a disturbance is done to, and what it may wait for: lines of the log and states of processes, never a time."""

import os
import random
import resource
import signal
from collections.abc import Callable

import psutil

from tests.chaos.proc import children, clients_of, loads_weights
from tests.chaos.recoveries import Recoveries, recoveries
from tests.chaos.streams import Address, Streams
from tests.helpers.served import Served, address_of, eventually

PATIENCE_SECONDS = 60.0
LATE_LINES_SECONDS = 30.0
"""Ray brings the engine's lines a moment later."""


class Scene:
    """One cell, the streams that are open in it, and the draw of one disturbance."""

    def __init__(
        self, served: Served, streams: Streams, draw: random.Random, *, ep_size: int
    ) -> None:
        self.served = served
        self.streams = streams
        self.draw = draw
        self._ep_size = ep_size
        self._told = served.stderr_bytes
        self.lost_clients: set[Address] = set()
        """Of the HTTP servers that were killed, when they were."""

    def drawn_ranks(self, count: int) -> list[int]:
        return self.draw.sample(range(self._ep_size), count)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.served.pid_of_rank(rank), number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def drawn_http_server(self) -> int:
        """Its process, once each open stream has been accepted by some HTTP server: nobody can tell whose listening
        socket a connection is queued at."""
        pids = sorted(self.served.pids_of("HttpServer"))

        def are_accepted() -> bool:
            accepted = set[Address | None]().union(*map(self._clients_of, pids))
            return self.streams.open_clients <= accepted

        wait_until(are_accepted, "a server for each stream")
        return self.draw.choice(pids)

    def kill_http_server(self, pid: int) -> None:
        self.lost_clients |= self._clients_of(pid)
        os.kill(pid, signal.SIGKILL)

    def _clients_of(self, http_server: int) -> set[Address]:
        return clients_of(http_server, address_of(self.served.base_url)[1])

    def refuse_memory(self, pid: int) -> None:
        """The process gets none from now on, but what its allocator has at hand."""
        resource.prlimit(pid, resource.RLIMIT_AS, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_DATA, (0, 0))

    def told(self) -> str:
        """Lines since the streams were asked for."""
        return self.served.stderr_from(self._told)

    def await_line(self, text: str) -> None:
        wait_until(lambda: text in self.told(), f"{text!r} on stderr")

    def kill_until_loading(self, rank: int) -> int | None:
        """The process that loads the rank's weights in the killed one's place, as soon as it does. None when it was too
        quick."""
        raylet = psutil.Process(self.served.pid_of_rank(rank)).ppid()
        before = children(raylet)
        self.kill(rank)
        found: list[int] = []

        def look() -> bool:
            found[:] = filter(loads_weights, children(raylet) - before)
            return bool(found) or "rank ready" in self.told()

        wait_until(look, "a process that loads")
        return found[0] if found else None


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Looks often: the moment that is waited for may be short."""
    eventually(condition, PATIENCE_SECONDS, what, pause_seconds=0.002)


def told_recoveries(told: Callable[[], str]) -> Recoveries:
    """Once all of their lines have come. told: the log of a cell that is ready."""

    def look() -> Recoveries | None:
        found = recoveries(told())
        return found if found.are_told else None

    return eventually(look, LATE_LINES_SECONDS, "a recovery's line")
