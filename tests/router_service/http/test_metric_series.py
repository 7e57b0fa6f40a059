"""Metrics cannot be made to grow by what clients send. Thousands of requests over real sockets to a real engine."""

import json
import random
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router_service.http.content_server import running_cell
from tests.router_service.http.helpers import CHAT, COMPLETIONS, MODEL, chat_body, completion_body

NUM_REQUESTS = 1000
RAW_PATHS = [
    b"/%ff%fe",
    b"/v1/\xff\xfe",
    b"/v1/models/%0a%22",
    b"/\xc3\xbc",
    b'/v1/"x"',
    b"/" + b"p" * 10_000,
]
RAW_VALUES = [b"\xff\xfe", b'a"b', b"a\xc3\xbcb", b"v" * 10_000, b"\xf0\x9f\x99\x82"]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_cell() as (client, _, _):
        yield client


def series(client: httpx.Client) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Name and labels of every sample; the page parses."""
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def strange_texts() -> Iterator[str]:
    """Never the same twice."""
    draw = random.Random(28)
    number = 0
    while True:
        number += 1
        kind = draw.choice(["plain", "long", "quotes", "lines", "other", "braces"])
        yield (
            f"{number}-"
            + {
                "plain": "x",
                "long": "y" * 10_000,
                "quotes": "\"'\\",
                "lines": "a\r\nb\x00\x7f",
                "other": "ü\U0001f642\u2028",
                "braces": '{le="+Inf"} 1\n# TYPE x counter',
            }[kind]
        )


def warm(client: httpx.Client) -> None:
    """Every way of a request once: computed, cached, replayed."""
    for seed in range(4):
        prompt = [seed + n for n in range(20)]
        for _ in range(2):
            client.post(COMPLETIONS, json=completion_body(prompt=prompt, max_tokens=4, n=2))


def test_thousands_of_strange_requests_add_no_series(client: httpx.Client) -> None:
    warm(client)
    texts = strange_texts()
    before = series(client)
    statuses: dict[str, set[int]] = {
        name: set() for name in ("model", "path", "fields", "retrieval")
    }
    for number in range(NUM_REQUESTS // 5):
        text = next(texts)
        headers = {"x-tenant": json.dumps(text).encode(), "user-agent": str(number).encode()}
        body = completion_body(prompt=[1, 2, 3], max_tokens=1, model=text)
        statuses["model"].add(client.post(COMPLETIONS, json=body, headers=headers).status_code)
        statuses["model"].add(client.post(CHAT, json=chat_body(model=text)).status_code)
        path = httpx.URL(
            client.base_url, raw_path=b"/v1/" + json.dumps(text[:3000]).encode().hex().encode()
        )
        statuses["path"].add(client.get(path, headers=headers).status_code)
        statuses["retrieval"].add(client.get(f"/v1/models/m{number}").status_code)
        body = completion_body(
            prompt=[number % 97, 2, 3], max_tokens=1, user=text, cache_salt=f"{text}"
        )
        statuses["fields"].add(client.post(COMPLETIONS, json=body, headers=headers).status_code)
    assert statuses == {"model": {404}, "path": {404}, "retrieval": {404}, "fields": {200}}
    assert series(client) == before


@pytest.mark.parametrize("method", [b"GET", b"POST", b"BREW"])
def test_bytes_that_no_client_library_sends_add_no_series(
    method: bytes, client: httpx.Client
) -> None:
    warm(client)
    before = series(client)
    for path in RAW_PATHS:
        for value in RAW_VALUES:
            head = b"%b %b HTTP/1.1\r\nHost: x\r\nX-Tenant: %b\r\nConnection: close\r\n\r\n"
            answer = exchange(client, head % (method, path, value))
            assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert series(client) == before


def exchange(client: httpx.Client, content: bytes) -> bytes:
    """All that the server sends until it closes."""
    received = b""
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 20) as connected:
        connected.sendall(content)
        while part := connected.recv(65536):
            received += part
    return received


def test_an_unknown_model_is_model_not_found_wherever_it_is_named(client: httpx.Client) -> None:
    texts = strange_texts()
    for _ in range(30):
        name = next(texts)
        answers = [
            client.post(COMPLETIONS, json=completion_body(model=name)),
            client.post(COMPLETIONS, json=completion_body(model=name, stream=True)),
            client.post(CHAT, json=chat_body(model=name)),
            client.get(f"/v1/models/{name[:20].encode().hex()}"),
            client.get("/v1/models/" + "".join(f"%{byte:02x}" for byte in name[:500].encode())),
        ]
        for answer in answers:
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert len(answer.content) < 1000


def test_labels_hold_nothing_that_a_client_chose(client: httpx.Client) -> None:
    warm(client)
    mark = "markedtenant"
    body = completion_body(prompt=[5, 6, 7], max_tokens=1, user=mark, cache_salt=mark)
    client.post(COMPLETIONS, json=body, headers={"x-request-id": mark})
    client.get(f"/v1/models/{mark}")
    page = client.get("/metrics").text
    assert mark not in page
    assert MODEL not in {value for _, labels in series(client) for _, value in labels}
