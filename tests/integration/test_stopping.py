"""Signals end `pointsman serve` and everything that it started, in every phase of its life."""

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.helpers.served import (
    GONE_SECONDS,
    Served,
    eventually,
    free_port,
    wait_for_worker_process,
)
from tests.integration.open_requests import OpenRequests, health

pytestmark = pytest.mark.ray
INTERRUPTED = 130
AGENTS_THAT_LINGER = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Ray's; they look for their killed server for a minute."""


def test_a_second_signal_ends_the_streams_and_it_can_start_again_on_its_port() -> None:
    port = str(free_port())
    with Served("--ep-size", "2", "--port", port) as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=3, num_whole=1)
        served.terminate()
        served.wait_for_stderr("stopping: ", 5.0)
        served.terminate()
        assert served.wait(GONE_SECONDS) == 0
        served.assert_nothing_left()
        for end in requests.stream_ends(5.0):
            assert not end.done
            assert end.broken or len(end.errors) == 1
            assert all("stopping" in error for error in end.errors)
        assert [answer.status_code for answer in requests.answers(5.0)] == [503]
    with Served("--ep-size", "2", "--port", port) as again:
        again.wait_until_ready()
        assert health(again).status_code == 200
        requests = OpenRequests(again, num_streams=1)
        os.kill(again.pid_of_rank(1), signal.SIGSTOP)  # a step that hangs does not hold up the end
        again.interrupt()
        assert again.wait(GONE_SECONDS) == 0
        again.assert_nothing_left()
        (end,) = requests.stream_ends(5.0)
        assert end.broken or end.errors == ["the server is stopping"]
        assert again.failure_lines == []


def _while_ray_starts(served: Served) -> None:
    eventually(
        lambda: any("gcs_server" in p.name() for p in served.processes()),
        30.0,
        "Ray's first process",
    )


def _while_it_loads(served: Served) -> None:
    served.wait_for_stderr("loading weights", 60.0)


@pytest.mark.parametrize(
    ("moment", "send"),
    [
        (_while_ray_starts, Served.interrupt),
        (_while_ray_starts, Served.terminate),
        (wait_for_worker_process, Served.terminate),
        (_while_it_loads, Served.interrupt),
    ],
)
def test_a_signal_during_the_start_ends_it(
    moment: Callable[[Served], None], send: Callable[[Served], None]
) -> None:
    with Served("--ep-size", "1") as served:
        moment(served)
        send(served)
        assert served.wait(GONE_SECONDS) == INTERRUPTED
        served.assert_nothing_left()
        assert served.failure_lines == ["pointsman: interrupted before it was ready"]
        assert "Traceback" not in served.stderr


def test_a_killed_parent_takes_its_processes_along() -> None:
    with Served("--ep-size", "1") as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=1)
        os.kill(served.process.pid, signal.SIGKILL)
        eventually(lambda: _names(served) <= AGENTS_THAT_LINGER, 15.0, "the end of its processes")
        (end,) = requests.stream_ends(5.0)
        assert end.broken or end.errors
        # nobody is left who could remove the temporary directory
        (left,) = served.directory.iterdir()
        assert re.fullmatch(r"pointsman-\w+", left.name)


def _names(served: Served) -> set[str]:
    return {process.name() for process in served.processes()}
