"""Request ids and access lines: one of each for every answer, and nothing in a log of what a request says."""

import json
import re
import socket
from typing import Any

import httpx
import pytest

from router_service.api_keys import parse_api_keys
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.captured_logs import captured_logs
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    chat_body,
    completion_body,
    running_server,
)

MADE = re.compile(r"req-[0-9a-f]{32}")
MARKER = "xyzzy7marker"


@pytest.mark.parametrize("given", ["abc", "Trace-1/2:3.4_5", "a" * 128])
def test_a_client_s_plain_request_id_comes_back(given: str, client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json=completion_body(), headers={"x-request-id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [b"", b"a" * 129, b"a b", b"a\tb", b"\xff", b'"a"', b"a;b"])
def test_another_one_is_replaced(given: bytes, client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"x-request-id": given})
    assert MADE.fullmatch(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, completion_body(stream=True)),
        ("POST", COMPLETIONS, {}),
        ("POST", COMPLETIONS, completion_body(model="nope")),
        ("GET", COMPLETIONS, None),
        ("GET", "/nope", None),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
    ],
)
def test_every_answer_has_an_id(method: str, path: str, body: Any, client: httpx.Client) -> None:
    first, second = (client.request(method, path, json=body) for _ in range(2))
    assert MADE.fullmatch(first.headers["x-request-id"])
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_what_never_becomes_a_request_has_an_id_and_a_line_too() -> None:
    with ScriptedEngine() as engine, running_server(engine) as (_, ports), captured_logs() as logs:
        with socket.create_connection(("127.0.0.1", ports.port), timeout=20) as connected:
            connected.sendall(b"NONSENSE\r\n\r\n")
            answer = connected.recv(65536).decode()
        (request_id,) = MADE.findall(answer)
        wait_until(lambda: logs.about(request_id) != [])
    assert "status=400" in logs.about(request_id)[0]


def test_a_request_leaves_one_line_that_tells_what_it_took() -> None:
    keys = parse_api_keys("alice secret-key", "keys")
    with (
        ScriptedEngine() as engine,
        running_server(engine, api_keys=keys) as (client, _),
        captured_logs() as logs,
    ):
        body = completion_body(prompt=[70, 71, 72], max_tokens=5, stream=True)
        headers = {"x-request-id": "mine", "authorization": "Bearer secret-key"}
        client.post(COMPLETIONS, json=body, headers=headers)
        client.post(CHAT, json=chat_body(), headers={"x-request-id": "theirs"})
        wait_until(lambda: logs.about("request_id=theirs") != [])
        (served,), (refused,) = logs.about("request_id=mine"), logs.about("request_id=theirs")
    assert re.fullmatch(
        r"request method=POST path='/v1/completions' status=200 whole=yes seconds=\d+\.\d{3} "
        "prompt_tokens=3 completion_tokens=5 request_id=mine tenant=alice",
        served,
    )
    assert "status=401" in refused
    assert refused.endswith("tenant=-")
    assert logs.about("secret-key") == []


def test_probes_leave_a_line_only_when_they_fail() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (client, _),
        captured_logs() as logs,
    ):
        for path in ("/health", "/health/live", "/metrics"):
            assert client.get(path).status_code == 200
        engine.ready = False
        client.get("/health", headers={"x-request-id": "failed"})
        client.get("/version")
        wait_until(lambda: logs.about("path='/version'") != [])
    assert len(logs.about("request method")) == 2
    assert "status=503" in logs.about("failed")[0]


def test_access_lines_can_be_switched_off() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine, logs_access=False) as (client, _),
        captured_logs() as logs,
    ):
        assert client.get("/version").headers["x-request-id"]
        client.post(COMPLETIONS, json=completion_body())
    assert logs.about("request method") == []


def test_a_stream_that_breaks_off_is_told_with_its_id() -> None:
    with (
        ScriptedEngine(error_after=2) as engine,
        running_server(engine) as (client, _),
        captured_logs() as logs,
    ):
        body = completion_body(stream=True)
        client.post(COMPLETIONS, json=body, headers={"x-request-id": "broken"})
        wait_until(lambda: len(logs.about("request_id=broken")) == 2)
    assert "stream broke off" in logs.about("request_id=broken")[0]


GOOD = [
    (COMPLETIONS, completion_body(prompt=MARKER)),
    (COMPLETIONS, completion_body(prompt=MARKER, stream=True, echo=True, logprobs=1)),
    (COMPLETIONS, completion_body(prompt=MARKER, cache_salt=MARKER, user=MARKER, stop=MARKER)),
    (CHAT, chat_body(messages=[{"role": "user", "content": MARKER}])),
]
BAD: list[tuple[str, Any]] = [
    (COMPLETIONS, completion_body(prompt=MARKER, max_tokens=10**6)),
    (COMPLETIONS, completion_body(prompt=MARKER * 1000)),
    (COMPLETIONS, completion_body(prompt={"text": MARKER})),
    (COMPLETIONS, completion_body(model=MARKER)),
    (COMPLETIONS, completion_body(**{MARKER: 1})),
    (CHAT, chat_body(messages=[{"role": MARKER, "content": MARKER}])),
    (CHAT, chat_body(messages=[{"role": "user", "content": [{"type": MARKER}]}])),
    (CHAT, chat_body(messages=MARKER)),
]


@pytest.mark.parametrize("error_after", [None, 1])
def test_nothing_of_a_prompt_is_logged_whatever_becomes_of_it(error_after: int | None) -> None:
    with (
        ScriptedEngine(error_after=error_after) as engine,
        running_server(engine) as (client, ports),
        captured_logs() as logs,
    ):
        statuses = [client.post(path, json=body).status_code for path, body in [*GOOD, *BAD]]
        broken = json.dumps(completion_body(prompt=MARKER))[:-1]
        client.post(COMPLETIONS, content=broken)
        client.post(COMPLETIONS, content=b"\xff" + broken.encode())
        with socket.create_connection(("127.0.0.1", ports.port), timeout=20) as connected:
            connected.sendall(f"{MARKER} / HTTP/1.1\r\n\r\n{broken}".encode())
            assert connected.recv(65536).startswith(b"HTTP/1.1 400")
        client.get("/version")
        wait_until(lambda: logs.about("path='/version'") != [])
    assert statuses[len(GOOD) :] == [400, 400, 400, 404, 400, 400, 400, 400]
    assert len(logs.about("request method")) == len(statuses) + 3
    assert logs.about(MARKER) == []
    assert logs.about(MARKER[:5]) == []
