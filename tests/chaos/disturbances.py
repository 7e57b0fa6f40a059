"""What is done to a cell, and when: drawn from a seed. Pure but for the signals."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.helpers.served import Served

KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP


@dataclass(frozen=True)
class Kind:
    """delays: after the streams were asked for, in seconds, from and to. do: with so many ranks."""

    name: str
    delays: tuple[float, float]
    do: Callable[[Served, random.Random, int], None]
    loses_streams: bool = False
    """Those of the killed process may end with a broken connection."""


def _signal_ranks(number: int, count: int) -> Callable[[Served, random.Random, int], None]:
    def do(served: Served, draw: random.Random, ep_size: int) -> None:
        for rank in draw.sample(range(ep_size), count):
            os.kill(served.pid_of_rank(rank), number)

    return do


def _kill_twice(served: Served, draw: random.Random, ep_size: int) -> None:
    """The second one while the ranks come back together."""
    first, second = draw.sample(range(ep_size), 2)
    os.kill(served.pid_of_rank(first), KILL)
    time.sleep(draw.uniform(0.1, 4.0))
    os.kill(served.pid_of_rank(second), KILL)


def _kill_http_server(served: Served, draw: random.Random, _ep_size: int) -> None:
    os.kill(draw.choice(sorted(served.pids_of("HttpServer"))), KILL)


KINDS = (
    Kind("a rank, while prompts are computed", (0.0, 1.0), _signal_ranks(KILL, 1)),
    Kind("a rank, while answers are generated", (2.0, 6.0), _signal_ranks(KILL, 1)),
    Kind("two ranks at once", (0.5, 6.0), _signal_ranks(KILL, 2)),
    Kind("a rank, and another while ranks come back", (0.5, 6.0), _kill_twice),
    Kind("a rank hangs", (0.5, 6.0), _signal_ranks(FREEZE, 1)),
    Kind("an HTTP server of two", (0.5, 6.0), _kill_http_server, loses_streams=True),
)


def drawn_kinds(seed: int, number: int) -> list[Kind]:
    """Every kind as often as the others, or once more, in a drawn order."""
    kinds = [KINDS[n % len(KINDS)] for n in range(number)]
    random.Random(seed).shuffle(kinds)
    return kinds
