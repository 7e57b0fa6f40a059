"""Lengths and ranges: what exactly fits works, what does not is a plain 400 with the real numbers, stream or not."""

import json
from typing import Any

import httpx
import pytest

from router_service.protocol import ChatBody, CompletionBody
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    render,
    running_server,
    tokens,
)

CONTEXT = 256
PROMPT = [70] * 56
ROOM = CONTEXT - len(PROMPT)
ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]


def completion_tokens(client: httpx.Client, **fields: Any) -> int:
    response = client.post(COMPLETIONS, json=completion_body(prompt=PROMPT, **fields))
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["completion_tokens"]
    return count


def test_prompt_and_max_tokens_that_exactly_fit_the_context_are_served(
    client: httpx.Client,
) -> None:
    assert completion_tokens(client, max_tokens=ROOM) == ROOM


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [ROOM + 1, 10**9, 2**63, 10**100])
def test_one_token_more_is_refused_with_all_three_numbers(
    max_tokens: int, stream: bool, client: httpx.Client
) -> None:
    body = completion_body(prompt=PROMPT, max_tokens=max_tokens, stream=stream)
    response = client.post(COMPLETIONS, json=body)
    assert_error(response, 400, "max_tokens")
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert {str(CONTEXT), str(len(PROMPT))} <= set(error["message"].split())
    assert str(max_tokens)[:80] in error["message"]


CHAT_ROOM = CONTEXT - len(tokens(render(chat_body()["messages"])))
CONTEXT_LENGTH_IS = f"this model's maximum context length is {CONTEXT} tokens"
"""By these words of OpenAI's, clients know what happened."""
CHAT_LIMITS: list[tuple[dict[str, int], str]] = [
    ({"max_completion_tokens": CHAT_ROOM + 1}, "max_completion_tokens"),
    ({"max_completion_tokens": 1_000_000}, "max_completion_tokens"),
    ({"max_tokens": CHAT_ROOM + 1}, "max_tokens"),
    ({"max_tokens": 10**100}, "max_tokens"),
    ({"max_tokens": 300, "max_completion_tokens": 300}, "max_completion_tokens"),
]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_that_exactly_fits_the_context_is_served(field: str, client: httpx.Client) -> None:
    usage = client.post(CHAT, json=chat_body(**{field: CHAT_ROOM})).json()["usage"]
    assert usage["completion_tokens"] == CHAT_ROOM
    assert usage["total_tokens"] == CONTEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("limits", "field"), CHAT_LIMITS)
def test_a_chat_over_the_limit_names_the_field_that_was_sent(
    limits: dict[str, int], field: str, stream: bool, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(stream=stream, **limits))
    assert_error(response, 400, field)
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    size = f"{CONTEXT - CHAT_ROOM} prompt tokens and {field} "
    assert error["message"].startswith(f"{field}: {CONTEXT_LENGTH_IS}, which {size}")
    assert error["message"].endswith(f"ask for at most {CHAT_ROOM}")


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, [], {}])
def test_a_chat_limit_of_the_wrong_type_or_range_names_its_field(
    value: Any, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(max_completion_tokens=value))
    assert_error(response, 400, "max_completion_tokens")


def test_of_several_prompts_the_one_without_room_is_named(client: httpx.Client) -> None:
    body = completion_body(prompt=["a", "word " * CONTEXT])
    assert_error(client.post(COMPLETIONS, json=body), 400, "prompt[1]")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 100 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused(
    length: int, stream: bool, client: httpx.Client
) -> None:
    body = completion_body(prompt=[70] * length, max_tokens=1, stream=stream)
    response = client.post(COMPLETIONS, json=body)
    assert_error(response, 400, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert CONTEXT_LENGTH_IS in response.json()["error"]["message"]
    assert "prompt is too long" in response.json()["error"]["message"]
    assert f"{length} tokens" in response.json()["error"]["message"]


def test_a_prompt_of_all_but_one_token_is_served(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion_body(prompt=[70] * (CONTEXT - 1)))
    assert response.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_completions_make_16_tokens_unless_told(
    fields: dict[str, Any], client: httpx.Client
) -> None:
    assert completion_tokens(client, **fields) == 16


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None, "max_completion_tokens": None}])
def test_a_chat_may_fill_the_context_unless_told(
    fields: dict[str, Any], client: httpx.Client
) -> None:
    usage = client.post(CHAT, json=chat_body(**fields)).json()["usage"]
    assert usage["total_tokens"] == CONTEXT


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)
def test_both_names_of_the_chat_limit_are_maxima(
    fields: dict[str, Any], client: httpx.Client
) -> None:
    usage = client.post(CHAT, json=chat_body(**fields)).json()["usage"]
    assert usage["completion_tokens"] == 3


def test_two_different_chat_limits_are_refused(client: httpx.Client) -> None:
    body = chat_body(max_tokens=3, max_completion_tokens=4)
    assert_error(client.post(CHAT, json=body), 400, "max_completion_tokens")


def test_a_chat_too_long_for_the_context_is_refused(client: httpx.Client) -> None:
    body = chat_body(messages=[{"role": "user", "content": "word " * CONTEXT}])
    response = client.post(CHAT, json=body)
    assert_error(response, 400, "messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"


BAD_VALUES: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, 1.5, "5", True, [], {})),
    *(("temperature", value) for value in (-1, 2.5, "1", True, [])),
    *(("top_p", value) for value in (0, -0.1, 1.1, "1", True)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1", True)),
    *(("stop", value) for value in ("", ["a", ""], list("abcde"), 5, {}, True)),
    *(("stream", value) for value in ("true", 1, 0, [])),
    *(("cache_salt", value) for value in ("", 5, True, [])),
    *(("ignore_eos", value) for value in ("true", 1)),
    *(("return_token_ids", value) for value in ("true", 1)),
    *(("return_routed_experts", value) for value in ("ids", 1, 0, [])),
    *(("user", value) for value in (5, True, {})),
    *(("n", value) for value in (0, -1, 129, 1.0, "1", True)),
    ("model", 5),
    ("model", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_a_value_of_the_wrong_type_or_range_is_a_plain_400_that_names_the_field(
    path: str, make_body: Any, field: str, value: Any, stream: bool, client: httpx.Client
) -> None:
    body = {**make_body(stream=stream), field: value}
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_the_server_serves_after_all_these(client: httpx.Client) -> None:
    for field, value in BAD_VALUES:
        client.post(COMPLETIONS, json=completion_body(**{field: value}))
    assert_serves(client)


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_null_is_the_same_as_absent_for_every_optional_field(
    path: str, make_body: Any, client: httpx.Client
) -> None:
    model = ChatBody if path == CHAT else CompletionBody
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    body = make_body(max_tokens=4)
    with_nulls = {**dict.fromkeys(optional), **body}
    plain, nulls = (client.post(path, json=b).json() for b in (body, with_nulls))
    assert nulls["choices"] == plain["choices"]
    assert nulls["usage"] == plain["usage"]


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_an_unset_sampling_field_takes_the_checkpoint_s_default(path: str, make_body: Any) -> None:
    with ScriptedEngine() as engine, running_server(engine) as (client, _):
        client.post(path, json=make_body(max_tokens=1))
        client.post(path, json=make_body(max_tokens=1, temperature=0.7, top_p=0.5, seed=-5))
        first, second = (submit.sampling for submit in engine.submits)
    assert (first.temperature, first.top_p) == (0.0, 1.0)
    assert (second.temperature, second.top_p, second.seed) == (0.7, 0.5, -5)
    assert first.stop_token_ids == (2, 0)


def test_a_body_over_the_limit_is_refused_by_its_declared_length(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, content=b" " * (4 * 2**20 + 1))
    assert_error(response, 413, None)
    assert_serves(client)


def test_a_body_over_the_limit_is_refused_while_it_arrives(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, content=(b" " * 2**20 for _ in range(8)))
    assert_error(response, 413, None)
    assert_serves(client)


def test_a_text_too_long_by_its_characters_alone_is_refused(client: httpx.Client) -> None:
    content = json.dumps(completion_body(prompt="x" * (3 * 2**20))).encode()
    response = client.post(COMPLETIONS, content=content)
    assert_error(response, 400, "prompt")
    assert "characters" in response.json()["error"]["message"]
