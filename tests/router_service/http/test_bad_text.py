"""Bodies whose text cannot be encoded, or that are not JSON: a 400 with a path, and the server goes on."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from cluster.errors import CellError
from router_service.openai_errors import error_body
from router_service.streaming import EventStream, event
from router_service.visits import Visits
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    VOCAB_SIZE,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

LONE = ["\ud83d", "x\ud83d", "\ud83dx", "x\ud83dy", "\ude42", "\ude42\ud83d"]
JSON_TYPE = {"content-type": "application/json"}


def with_escapes(body: dict[str, Any]) -> bytes:
    """JSON in ASCII, surrogates as escapes."""
    return json.dumps(body).encode()


def message(**fields: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": "x"}, fields])


def tool_call(**function: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}


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
        (
            CHAT,
            lambda t: message(role="assistant", tool_calls=[tool_call(name=t)]),
            "messages[1].tool_calls[0].function.name",
        ),
        (
            CHAT,
            lambda t: message(role="assistant", tool_calls=[tool_call(arguments=t)]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            CHAT,
            lambda t: message(role="assistant", tool_calls=[tool_call() | {"id": t}]),
            "messages[1].tool_calls[0].id",
        ),
        (
            CHAT,
            lambda t: message(role="tool", content="x", tool_call_id=t),
            "messages[1].tool_call_id",
        ),
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


@pytest.mark.parametrize("text", ["\ufeffa", "a\ufeff", "\ufeff"])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_byte_order_mark_inside_a_string_is_an_ordinary_character(
    text: str, escaped: bool, client: httpx.Client
) -> None:
    body = completion_body(prompt=text, return_token_ids=True)
    content = json.dumps(body, ensure_ascii=escaped).encode()
    answer = client.post(COMPLETIONS, content=content, headers=JSON_TYPE)
    assert answer.status_code == 200
    assert answer.json()["prompt_token_ids"] == tokens(text)
    detokenizer = CODEC.detokenizer()
    assert "".join(map(detokenizer.add, tokens(text))) == text


def test_bad_bodies_leave_a_stream_beside_them_as_it_is() -> None:
    bad = [
        (COMPLETIONS, b'{"model": "demo", "prompt": "\xff"}'),
        (COMPLETIONS, with_escapes(completion_body(prompt="\ud83d"))),
        (COMPLETIONS, with_escapes(completion_body(prompt=[VOCAB_SIZE]))),
        (COMPLETIONS, with_escapes(completion_body(prompt=""))),
        (COMPLETIONS, b"not json"),
        (CHAT, with_escapes(chat_body(messages=[]))),
        (CHAT, with_escapes(message(role="user", content="\ude42"))),
    ]
    engine = ScriptedEngine(token_ids=tokens(" one two three"), step_seconds=0.01)
    with engine, running_server(engine) as (client, _):
        body = completion_body(stream=True, max_tokens=60, return_token_ids=True)
        alone = events(client.post(COMPLETIONS, json=body))
        with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            beside = [next(lines)]
            statuses = [client.post(path, content=c).status_code for path, c in bad]
            num_active = engine.num_active
            beside += [line for line in lines if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in beside[:-1]]
    assert (statuses, num_active) == ([400] * len(bad), 1)
    assert beside[-1] == "data: [DONE]"
    assert [c["choices"] for c in chunks] == [c["choices"] for c in alone]
    assert len(engine.submits) == 2


def test_a_log_line_about_a_stream_can_be_written_whatever_text_the_error_holds() -> None:
    async def fail_after_one() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise CellError("bad \ud83d text\nof two lines \U0001f642")

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    written = io.BytesIO()
    handler = logging.StreamHandler(io.TextIOWrapper(written, "ascii", write_through=True))
    log = logging.getLogger("pointsman.http")
    log.addHandler(handler)
    try:
        stream = EventStream(fail_after_one, lambda error: event(error_body(error)))
        scope = {"type": "http", "path": "/", "headers": []}
        asyncio.run(Visits(stream, logs_access=False)(scope, never, send))
    finally:
        log.removeHandler(handler)
    (line,) = written.getvalue().splitlines()
    assert b"bad \\ud83d text\\nof two lines \\U0001f642" in line
    assert b"".join(message.get("body", b"") for message in sent).decode().endswith("}\n\n")


async def never() -> Any:
    await asyncio.Event().wait()


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
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b"{" + b",".join(b'"k%d": 1' % i for i in range(2000)) + b"}",
    ],
    ids=range(12),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_not_a_plain_json_object_is_refused(
    content: bytes, path: str, client: httpx.Client
) -> None:
    assert_error(client.post(path, content=content, headers=JSON_TYPE), 400, None)
    assert_serves(client)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ('"temperature": NaN', "temperature", "NaN is not a JSON number"),
        ('"temperature": -Infinity', "temperature", "-Infinity is not a JSON number"),
        ('"seed": ' + "9" * 5000, "seed", "5000 digits; the limit is 4000"),
        ('"stop": ["a", -' + "9" * 5000 + "]", "stop[1]", "5000 digits; the limit is 4000"),
        ('"model": "b"', "model", "occurs twice"),
        ('"logit_bias": {"5": 1, "6": 1, "5": 2}', "logit_bias.'5'", "occurs twice"),
        ('"x": [{"a": NaN}], "y": NaN', "x[0].a", "NaN"),
        (
            '"x": {"y": [0, {' + ", ".join(f'"k{n}": 0' for n in range(513)) + "}]}",
            "x.y[1]",
            "has 513 keys; the limit is 512",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"])
def test_what_no_body_may_hold_is_refused_with_its_place(
    fields: str, field: str, words: str, path: str, client: httpx.Client
) -> None:
    content = f'{{"model": "demo", {fields}}}'.encode()
    response = client.post(path, content=content, headers=JSON_TYPE)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert words in message
    assert "set_int_max_str_digits" not in message


def test_a_number_beyond_floats_is_refused(client: httpx.Client) -> None:
    response = client.post(
        COMPLETIONS, content=b'{"model": "demo", "prompt": "a", "temperature": 1e999}'
    )
    assert_error(response, 400, "temperature")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [3, 250, 256, 300, 900, 990, 1000, 5_000, 100_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"model": "demo", "prompt": "x", "logit_bias": %s}',
        '{"model": "demo", "input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]}',
        '{"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"},'
        '{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": %s}}]},'
        '{"role": "user", "content": "x"}]}',
    ],
)
def test_a_body_of_any_depth_is_answered(depth: int, body: str, client: httpx.Client) -> None:
    path = {"prompt": COMPLETIONS, "input": "/v1/responses"}.get(body.split('"')[5], "/v1/messages")
    response = client.post(path, content=body % nested(depth))
    assert response.status_code in (200, 400), response.text
    if depth >= 256:
        assert "nested too deeply" in response.text


def test_brackets_in_strings_are_no_depth(client: httpx.Client) -> None:
    body = completion_body(prompt='["{' * 20, user="[" * 1_000, max_tokens=1)
    assert client.post(COMPLETIONS, json=body).status_code == 200
