"""Bytes that are not HTTP: a JSON 400, a closed connection, and everybody else is served."""

import json
import re
import socket

import httpx
import pytest

from tests.router_service.http.helpers import COMPLETIONS, assert_serves, completion_body

GARBAGE = [
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n",
]


def answer_to(client: httpx.Client, content: bytes) -> tuple[bytes, bytes]:
    """Head and body of all that the server sends until it closes."""
    address = (client.base_url.host, client.base_url.port or 0)
    received = b""
    with socket.create_connection(address, timeout=10) as connected:
        connected.sendall(content)
        while part := connected.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_bytes_that_are_not_http_get_a_json_error(content: bytes, client: httpx.Client) -> None:
    head, body = answer_to(client, content)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert f"content-length: {len(body)}".encode() in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert_serves(client)


def request(**fields: object) -> bytes:
    body = json.dumps(completion_body(prompt="hello", **fields)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


NEXT = [
    b"GARBAGE\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [1, 2])
@pytest.mark.parametrize("following", NEXT, ids=range(len(NEXT)))
def test_requests_before_one_that_is_malformed_are_answered_first(
    following: bytes, num_before: int, stream: bool, client: httpx.Client
) -> None:
    content = request(max_tokens=3, stream=stream) * num_before + following
    head, rest = answer_to(client, content)
    assert head.startswith(b"HTTP/1.1 200 ")
    *answers, last = re.split(rb"HTTP/1\.1 (?=\d{3} )", head + b"\r\n\r\n" + rest)[1:]
    assert [answer[:4] for answer in answers] == [b"200 "] * num_before
    end = b"data: [DONE]" if stream else b'"usage"'
    assert all(end in answer for answer in answers)
    assert last[:4] == (b"431 " if len(following) > 65536 else b"400 ")
    assert_serves(client)


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"a: " + b"b" * 65_000 + b"\r\n", 200),
        (b"a: " + b"b" * 66_000 + b"\r\n", 431),
        (b"a: " + b"b" * 130_000 + b"\r\n", 431),
        (b"a: " + b"b" * 8_000_000 + b"\r\n", 431),
        (b"".join(b"a%d: b\r\n" % number for number in range(10_000)), 431),
    ],
    ids=["65 kB", "66 kB", "130 kB", "8 MB", "10000 headers"],
)
def test_headers_over_their_limit_are_refused_however_they_come(
    headers: bytes, status: int, client: httpx.Client
) -> None:
    end = b"Connection: close\r\n\r\n"
    head, body = answer_to(client, HEAD + headers + end)
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 431:
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_who_sends_all_of_a_body_that_is_too_large_before_reading_gets_the_answer(
    client: httpx.Client,
) -> None:
    size = 40 * 2**20
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    for _ in range(3):
        told, body = answer_to(client, head.encode() + bytes(size))
        assert told.startswith(b"HTTP/1.1 413 ")
        assert json.loads(body)["error"]["code"] == "request_too_large"
    assert_serves(client)
