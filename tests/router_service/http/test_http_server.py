"""The server as an object: ports, threads, stopping, cost of doing nothing."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from cluster.errors import CheckpointError, ConfigError
from router_service.http_server import HttpServer
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    COMPLETIONS,
    assert_serves,
    completion_body,
    make_options,
    running_server,
    tokens,
)

NOWHERE = "tcp://127.0.0.1:9"


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_port_in_use_is_one_line_that_names_it(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(make_options(NOWHERE, **{which: port}))
        with pytest.raises(ConfigError, match=rf"^cannot listen on 127.0.0.1:{port}: .*in use$"):
            server.start()


def test_servers_that_share_their_ports_each_get_connections() -> None:
    with ScriptedEngine() as engine:
        first = HttpServer(make_options(engine.endpoint, shares_ports=True))
        ports = first.start()
        second = HttpServer(make_options(engine.endpoint, shares_ports=True))
        assert second.start(ports) == ports
        url = f"http://127.0.0.1:{ports.port}"
        with ExitStack() as stack:
            for _ in range(64):
                assert_serves(stack.enter_context(httpx.Client(base_url=url, timeout=30)))
            assert len(engine.submits) == 64
            assert len(engine.peers) == 2
        first.stop(2)
        with httpx.Client(base_url=url, timeout=30) as client:
            assert_serves(client)
        second.stop(2)


def test_a_server_that_does_not_share_its_ports_keeps_others_off_them() -> None:
    first = HttpServer(make_options(NOWHERE))
    ports = first.start()
    second = HttpServer(make_options(NOWHERE, shares_ports=True))
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{ports.port}: .*in use$"):
        second.start(ports)
    first.stop(1)


def test_a_host_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        HttpServer(make_options(NOWHERE, host="192.0.2.1")).start()


def test_the_ports_can_be_bound_again_right_after_stopping() -> None:
    first = HttpServer(make_options(NOWHERE))
    ports = first.start()
    httpx.get(f"http://127.0.0.1:{ports.port}/version")
    first.stop(1)
    second = HttpServer(make_options(NOWHERE, port=ports.port, admin_port=ports.admin_port))
    assert second.start() == ports
    second.stop(1)


def test_a_directory_without_a_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        HttpServer(make_options(NOWHERE, model_dir=tmp_path))


def test_stopping_ends_open_streams_with_an_error_event_in_bounded_time() -> None:
    with ScriptedEngine(token_ids=tokens(" one two"), step_seconds=0.05) as engine:
        server = HttpServer(make_options(engine.endpoint))
        ports = server.start()
        body = completion_body(stream=True, max_tokens=200)
        url = f"http://127.0.0.1:{ports.port}{COMPLETIONS}"
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            server.stop(2)
            assert time.monotonic() - start < 3
            last = [line for line in lines if line][-1]
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        wait_until(lambda: len(engine.aborts) == 1)


def test_stopping_ends_a_queued_request_with_503() -> None:
    with ScriptedEngine(held=True) as engine:
        server = HttpServer(make_options(engine.endpoint))
        ports = server.start()
        answers: list[httpx.Response] = []

        def ask() -> None:
            url = f"http://127.0.0.1:{ports.port}{COMPLETIONS}"
            answers.append(httpx.post(url, json=completion_body(), timeout=30))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: len(engine.submits) == 1)
        server.stop(2)
        asking.join(timeout=10)
    assert [answer.status_code for answer in answers] == [503]


def test_stopping_twice_and_before_starting_is_allowed() -> None:
    server = HttpServer(make_options(NOWHERE))
    server.stop(1)
    server.start()
    server.stop(1)
    server.stop(1)
    assert not server.alive


def test_waiting_ends_when_the_server_is_stopped() -> None:
    server = HttpServer(make_options(NOWHERE))
    server.start()
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    assert waiting.is_alive()
    server.stop(1)
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_small_answers_are_not_held_back_by_the_network_stack() -> None:
    """Held back, every one of them would take the 40 ms after which a receiver acknowledges."""
    deadline = time.monotonic() + 60
    with ScriptedEngine() as engine, running_server(engine) as (client, _):
        while True:
            start = time.monotonic()
            client.post(COMPLETIONS, json=completion_body(n=0))
            now = time.monotonic()
            if now - start < 0.02:
                break
            assert now < deadline, "no answer within 20 ms"


def assert_ready(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200


def test_the_server_starts_without_torch_transformers_and_ray() -> None:
    code = (
        "import sys, router_service.http_server; "
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_a_restarted_server_serves_the_same_engine() -> None:
    with ScriptedEngine() as engine:
        for _ in range(2):
            with running_server(engine) as (client, _):
                assert_serves(client)
