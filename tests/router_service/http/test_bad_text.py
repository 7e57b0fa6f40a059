"""Bodies whose text cannot be encoded, or that are not JSON: a 400 with a path, and the server goes on."""

import json
from typing import Any

import httpx
import pytest

from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
)

LONE = ["\ud83d", "x\ud83d", "\ud83dx", "x\ud83dy", "\ude42", "\ude42\ud83d"]
JSON_TYPE = {"content-type": "application/json"}


def with_escapes(body: dict[str, Any]) -> bytes:
    """JSON in ASCII, surrogates as escapes."""
    return json.dumps(body).encode()


def message(**fields: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": "x"}, fields])


@pytest.mark.parametrize("text", LONE)
@pytest.mark.parametrize(
    ("path", "make_body", "field"),
    [
        (COMPLETIONS, lambda t: completion_body(prompt=t), "prompt"),
        (COMPLETIONS, lambda t: completion_body(prompt=["a", t]), "prompt[1]"),
        (COMPLETIONS, lambda t: completion_body(stop=t), "stop"),
        (COMPLETIONS, lambda t: completion_body(stop=["a", t]), "stop[1]"),
        (COMPLETIONS, lambda t: completion_body(user=t), "user"),
        (COMPLETIONS, lambda t: completion_body(cache_salt=t), "cache_salt"),
        (COMPLETIONS, lambda t: completion_body() | {"model": t}, "model"),
        (CHAT, lambda t: chat_body(model=t), "model"),
        (CHAT, lambda t: message(role="user", content=t), "messages[1].content"),
        (
            CHAT,
            lambda t: message(role="user", content=[{"type": "text", "text": t}]),
            "messages[1].content[0].text",
        ),
        (CHAT, lambda t: message(role=t, content="x"), "messages[1].role"),
        (CHAT, lambda t: chat_body(tools=[{"function": {"name": t}}]), "tools[0].function.name"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_path(
    text: str, path: str, make_body: Any, field: str, client: httpx.Client
) -> None:
    response = client.post(path, content=with_escapes(make_body(text)), headers=JSON_TYPE)
    assert_error(response, 400, field)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_half_a_surrogate_pair_in_a_key_is_refused(path: str, client: httpx.Client) -> None:
    response = client.post(path, content=b'{"model": "demo", "\\ud83d": 1}')
    assert_error(response, 400, "'\\ud83d'")
    assert_serves(client)


def test_a_whole_escaped_pair_is_a_character(client: httpx.Client) -> None:
    body = completion_body(prompt="\U0001f642", return_token_ids=True)
    raw = client.post(COMPLETIONS, json=body).json()["prompt_token_ids"]
    escaped = client.post(COMPLETIONS, content=with_escapes(body)).json()["prompt_token_ids"]
    assert b"\\ud83d\\ude42" in with_escapes(body)
    assert escaped == raw


def test_half_a_pair_inside_tool_arguments_is_refused(client: httpx.Client) -> None:
    function = {"name": "f", "arguments": '{"a": "\\ud83d"}'}
    call = {"id": "1", "type": "function", "function": function}
    response = client.post(CHAT, json=message(role="assistant", tool_calls=[call]))
    assert_error(response, 400, "messages[1].tool_calls[0].function.arguments")


def test_nul_inside_a_string_is_an_ordinary_character(client: httpx.Client) -> None:
    body = completion_body(prompt="a\0b", return_token_ids=True)
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    assert len(response.json()["prompt_token_ids"]) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[1]",
        b'"text"',
        b"null",
        b'{"model": "demo", "prompt": "\xff"}',
        b'{"model": "demo", "prompt": "\xed\xa0\xbd"}',
        b'\xef\xbb\xbf{"model": "demo", "prompt": "a"}',
        '{"model": "demo", "prompt": "a"}'.encode("utf-16"),
        b'{"model": "demo", "prompt": "a", "temperature": NaN}',
        b'{"model": "demo", "prompt": "a", "temperature": -Infinity}',
        b'{"model": "demo", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "prompt": "a", "prompt": "b"}',
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b"{" + b",".join(b'"k%d": 1' % i for i in range(2000)) + b"}",
    ],
    ids=range(16),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_not_a_plain_json_object_is_refused(
    content: bytes, path: str, client: httpx.Client
) -> None:
    assert_error(client.post(path, content=content, headers=JSON_TYPE), 400, None)
    assert_serves(client)


def test_a_number_beyond_floats_is_refused(client: httpx.Client) -> None:
    response = client.post(
        COMPLETIONS, content=b'{"model": "demo", "prompt": "a", "temperature": 1e999}'
    )
    assert_error(response, 400, "temperature")
