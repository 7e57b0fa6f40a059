"""What a disturbance is done to, and what it may wait for: lines of the log and states of processes, never a time."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable

import psutil

from tests.chaos.proc import children, loads_weights
from tests.chaos.streams import Streams
from tests.helpers.served import Served, eventually

PATIENCE_SECONDS = 60.0
RANKS_MEET = "pointsman.recovery ranks meet"
"""A line of the launcher: it has told survivors and new processes where."""


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
        self.began = time.monotonic()

    def drawn_ranks(self, count: int) -> list[int]:
        return self.draw.sample(range(self._ep_size), count)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.served.pid_of_rank(rank), number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

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
