"""A client that goes away costs nothing more: the engine is told, streamed or not, running or queued."""

import gc
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from router_service.http_protocol import ConnectionLimits, JsonErrorProtocol
from router_service.http_server import BoundPorts
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_serves,
    chat_body,
    completion_body,
    running_server,
    tokens,
)

LONG = {"max_tokens": 200}
REQUESTS = [
    (COMPLETIONS, completion_body(stream=True, **LONG)),
    (COMPLETIONS, completion_body(**LONG)),
    (CHAT, chat_body(stream=True, **LONG)),
    (CHAT, chat_body(**LONG)),
]


def slow_engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(token_ids=tokens(" one two three"), step_seconds=0.05, **changes)


@contextmanager
def connection(ports: BoundPorts, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A socket on which the request was sent; closed at the end."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", ports.port), timeout=10) as connected:
        connected.sendall(head.encode() + content)
        yield connected


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_leaving_while_tokens_are_made_aborts_the_request(path: str, body: dict[str, Any]) -> None:
    with slow_engine() as engine, running_server(engine) as (client, ports):
        with connection(ports, path, body):
            wait_until(lambda: engine.num_active == 1)
        wait_until(lambda: len(engine.aborts) == 1)
        assert engine.aborts == [engine.submits[0].request_id]
        assert_serves(client)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_leaving_while_still_queued_aborts_the_request(path: str, body: dict[str, Any]) -> None:
    with slow_engine(held=True) as engine, running_server(engine) as (_, ports):
        with connection(ports, path, body):
            wait_until(lambda: len(engine.submits) == 1)
        wait_until(lambda: len(engine.aborts) == 1)
        assert engine.num_active == 0


def test_leaving_after_some_chunks_aborts_the_stream() -> None:
    with slow_engine() as engine, running_server(engine) as (client, _):
        body = completion_body(stream=True, **LONG)
        with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            for _ in range(3):
                assert next(lines).startswith("data: ")
                next(lines)
        wait_until(lambda: len(engine.aborts) == 1)


def test_a_half_closed_connection_counts_as_left() -> None:
    with slow_engine() as engine, running_server(engine) as (_, ports):
        path, body = REQUESTS[0]
        with connection(ports, path, body) as connected:
            wait_until(lambda: engine.num_active == 1)
            connected.shutdown(socket.SHUT_WR)
            wait_until(lambda: len(engine.aborts) == 1)


def test_leaving_a_batch_aborts_each_of_its_prompts_once() -> None:
    with slow_engine() as engine, running_server(engine) as (_, ports):
        body = completion_body(prompt=["a", "b", "c"], stream=True, **LONG)
        with connection(ports, COMPLETIONS, body):
            wait_until(lambda: engine.num_active == 3)
        wait_until(lambda: len(engine.aborts) == 3)
        assert sorted(engine.aborts) == sorted(submit.request_id for submit in engine.submits)


def test_fifty_clients_that_leave_at_once_disturb_nobody_else() -> None:
    with slow_engine() as engine, running_server(engine) as (client, ports):
        opened = [connection(ports, *REQUESTS[index % 4]) for index in range(50)]
        for request in opened:
            request.__enter__()
        wait_until(lambda: engine.num_active == 50)
        for request in opened:
            request.__exit__(None, None, None)
        wait_until(lambda: len(engine.aborts) == 50)
        answer = client.post(COMPLETIONS, json=completion_body(max_tokens=3)).json()
        assert answer["choices"][0]["text"] == " one two three"
        assert engine.num_active == 0


def test_a_client_that_leaves_while_sending_its_body_reaches_no_engine(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    before = len(engine.submits)
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port or 0)) as connected:
        connected.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
    assert_serves(client)
    assert len(engine.submits) == before + 1


def test_a_request_that_ended_is_not_aborted(client: httpx.Client, engine: ScriptedEngine) -> None:
    client.post(COMPLETIONS, json=completion_body(stop=" three", max_tokens=200))
    client.post(COMPLETIONS, json=completion_body(stream=True))
    assert client.get("/health").status_code == 200
    assert engine.aborts == []


def test_nothing_is_kept_of_a_connection_that_is_reset_after_its_answer() -> None:
    limits = ConnectionLimits()
    with ScriptedEngine() as engine, running_server(engine, limits=limits) as (_, ports):
        with connection(ports, COMPLETIONS, completion_body()) as connected:
            assert connected.recv(1) == b"H"
            wait_until(lambda: num_kept(limits) == 1)
            reset_at_the_end = struct.pack("ii", 1, 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_the_end)
        wait_until(lambda: num_kept(limits) == 0)


def num_kept(limits: ConnectionLimits) -> int:
    """Connections of the server with these limits that something still refers to."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), JsonErrorProtocol)]
    return sum(connection.limits is limits for connection in found)
