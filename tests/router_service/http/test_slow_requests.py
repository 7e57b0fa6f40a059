"""Requests that do not arrive: their connections end, and nobody else's."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from router_service.http_protocol import MAX_HEAD_BYTES, MIN_BODY_BYTES_PER_SECOND, ConnectionLimits
from router_service.http_server import BoundPorts
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    COMPLETIONS,
    completion_body,
    events,
    running_server,
    tokens,
)

SECONDS = 0.5
LONG_SECONDS = 3.0
"""For clients that must not be late between two pieces, however busy the machine is."""
PATIENCE = 20.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = json.dumps(completion_body()).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(token_ids=tokens(" one two three"), step_seconds=0.05) as engine:
        yield engine


@pytest.fixture(scope="module")
def ports(engine: ScriptedEngine) -> Iterator[BoundPorts]:
    with running_server(engine, limits=ConnectionLimits(receive_seconds=SECONDS)) as (_, ports):
        yield ports


@pytest.fixture(scope="module")
def long_ports(engine: ScriptedEngine) -> Iterator[BoundPorts]:
    with running_server(engine, limits=ConnectionLimits(receive_seconds=LONG_SECONDS)) as (
        _,
        ports,
    ):
        yield ports


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def read_to_end(connected: socket.socket) -> bytes:
    received = b""
    while part := connected.recv(65536):
        received += part
    return received


def read_until(connected: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        part = connected.recv(65536)
        assert part, f"the connection ended after {received!r}"
        received += part
    return received


def error_code(answer: bytes) -> tuple[bytes, str]:
    """Status line and code of an answer that the server closed after."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    code: str = json.loads(body)["error"]["code"]
    return head.split(b"\r\n")[0], code


@pytest.mark.parametrize("admin", [False, True], ids=["api", "admin"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"P",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a',
        WHOLE[:-1],
    ],
    ids=[
        "nothing",
        "a_byte",
        "half_head",
        "no_body",
        "a_byte_of_body",
        "half_chunk",
        "all_but_one",
    ],
)
def test_half_a_request_is_given_up_with_a_408(
    content: bytes, admin: bool, ports: BoundPorts
) -> None:
    with connect(ports.admin_port if admin else ports.port) as connected:
        connected.sendall(
            content.replace(b"/v1/completions", b"/admin/evict" if admin else b"/v1/completions")
        )
        answer = read_to_end(connected)
    assert error_code(answer) == (b"HTTP/1.1 408 Request Timeout", "request_timeout")


@pytest.mark.parametrize(
    "start", [b"GET /health HTTP/1.1\r\n", HEAD + b"Content-Length: 9999\r\n\r\n"]
)
def test_a_request_that_trickles_is_given_up_too(start: bytes, ports: BoundPorts) -> None:
    answer = b""
    with connect(ports.port) as connected:
        connected.sendall(start)
        connected.settimeout(SECONDS / 10)
        began = time.monotonic()
        while not answer and time.monotonic() < began + PATIENCE:
            connected.sendall(b"x")
            try:
                answer = connected.recv(65536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_flows_has_all_the_time_that_it_needs(long_ports: BoundPorts) -> None:
    piece = b" " * int(MIN_BODY_BYTES_PER_SECOND * LONG_SECONDS)
    with connect(long_ports.port) as connected:
        connected.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        end = time.monotonic() + 1.5 * LONG_SECONDS
        while time.monotonic() < end:
            connected.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(LONG_SECONDS / 10)
        connected.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert read_to_end(connected).startswith(b"HTTP/1.1 200 ")


def test_an_answer_may_take_longer_than_its_request(ports: BoundPorts) -> None:
    body = json.dumps(completion_body(max_tokens=40)).encode()  # 2 s
    with connect(ports.port) as connected:
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        connected.sendall(head + body)
        assert read_to_end(connected).startswith(b"HTTP/1.1 200 ")


def test_half_a_request_behind_a_whole_one_lets_that_one_have_its_answer(ports: BoundPorts) -> None:
    body = json.dumps(completion_body(max_tokens=40)).encode()
    with connect(ports.port) as connected:
        connected.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + HEAD)
        answer = read_to_end(connected)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 408 ") == 1


def test_a_body_that_nobody_reads_is_not_awaited_for_ever(ports: BoundPorts) -> None:
    with connect(ports.port) as connected:
        connected.sendall(
            b"POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
        )
        answer = read_to_end(connected)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_the_rest_of_a_body_whose_request_has_its_answer_is_not_of_the_next_request(
    long_ports: BoundPorts,
) -> None:
    too_large = 4 * 2**20 + 1
    with connect(long_ports.port) as connected:
        connected.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % too_large)
        assert read_until(connected, b"}}").startswith(b"HTTP/1.1 413 ")
        connected.sendall(b" " * too_large)
        connected.settimeout(1.5 * LONG_SECONDS)
        with pytest.raises(TimeoutError):
            connected.recv(1)
        connected.settimeout(PATIENCE)
        connected.sendall(
            HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
        )
        assert read_to_end(connected).startswith(b"HTTP/1.1 200 ")


def test_line_breaks_instead_of_the_next_request_do_not_keep_a_connection(
    ports: BoundPorts,
) -> None:
    with connect(ports.port) as connected:
        connected.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        read_until(connected, b'{"status":"live"}')
        connected.sendall(b"\r\n")
        answer = read_to_end(connected)
    assert error_code(answer)[1] == "request_timeout"


def test_headers_without_end_are_refused(ports: BoundPorts) -> None:
    with connect(ports.port) as connected:
        connected.sendall(HEAD + b"X: " + b"x" * MAX_HEAD_BYTES)
        answer = read_to_end(connected)
    assert error_code(answer)[1] == "headers_too_large"


def test_others_are_served_beside_a_hundred_half_requests(engine: ScriptedEngine) -> None:
    with running_server(engine, limits=ConnectionLimits(receive_seconds=PATIENCE)) as (
        client,
        ports,
    ):
        halves = [connect(ports.port) for _ in range(100)]
        for half in halves:
            half.sendall(HEAD)
        response = client.post(COMPLETIONS, json=completion_body(stream=True, max_tokens=3))
        assert len(events(response)) == 4
        for half in halves:
            half.close()
