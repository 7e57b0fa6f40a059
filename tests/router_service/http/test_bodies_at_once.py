"""Bodies that come at once hold a bounded number of bytes together; who sends small ones does not notice."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from router_service.request_bodies import UNCOUNTED_BYTES
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    running_server,
)

NUM_UPLOADS, REST = 3, 500
BODY = json.dumps(completion_body(user="u" * 2**18)).encode()
LIMIT = NUM_UPLOADS * (len(BODY) - UNCOUNTED_BYTES) + 10
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with running_server(engine, max_bodies_bytes=LIMIT) as (client, _):
        yield client


@pytest.fixture
def uploads(client: httpx.Client) -> Iterator[list[socket.socket]]:
    """Connections whose bodies the server waits for; it takes no other large one meanwhile, and then does again."""
    with ExitStack() as stack:
        uploads = [stack.enter_context(connection(client)) for _ in range(NUM_UPLOADS)]
        for upload in uploads:
            upload.sendall(post(len(BODY)) + BODY[:-REST])
        wait_until(lambda: is_full(client))
        yield uploads
    wait_until(lambda: asked_with(client, LIMIT - 1000).status_code == 200)


def connection(client: httpx.Client, timeout: float = 30.0) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout)


def post(num_bytes: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % num_bytes


def is_full(client: httpx.Client) -> bool:
    """Asked without taking any of the room: a body is announced and not sent."""
    with connection(client, timeout=0.1) as asker:
        asker.sendall(post(UNCOUNTED_BYTES + 2000))
        try:
            return asker.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable")
        except TimeoutError:
            return False


def asked_with(client: httpx.Client, num_bytes: int, **fields: Any) -> httpx.Response:
    """A question with so many bytes that count."""
    body = completion_body(user="u" * (UNCOUNTED_BYTES + num_bytes - 200), **fields)
    return client.post(COMPLETIONS, json=body)


def test_a_body_over_the_bound_is_sent_away_and_the_others_are_answered(
    client: httpx.Client, uploads: list[socket.socket]
) -> None:
    refused = asked_with(client, 2**16)
    assert_error(refused, 503, None)
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert error["code"] == "overloaded"
    assert f"the limit of {LIMIT}" in error["message"]
    assert error["message"].endswith("or raise http.max_bodies_bytes")
    for upload in uploads:
        upload.sendall(BODY[-REST:])
        assert upload.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_body_whose_length_is_not_declared_is_sent_away_where_the_bound_is(
    client: httpx.Client, uploads: list[socket.socket]
) -> None:
    piece = b"u" * 2**14
    with connection(client) as upload:
        upload.sendall(CHUNKED)
        for _ in range(UNCOUNTED_BYTES // len(piece) + 2):
            upload.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert upload.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable")


@pytest.mark.usefixtures("uploads")
def test_small_bodies_and_probes_are_served_beside_them(client: httpx.Client) -> None:
    assert_serves(client)
    chat = chat_body(user="u" * (UNCOUNTED_BYTES - 1000))
    assert client.post(CHAT, json=chat).status_code == 200
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"), [({}, 200), ({"prompt": 5}, 400), ({"model": "other"}, 404)]
)
def test_what_is_answered_or_refused_holds_nothing(
    fields: dict[str, Any], status: int, client: httpx.Client
) -> None:
    for _ in range(NUM_UPLOADS):
        assert asked_with(client, LIMIT - 1000, **fields).status_code == status


def test_an_answer_that_is_being_given_holds_no_body() -> None:
    body = json.dumps(completion_body(user="u" * (LIMIT - 1000))).encode()
    engine = ScriptedEngine(held=True)
    with (
        engine,
        running_server(engine, max_bodies_bytes=LIMIT) as (client, _),
        connection(client) as first,
        connection(client) as second,
    ):
        first.sendall(post(len(body)) + body)
        wait_until(lambda: engine.num_active == 1)
        second.sendall(post(len(body)) + body)
        wait_until(lambda: engine.num_active == 2)
        engine.held = False
        assert first.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert second.recv(65536).startswith(b"HTTP/1.1 200 OK")
