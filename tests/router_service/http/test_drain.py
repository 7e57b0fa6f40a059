"""A server that is asked to end: what has begun is finished, what comes is refused, and that takes bounded time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from router_service.http_server import HttpServer
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    COMPLETIONS,
    assert_error,
    completion_body,
    events,
    make_options,
    tokens,
)


class Draining:
    """`drain` on a thread, as an actor calls it."""

    def __init__(self, server: HttpServer, seconds: float) -> None:
        self.finished: bool | None = None
        self._thread = threading.Thread(target=self._run, args=(server, seconds))
        self._thread.start()

    def _run(self, server: HttpServer, seconds: float) -> None:
        self.finished = server.drain(seconds)

    def wait(self) -> bool | None:
        self._thread.join(timeout=30)
        return self.finished


@contextmanager
def started(engine: ScriptedEngine) -> Iterator[tuple[HttpServer, httpx.Client]]:
    server = HttpServer(make_options(engine.endpoint))
    ports = server.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{ports.port}", timeout=30) as client:
        try:
            yield server, client
        finally:
            server.stop(2)


def test_what_has_begun_is_finished_and_what_comes_is_sent_elsewhere() -> None:
    engine = ScriptedEngine(token_ids=tokens(" one two"), step_seconds=0.01)
    with (
        engine,
        started(engine) as (server, client),
        httpx.Client(base_url=client.base_url) as probe,
        httpx.Client(base_url=client.base_url) as late,
    ):
        for kept in (probe, late):
            assert kept.get("/health").status_code == 200
        with client.stream("POST", COMPLETIONS, json=completion_body(stream=True)) as response:
            engine.held = True
            draining = Draining(server, 30)
            wait_until(lambda: probe.get("/health").status_code == 503)
            refused = late.post(COMPLETIONS, json=completion_body())
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{client.base_url}/health/live")
            engine.held = False
            response.read()
        assert len(events(response)) == 17
        assert draining.wait() is True
        assert engine.aborts == []
    assert_error(refused, 503, None)
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["connection"] == "close"


def test_health_says_that_it_drains() -> None:
    with ScriptedEngine(held=True) as engine, started(engine) as (server, client):
        assert client.get("/health").status_code == 200
        draining = Draining(server, 30)
        assert draining.wait() is True
        health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert health.headers["retry-after"] == "1"


def test_answers_that_take_longer_are_left_to_be_ended() -> None:
    engine = ScriptedEngine(token_ids=tokens(" one two"), step_seconds=0.05)
    with engine, started(engine) as (server, client):
        body = completion_body(stream=True, max_tokens=200)
        with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.drain(0.1) is False
            server.stop(2, "the server is stopping")
            told = [line for line in lines if line]
        assert "the server is stopping" in told[-1]
        assert len([line for line in told if "error" in line]) == 1
        wait_until(lambda: len(engine.aborts) == 1)


def test_a_stop_ends_the_wait_for_answers() -> None:
    engine = ScriptedEngine(token_ids=tokens(" one two"), step_seconds=0.01)
    with (
        engine,
        started(engine) as (server, client),
        httpx.Client(base_url=client.base_url) as probe,
    ):
        assert probe.get("/health").status_code == 200
        body = completion_body(stream=True, max_tokens=200)
        with client.stream("POST", COMPLETIONS, json=body) as response:
            engine.held = True
            draining = Draining(server, 600)
            wait_until(lambda: probe.get("/health").status_code == 503)
            server.stop(2, "the server is stopping")
            response.read()
        assert draining.wait() is not None
    assert "the server is stopping" in response.text


def test_an_idle_server_has_finished_at_once() -> None:
    with ScriptedEngine() as engine, started(engine) as (server, _):
        assert server.drain(30) is True
        assert server.drain(30) is True
