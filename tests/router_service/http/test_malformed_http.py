"""Bytes that are not HTTP: a JSON 400, a closed connection, and everybody else is served."""

import json
import socket

import httpx
import pytest

from tests.router_service.http.helpers import assert_serves

GARBAGE = [
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
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
