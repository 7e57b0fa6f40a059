"""A client that asks and does not read holds a bounded amount of memory for a bounded time."""

import json
import socket
import time

from router_service.http_protocol import ConnectionLimits
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.captured_logs import captured_logs
from tests.router_service.http.helpers import (
    assert_serves,
    completion_body,
    running_server,
)

LIMITS = ConnectionLimits(write_seconds=0.5)
PATIENT = ConnectionLimits(write_seconds=4)
"""Longer than a busy machine holds up a client that reads."""


def ask_and_read_nothing(
    port: int, *, receive_bytes: int = 4096, **fields: object
) -> socket.socket:
    """With small buffers of the system, which are filled first."""
    body = json.dumps(completion_body(**fields)).encode()
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connected.connect(("127.0.0.1", port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connected.sendall(head + body)
    return connected


def test_a_stream_that_nobody_reads_is_aborted() -> None:
    with (
        ScriptedEngine(tokens_per_step=1) as engine,
        running_server(engine, limits=LIMITS, max_model_len=10**6) as (client, ports),
        captured_logs() as logs,
        ask_and_read_nothing(ports.port, stream=True, max_tokens=900_000, logprobs=20) as silent,
    ):
        wait_until(lambda: len(engine.aborts) == 1, seconds=60)
        wait_until(lambda: logs.about("request method") != [])
        assert logs.about("does not read") != []
        assert engine.num_active == 0
        assert_serves(client)
        silent.settimeout(20)
        read = b"x"
        try:
            while read:
                read = silent.recv(2**20)
        except ConnectionResetError:
            read = b""
        assert read == b""


def test_one_that_reads_slowly_but_does_read_gets_all() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine, limits=PATIENT, max_model_len=10**6) as (_, ports),
        ask_and_read_nothing(
            ports.port, receive_bytes=2**16, stream=True, max_tokens=1500, logprobs=20
        ) as slow,
    ):
        slow.settimeout(20)
        received, start = b"", time.monotonic()
        while not received.endswith(b"0\r\n\r\n"):
            time.sleep(0.15)
            part = slow.recv(2**15)
            assert part, "given up"
            received += part
        assert time.monotonic() - start > PATIENT.write_seconds
        assert b"[DONE]" in received[-100:]
        assert engine.aborts == []


def test_a_whole_answer_that_nobody_reads_does_not_keep_its_connection() -> None:
    with (
        ScriptedEngine(tokens_per_step=500) as engine,
        running_server(engine, limits=LIMITS, max_model_len=10**6) as (client, ports),
        captured_logs() as logs,
        ask_and_read_nothing(ports.port, max_tokens=2000, logprobs=20),
    ):
        wait_until(lambda: logs.about("does not read") != [], seconds=60)
        assert_serves(client)
