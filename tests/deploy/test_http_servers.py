"""Starts of HTTP servers that never end, on a clock that the test moves. No Ray: nobody asks for a call's result."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.actors.http_server import StartedHttpServer
from deploy.http_servers import (
    MAX_SLOW_STARTS,
    START_PAUSE_SECONDS,
    START_SECONDS,
    HttpServers,
)
from deploy.pulse import HANG_SECONDS, PULSE_SECONDS
from router_service.http_server import BoundPorts

A_LITTLE = 0.1


@dataclass(eq=False)
class Method:
    """`remote` gives a call that nobody answers."""

    calls: list[object] = field(default_factory=list)

    def remote(self, *_: object) -> object:
        self.calls.append(object())
        return self.calls[-1]


@dataclass(eq=False)
class SilentActor:
    start: Method = field(default_factory=Method)
    run: Method = field(default_factory=Method)
    drain: Method = field(default_factory=Method)
    pulse: Method = field(default_factory=Method)


class Fleet:
    """A cell's HTTP servers after `start`, the first `num_serving` of which serve and the rest never answer."""

    def __init__(self, num_serving: int, num_silent: int) -> None:
        self.now = 1000.0
        self.made: list[SilentActor] = []
        self.killed: list[Any] = []
        self.killed_processes: list[int] = []
        self.is_head_away = False
        self.result: tuple[bool, Any] = (False, None)
        """Of every call."""
        self.servers = HttpServers(
            self._make,
            num_serving + num_silent,
            kill_actor=self.killed.append,
            kill_process=self.killed_processes.append,
            result=lambda _: self.result,
            can_start=lambda: not self.is_head_away,
            clock=lambda: self.now,
        )
        for _ in range(num_serving):
            server = self.servers._begin(self._make())
            self.servers._serve(server, StartedHttpServer(BoundPorts(80, 81), pid=7))
        for _ in range(num_silent):
            self.servers._begin(self._make())

    def after(self, seconds: float) -> str | None:
        """As the watch does every second."""
        self.now += seconds
        self.servers.start_due()
        return self.servers.end_overdue()

    def _make(self) -> SilentActor:
        self.made.append(SilentActor())
        return self.made[-1]


def test_a_start_that_hangs_is_named_given_up_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    assert fleet.after(START_SECONDS - A_LITTLE) is None
    assert not fleet.killed
    assert fleet.after(2 * A_LITTLE) is None
    assert fleet.killed == [fleet.made[1]]
    assert "http server lost" in caplog.text
    assert "did not start within 60 s (attempt 1)" in caplog.text
    assert fleet.after(2 * START_PAUSE_SECONDS) is None
    assert len(fleet.made) == 3
    assert len(fleet.servers.calls) == 2


def test_a_server_that_is_lost_while_rays_head_is_away_is_started_when_it_is_back() -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    fleet.is_head_away = True
    fleet.after(START_SECONDS + A_LITTLE)
    assert fleet.killed == [fleet.made[1]]
    assert fleet.after(10 * START_PAUSE_SECONDS) is None
    assert len(fleet.made) == 2
    fleet.is_head_away = False
    fleet.after(A_LITTLE)
    assert len(fleet.made) == 3


def test_each_further_start_has_twice_the_time_and_comes_after_twice_the_pause() -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    for doubling in range(3):
        fleet.after(START_SECONDS * 2**doubling + A_LITTLE)
        assert len(fleet.killed) == doubling + 1
        fleet.after(START_PAUSE_SECONDS * 2 ** (doubling + 1) - A_LITTLE)
        assert len(fleet.made) == 2 + doubling
        fleet.after(2 * A_LITTLE)
        assert len(fleet.made) == 3 + doubling


def test_a_server_that_serves_is_never_overdue() -> None:
    fleet = Fleet(num_serving=2, num_silent=0)
    assert fleet.after(1000 * START_SECONDS) is None
    assert not fleet.killed


def test_a_cell_that_no_server_serves_ends_after_several_slow_starts() -> None:
    fleet = Fleet(num_serving=0, num_silent=1)
    failures = []
    for doubling in range(MAX_SLOW_STARTS):
        failures.append(fleet.after(START_SECONDS * 2**doubling + A_LITTLE))
        fleet.after(START_PAUSE_SECONDS * 2 ** (doubling + 1))
    assert failures == [
        None,
        None,
        "the HTTP server did not start within 240 s (attempt 3)",
    ]
    assert fleet.servers.calls == []


def test_where_another_serves_slow_starts_are_tried_for_ever() -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    for _ in range(4 * MAX_SLOW_STARTS):
        assert fleet.after(START_SECONDS * 2**5) is None
    assert len(fleet.made) > 2 * MAX_SLOW_STARTS


def test_while_answers_end_no_server_begins() -> None:
    fleet = Fleet(num_serving=2, num_silent=1)
    fleet.servers._start_later(fleet.servers._servers[1], "killed")
    draining = fleet.servers.drain(20.0)
    assert draining == fleet.made[0].drain.calls
    assert fleet.killed == [fleet.made[1], fleet.made[2]]
    fleet.after(2 * START_PAUSE_SECONDS)
    assert len(fleet.made) == 3


def test_one_that_serves_and_hangs_is_killed_and_one_that_starts_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    for _ in range(int(PULSE_SECONDS + HANG_SECONDS) - 1):
        fleet.now += 1.0
        fleet.servers.end_hanging()
    assert fleet.killed_processes == []
    fleet.now += 1.0
    fleet.servers.end_hanging()
    assert fleet.killed_processes == [7]
    assert fleet.made[1].pulse.calls == []
    assert fleet.killed == []  # what follows comes with the end of its call
    fleet.servers.take(fleet.servers.calls[0])
    lost = caplog.records[-1].getMessage()
    assert lost.startswith("http server lost pid=7 reason='it hung and was killed by this server: ")
    assert fleet.killed == [fleet.made[0]]


def test_at_the_end_processes_are_killed_that_do_not_hear_ray() -> None:
    fleet = Fleet(num_serving=1, num_silent=1)
    fleet.servers.kill()
    assert fleet.killed == [fleet.made[1], fleet.made[0]]
    assert fleet.killed_processes == [7]


def test_the_number_of_a_process_that_died_is_left_to_whoever_has_it_now() -> None:
    fleet = Fleet(num_serving=1, num_silent=0)
    fleet.result = False, "its process died"
    fleet.servers.kill()
    assert fleet.killed == [fleet.made[0]]
    assert fleet.killed_processes == []
