"""A process of the cell dies, and the cell does not recover: every request gets one error, `serve` says why
and ends with 1."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deploy.planning import DEMO_MODEL
from tests.helpers.served import Served, address_of, eventually, wait_for_worker_process
from tests.integration.open_requests import OpenRequests, unhealthy_reason

pytestmark = pytest.mark.ray
END_SECONDS = 30.0


def test_a_killed_worker_ends_every_request_with_one_error_that_names_its_rank() -> None:
    rank = 0  # the one that hosts the group's rendezvous
    with Served("--ep-size", "2", "--recovery-limit", "0") as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=4, num_whole=2)
        os.kill(served.pid_of_rank(rank), signal.SIGKILL)
        for end in requests.stream_ends(10.0):
            assert not end.done
            assert not end.broken
            (error,) = end.errors
            assert f"rank {rank} is lost" in error
        for answer in requests.answers(10.0):
            assert answer.status_code == 503
            assert f"rank {rank} is lost" in answer.json()["error"]["message"]
        assert f"rank {rank} is lost" in unhealthy_reason(served, 5.0)
        _assert_failed(served, f"rank {rank} is lost")


def test_a_killed_engine_ends_the_streams_and_the_server() -> None:
    with Served("--ep-size", "1", "--recovery-limit", "0") as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=2)
        os.kill(served.pid_of("Engine"), signal.SIGKILL)
        for end in requests.stream_ends(10.0):
            assert not end.done
            assert end.errors == ["the engine is lost"] or "the engine ended" in end.errors[0]
        _assert_failed(served, "the engine ended: its process died")


def test_a_killed_http_server_that_cannot_start_again_ends_the_server() -> None:
    with Served("--ep-size", "1") as served:
        served.wait_until_ready()
        requests = OpenRequests(served, num_streams=1)
        os.kill(served.pid_of("HttpServer"), signal.SIGKILL)
        with _taking_the_port_of(served):
            (end,) = requests.stream_ends(10.0)
            assert end.broken
            assert served.wait(END_SECONDS) == 1
        _assert_failed(served, "the HTTP server ended: cannot listen on")


def test_a_worker_that_cannot_load_its_weights_fails_the_start_with_one_line(
    tmp_path: Path,
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    with Served("--ep-size", "2", "--model", str(model)) as served:
        wait_for_worker_process(served)
        os.truncate(model / "model.safetensors", 100_000)
        assert served.wait(END_SECONDS) == 1
        served.assert_nothing_left()
        (line,) = served.failure_lines
        assert line.startswith("pointsman: rank ")
        assert "model.safetensors" in line


@contextmanager
def _taking_the_port_of(served: Served) -> Iterator[None]:
    """As soon as it is free, before another process of the cell can have come up."""

    def take() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_server(address_of(served.base_url))
        return None

    with eventually(take, 5.0, "the free port"):
        yield


def _assert_failed(served: Served, reason: str) -> None:
    assert served.wait(END_SECONDS) == 1
    served.assert_nothing_left()
    (line,) = served.failure_lines
    assert reason in line
    assert "Traceback" not in served.stderr
