"""What is done to a cell, and when: drawn from a seed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

from cluster.channel import FREE_PORTS
from tests.chaos.proc import listening_of, taking, waits_in_exchange
from tests.chaos.recoveries import RANKS_MEET, RANKS_START
from tests.chaos.scene import Scene, wait_until

ATTEMPTS = 40
"""To stop a rank in the middle of a step. It takes one or two."""
SLOW_SECONDS = 4.0


class Moment(Enum):
    """In the life of streams that were asked for together."""

    PROMPTS = auto()
    """While their prompts are computed."""
    ANSWERS = auto()
    """When most are in the middle of their answers."""


@dataclass(frozen=True)
class Kind:
    """do: returns when all of it is done. num_groups: that the ranks meet in before they go on, at least. num_starts:
    how often ranks are started in place of others before that, at least."""

    name: str
    do: Callable[[Scene], None]
    num_groups: int = 1
    num_starts: int = 0
    moment: Moment = Moment.ANSWERS


def _kill_ranks(count: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        for rank in scene.drawn_ranks(count):
            scene.kill(rank)

    return do


def _kill_in_exchange(scene: Scene) -> None:
    """A peer that is stopped keeps it there; the peer finds it dead when it goes on."""
    held, victim = scene.drawn_ranks(2)
    for _ in range(ATTEMPTS):
        scene.signal(held, SIGSTOP)
        is_there = waits_in_exchange(scene.served.pid_of_rank(victim))
        if is_there:
            scene.kill(victim)
        scene.signal(held, SIGCONT)
        if is_there:
            return
        time.sleep(scene.draw.uniform(0.0, 0.02))


def _freeze(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    scene.signal(rank, SIGSTOP)


def _slow_down(scene: Scene) -> None:
    """Stopped more often than not, for some seconds."""
    (rank,) = scene.drawn_ranks(1)
    end = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        scene.signal(rank, SIGSTOP)
        time.sleep(scene.draw.uniform(0.1, 0.6))
        scene.signal(rank, SIGCONT)
        time.sleep(scene.draw.uniform(0.05, 0.3))


def _kill_another_later(scene: Scene) -> None:
    """At whatever the others are then."""
    first, second = scene.drawn_ranks(2)
    scene.kill(first)
    time.sleep(scene.draw.uniform(0.1, 4.0))
    scene.kill(second)


def _kill_survivor_that_meets(scene: Scene) -> None:
    first, second = scene.drawn_ranks(2)
    scene.kill(first)
    scene.await_line(RANKS_MEET)
    scene.kill(second)


def _kill_survivor_that_waits(scene: Scene) -> None:
    first, second = scene.drawn_ranks(2)
    scene.kill(first)
    scene.await_line(RANKS_START)
    time.sleep(scene.draw.uniform(0.1, 1.0))
    scene.kill(second)


def _kill_replacement(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    if (pid := scene.kill_until_loading(rank)) is not None:
        os.kill(pid, SIGKILL)


def _exhaust_memory(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    scene.refuse_memory(scene.served.pid_of_rank(rank))


def _exhaust_memory_of_replacement(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    if (pid := scene.kill_until_loading(rank)) is not None:
        scene.refuse_memory(pid)


def _kill_http_server(scene: Scene) -> None:
    scene.kill_http_server(scene.drawn_http_server())


def _kill_http_server_meanwhile(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    http_server = scene.drawn_http_server()
    scene.kill(rank)
    scene.await_line(RANKS_START)
    scene.kill_http_server(http_server)


def _signal_engine(number: Signals) -> Callable[[Scene], None]:
    return lambda scene: os.kill(scene.served.pid_of("Engine"), number)


def _kill_engine_meanwhile(scene: Scene) -> None:
    (rank,) = scene.drawn_ranks(1)
    scene.kill(rank)
    scene.await_line(RANKS_START)
    os.kill(scene.served.pid_of("Engine"), SIGKILL)


def _take_port_of_engine(scene: Scene) -> None:
    """Until it has been tried in vain."""
    pid = scene.served.pid_of("Engine")
    address = scene.draw.choice(listening_of(pid, FREE_PORTS))
    os.kill(pid, SIGKILL)
    with taking(address):
        scene.await_line("engine does not start")


KINDS = (
    Kind("a rank, while prompts are computed", _kill_ranks(1), moment=Moment.PROMPTS),
    Kind("a rank, while answers are generated", _kill_ranks(1)),
    Kind("a rank, inside an exchange", _kill_in_exchange),
    Kind("two ranks at once", _kill_ranks(2)),
    Kind("a rank, and another within 4 s", _kill_another_later),
    Kind("a rank, and a survivor while the group is rebuilt", _kill_survivor_that_meets, 2),
    Kind("a rank, and a survivor while that loads", _kill_survivor_that_waits, num_starts=2),
    Kind("a rank, and its replacement while that loads", _kill_replacement, num_starts=2),
    Kind("a rank hangs (SIGSTOP)", _freeze),
    Kind("a rank is slow: stopped most of 4 s, in beats", _slow_down, 0),
    Kind("a rank gets no more memory", _exhaust_memory, moment=Moment.PROMPTS),
    Kind(
        "a rank, and its replacement gets no memory", _exhaust_memory_of_replacement, num_starts=2
    ),
    Kind("an HTTP server", _kill_http_server, 0),
    Kind("a rank, and an HTTP server meanwhile", _kill_http_server_meanwhile),
    Kind("the engine", _signal_engine(SIGKILL)),
    Kind("the engine hangs (SIGSTOP)", _signal_engine(SIGSTOP)),
    Kind("the engine, and one of its ports is taken", _take_port_of_engine),
    Kind("a rank, and the engine meanwhile", _kill_engine_meanwhile, num_starts=1),
)


def await_moment(scene: Scene, moment: Moment, prompt_seconds: float) -> None:
    """prompt_seconds: until all prompts were computed in the undisturbed run."""
    draw, streams = scene.draw, scene.streams
    match moment:
        case Moment.PROMPTS:
            time.sleep(draw.uniform(0.0, 0.8) * prompt_seconds)
        case Moment.ANSWERS:
            share = draw.uniform(0.02, 0.65)
            wait_until(lambda: streams.share_of_tokens >= share, f"{share:.0%} of all tokens")
